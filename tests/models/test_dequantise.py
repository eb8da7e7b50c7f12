"""The fast paths give the very bits that the gguf library gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from outrider.models.dequantise import _FAST, dequantise


@pytest.mark.parametrize("kind", list(_FAST), ids=lambda kind: kind.name)
def test_fast_paths_equal_the_library_bit_for_bit(kind: GGMLQuantizationType) -> None:
    """All quants, scales of any finite size and sign."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (7, 3, 40 * block_bytes), dtype=np.uint8)
    scales = raw.reshape(-1, block_bytes)
    for byte in (1, 3) if kind is GGMLQuantizationType.Q4_1 else (1,):
        scales[:, byte] &= 0xBB  # the exponent of a float16 short of infinity
    found = dequantise(raw.reshape(-1), kind, (7, 3, 40 * block))
    assert found.dtype == np.float32
    assert np.array_equal(found, gguf.dequantize(raw, kind))


def test_result_does_not_share_the_files_memory() -> None:
    values = np.arange(4, dtype=np.float32)
    found = dequantise(values.view(np.uint8), GGMLQuantizationType.F32, (4,))
    found += 1
    assert values.tolist() == [0, 1, 2, 3]
