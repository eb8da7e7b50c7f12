"""Training's kernels: losses over a draft vocabulary and attention of unroll steps, in bfloat16 on the CPU.

They run where products have an instruction of their own for whole tiles (AMX); elsewhere PyTorch's are as good, and
:func:`training_kernels` gives None. A set of kernels that ``OUTRIDER_NATIVE`` asks for by name is taken at its word.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outrider.native.library import Context, Unavailable, library, open_context, requested_kernels

__all__ = [
    "AttentionKernels",
    "CTrainMatrix",
    "LossKernels",
    "fits_attention",
    "scratch_bytes",
    "training_kernels",
]

_TINY = 1e-38
_PACK, _LOGITS, _GRADIENTS = range(3)


class CTrainMatrix(Structure):
    """``TrainMatrix``."""

    _fields_ = [("values", c_void_p), ("stride", c_int64), ("num_rows", c_int32), ("width", c_int32)]

    @staticmethod
    def of(x: Tensor) -> CTrainMatrix:
        """A bfloat16 matrix whose rows are contiguous."""
        assert x.dtype == torch.bfloat16 and x.dim() == 2 and x.stride(1) == 1
        return CTrainMatrix(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1])


class CTrainLoss(Structure):
    """``TrainLoss``."""

    _fields_ = [
        ("hidden", CTrainMatrix),
        ("head", c_void_p),
        ("num_outputs", c_int32),
        ("width", c_int32),
        ("packed_head", c_void_p),
        ("scratch", c_void_p),
        ("num_law_tokens", c_int64),
        ("law_ids", c_void_p),
        ("picked", c_void_p),
        ("shifts", c_void_p),
        ("sums", c_void_p),
        ("pulls", c_void_p),
        ("scales", c_void_p),
        ("hidden_grad", c_void_p),
        ("head_grad", c_void_p),
        ("head_sums", c_void_p),
        ("is_first", c_int32),
        ("is_last", c_int32),
    ]


class CTrainSegment(Structure):
    """``TrainSegment``."""

    _fields_ = [("first_key", c_int32), ("num_keys", c_int32), ("first_query", c_int32), ("num_queries", c_int32)]


class CTrainHeads(Structure):
    """``TrainHeads``."""

    _fields_ = [("values", c_void_p), ("stride", c_int64)]

    @staticmethod
    def of(x_RHC: Tensor) -> CTrainHeads:
        """Bfloat16 rows, each contiguous."""
        assert x_RHC.dtype == torch.bfloat16 and x_RHC.stride()[1:] == (x_RHC.shape[2], 1)
        return CTrainHeads(x_RHC.data_ptr(), x_RHC.stride(0))


_MOST_OWN, _MOST_MEMBERS, _MOST_WIDTH = 16, 16, 256


class CTrainAttention(Structure):
    """``TrainAttention``."""

    _fields_ = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_width", c_int32),
        ("num_own", c_int32),
        ("scale", c_float),
        ("num_segments", c_int32),
        ("segments", c_void_p),
        ("indexes", c_void_p),
        ("num_queries", c_int64),
        ("queries", CTrainHeads),
        ("keys", CTrainHeads),
        ("values", CTrainHeads),
        ("own_keys", CTrainHeads * _MOST_OWN),
        ("own_values", CTrainHeads * _MOST_OWN),
        ("out", CTrainHeads),
        ("log_sums", c_void_p),
        ("slopes", CTrainHeads),
        ("query_grad", CTrainHeads),
        ("key_grad", CTrainHeads),
        ("value_grad", CTrainHeads),
        ("own_key_grads", CTrainHeads * _MOST_OWN),
        ("own_value_grads", CTrainHeads * _MOST_OWN),
        ("scratch", c_void_p),
        ("thread_bytes", c_int64),
        ("next_unit", c_int32),
    ]


@functools.lru_cache(maxsize=1)
def _declared() -> ctypes.CDLL:
    lib = library()
    lib.outrider_loss_bytes.argtypes, lib.outrider_loss_bytes.restype = [c_int64, c_int64, c_int64, c_int32], c_int64
    lib.outrider_loss.argtypes, lib.outrider_loss.restype = [c_void_p, c_int32, POINTER(CTrainLoss)], None
    lib.outrider_attention_bytes.argtypes, lib.outrider_attention_bytes.restype = [POINTER(CTrainAttention)], c_int64
    lib.outrider_attention.argtypes = [c_void_p, c_int32, POINTER(CTrainAttention)]
    lib.outrider_attention.restype = None
    return lib


def training_kernels() -> Context | None:
    """The context that training runs on, of as many threads as PyTorch's; None where PyTorch's products are as good."""
    asked = requested_kernels()
    return _context("amx" if asked == "auto" else asked, torch.get_num_threads(), os.getpid())


@functools.lru_cache(maxsize=4)
def _context(kernels: str, num_threads: int, process: int) -> Context | None:
    """Opened once a process, or found missing once: a compiler that fails takes its time."""
    try:
        return open_context(kernels, num_threads)
    except Unavailable:
        return None


_scratch: dict[str, Tensor] = {}


def scratch_bytes(name: str, num_bytes: int) -> Tensor:
    """Memory that is kept from call to call, for one thread's use."""
    if name not in _scratch or len(_scratch[name]) < num_bytes:
        _scratch[name] = torch.empty(num_bytes, dtype=torch.uint8)
    return _scratch[name]


class LossKernels:
    """Logits of a head, and the gradients of losses whose slope is ``scale (q - pull)`` with few pulls a row.

    Rows come in pieces: :meth:`logits`, then :meth:`gradients` of the same piece.

    Args:
        context: threads and instruction set.
        head_UD: float32; multiplied as bfloat16.
    """

    def __init__(self, context: Context, head_UD: Tensor) -> None:
        assert head_UD.dtype == torch.float32 and head_UD.is_contiguous()
        self._context, self._lib = context, _declared()
        (num_outputs, width), self._head = head_UD.shape, head_UD
        num_tiles = -(-num_outputs // 32) * -(-width // 32)
        own_rows = context.num_threads * -(-width // 32)
        packed, sums = scratch_bytes("head", 2048 * (2 * num_tiles + own_rows)), scratch_bytes("sums", 4096 * num_tiles)
        self._job = CTrainLoss(head=head_UD.data_ptr(), num_outputs=num_outputs, width=width, is_first=1)
        self._job.packed_head, self._job.head_sums = packed.data_ptr(), sums.data_ptr()
        self._run(_PACK)

    def _run(self, part: int) -> None:
        self._lib.outrider_loss(self._context.handle, part, ctypes.byref(self._job))

    def logits(self, hidden_RD: Tensor, law_ids_RK: Tensor) -> tuple[Tensor, Tensor]:
        """The piece's logits at ``law_ids``, float32 ``[R, K]``, and the logarithm of all its exponentials' sum, ``[R]``.

        Logits more than 87 below the row's largest have no exponential in float32 and come out as about that.
        """
        (num_rows, width), job = hidden_RD.shape, self._job
        num_threads = self._context.num_threads
        scratch = scratch_bytes("loss", self._lib.outrider_loss_bytes(num_rows, width, job.num_outputs, num_threads))
        picked_RK, both_2R = torch.empty(law_ids_RK.shape), torch.empty(2, num_rows)
        job.hidden, job.scratch, self._piece = (
            CTrainMatrix.of(hidden_RD),
            scratch.data_ptr(),
            (hidden_RD, law_ids_RK, both_2R),
        )
        job.law_ids, job.num_law_tokens = law_ids_RK.data_ptr(), law_ids_RK.shape[1]
        job.picked, job.shifts, job.sums = picked_RK.data_ptr(), both_2R[0].data_ptr(), both_2R[1].data_ptr()
        self._run(_LOGITS)
        shifts_R, sums_R = both_2R
        return picked_RK.clamp_min_(_TINY).log_() + shifts_R.unsqueeze(1), shifts_R + sums_R.log()

    def gradients(
        self, pulls_RK: Tensor, scales_R: Tensor, hidden_grad_RD: Tensor, head_grad_UD: Tensor | None
    ) -> None:
        """Write the piece's gradient by its hidden rows, and add to that of the head.

        Args:
            pulls_RK: what is taken from the head's law at the piece's ``law_ids``, float32.
            scales_R: factor of each row, float32.
            hidden_grad_RD: written.
            head_grad_UD: float32; given with the last piece, and then written.
        """
        job = self._job
        job.pulls, job.scales, job.hidden_grad = pulls_RK.data_ptr(), scales_R.data_ptr(), hidden_grad_RD.data_ptr()
        job.is_last, job.head_grad = head_grad_UD is not None, 0 if head_grad_UD is None else head_grad_UD.data_ptr()
        self._run(_GRADIENTS)
        job.is_first = 0


def fits_attention(queries_QHC: Tensor, num_kv_heads: int, num_own: int) -> bool:
    """True if the attention kernels can take it: bfloat16 on the CPU, and not more of anything than they have room for."""
    on_cpu = queries_QHC.device.type == "cpu" and queries_QHC.dtype == torch.bfloat16
    members, width = queries_QHC.shape[1] // num_kv_heads, queries_QHC.shape[2]
    return on_cpu and num_own <= _MOST_OWN and members <= _MOST_MEMBERS and width <= _MOST_WIDTH


class AttentionKernels:
    """Attention of one unroll step over packed texts.

    Args:
        context: threads and instruction set.
        segments_T4: of each text its first key, number of keys, first query, number of queries; int32.
        indexes_Q: of each text's queries, one text behind the other, in their text; int32.
    """

    def __init__(self, context: Context, segments_T4: Tensor, indexes_Q: Tensor) -> None:
        self._context, self._lib = context, _declared()
        # Those that take longest first, so that threads end at about the same time.
        order = (segments_T4[:, 1].long() * segments_T4[:, 3]).argsort(descending=True, stable=True)
        self._segments_T4, self._indexes_Q = segments_T4[order].contiguous(), indexes_Q

    def forward(
        self, queries_QHC: Tensor, keys_RGC: Tensor, values_RGC: Tensor, own: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What :func:`outrider.train.attention.unrolled_attention` returns, and the logarithms of all sums, ``[H, Q]``."""
        job = self._job(queries_QHC, keys_RGC, values_RGC, own)
        out_QHC, log_sums_HQ = self._blank(queries_QHC), torch.empty(queries_QHC.shape[1], queries_QHC.shape[0])
        job.out, job.log_sums = CTrainHeads.of(out_QHC), log_sums_HQ.data_ptr()
        self._run(job, is_backward=False)
        return out_QHC, log_sums_HQ

    def backward(
        self,
        slopes_QHC: Tensor,
        forward: tuple[Tensor, Tensor],
        inputs: tuple[Tensor, Tensor, Tensor],
        own: Sequence[Tensor],
    ) -> list[Tensor]:
        """Gradients by queries, keys, values and each of ``own``, from what ``forward`` took and returned."""
        out_QHC, log_sums_HQ = forward
        queries_QHC, keys_RGC, values_RGC = inputs
        job = self._job(queries_QHC, keys_RGC, values_RGC, own)
        grads = [self._blank(queries_QHC), torch.zeros_like(keys_RGC), torch.zeros_like(values_RGC)]
        grads = [x.contiguous() for x in grads] + [self._blank(x) for x in own]
        job.out, job.log_sums, job.slopes = CTrainHeads.of(out_QHC), log_sums_HQ.data_ptr(), CTrainHeads.of(slopes_QHC)
        job.query_grad, job.key_grad, job.value_grad = (CTrainHeads.of(x) for x in grads[:3])
        for index, grad in enumerate(grads[3:]):
            (job.own_value_grads if index % 2 else job.own_key_grads)[index // 2] = CTrainHeads.of(grad)
        self._run(job, is_backward=True)
        return grads

    def _job(self, queries_QHC: Tensor, keys_RGC: Tensor, values_RGC: Tensor, own: Sequence[Tensor]) -> CTrainAttention:
        job = CTrainAttention()
        (job.num_queries, job.num_heads, job.head_width), job.num_kv_heads = queries_QHC.shape, keys_RGC.shape[1]
        job.scale, job.num_own = job.head_width**-0.5, len(own) // 2
        job.num_segments, job.segments = len(self._segments_T4), self._segments_T4.data_ptr()
        job.indexes = self._indexes_Q.data_ptr()
        job.queries, job.keys, job.values = (CTrainHeads.of(x) for x in (queries_QHC, keys_RGC, values_RGC))
        for index, x in enumerate(own):
            (job.own_values if index % 2 else job.own_keys)[index // 2] = CTrainHeads.of(x)
        return job

    def _blank(self, like_QHC: Tensor) -> Tensor:
        """Contiguous, zeros where there are queries of no text."""
        out = torch.empty(like_QHC.shape, dtype=like_QHC.dtype)
        out[len(self._indexes_Q) :].zero_()
        return out

    def _run(self, job: CTrainAttention, *, is_backward: bool) -> None:
        job.thread_bytes = self._lib.outrider_attention_bytes(ctypes.byref(job))
        scratch = scratch_bytes("attention", job.thread_bytes * self._context.num_threads)
        job.scratch = scratch.data_ptr()
        self._lib.outrider_attention(self._context.handle, is_backward, ctypes.byref(job))
