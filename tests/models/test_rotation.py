"""The stream's rotation: orthogonal at any width, and a cure for outliers."""

from __future__ import annotations

import pytest
import torch

from outrider.models.rotation import StreamRotation


@pytest.mark.parametrize("width", [1, 7, 8, 48, 576])
def test_rotation_is_orthogonal_and_undone(width: int) -> None:
    rotation = StreamRotation(width)
    matrix = rotation.rotate(torch.eye(width))
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(width), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotation.unrotate(matrix), torch.eye(width), rtol=1e-5, atol=1e-5)


def test_products_are_those_of_the_unrotated() -> None:
    rotation = StreamRotation(48)
    x, reader, writer = torch.randn(3, 48), torch.randn(20, 48), torch.randn(48, 30)
    torch.testing.assert_close(rotation.rotate(x) @ rotation.rotate(reader).t(), x @ reader.t(), rtol=1e-4, atol=1e-4)
    hidden = torch.randn(3, 30)
    rotated = hidden @ rotation.rotate_outputs(writer).t()
    torch.testing.assert_close(rotation.unrotate(rotated), hidden @ writer.t(), rtol=1e-4, atol=1e-4)


def test_an_outlier_channel_is_spread() -> None:
    x = torch.randn(576, generator=torch.Generator().manual_seed(0))
    x[100] = 300.0
    spread = StreamRotation(576).rotate(x)
    assert x.abs().amax() / x.norm() > 0.99 and spread.abs().amax() / spread.norm() < 0.1
