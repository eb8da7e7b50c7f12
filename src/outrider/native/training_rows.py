"""Training's kernels for single rows (norm, gated activation, rotary embedding) and for gradients of matrices."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outrider.native.library import Context, library
from outrider.native.training import CTrainMatrix, scratch_bytes, training_kernels

__all__ = ["RowKernels", "row_kernels"]

_NORM, _NORM_BACK, _GATE, _GATE_BACK, _ROTATE, _ROTATE_BACK = range(6)
_LANES, _PANEL = 16, 32


class CTrainRows(Structure):
    """``TrainRows``."""

    _fields_ = [
        ("x", CTrainMatrix),
        ("slopes", CTrainMatrix),
        ("out", c_void_p),
        ("weight", c_void_p),
        ("eps", c_float),
        ("head_width", c_int32),
        ("scales", c_void_p),
        ("weight_sums", c_void_p),
        ("weight_grad", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    ]


class CTrainWeight(Structure):
    """``TrainWeight``."""

    _fields_ = [
        ("slopes", CTrainMatrix),
        ("inputs", CTrainMatrix),
        ("grad", c_void_p),
        ("sums", c_void_p),
        ("is_first", c_int32),
        ("is_last", c_int32),
        ("scratch", c_void_p),
        ("is_turned", c_int32),
    ]


@functools.lru_cache(maxsize=1)
def _declared() -> ctypes.CDLL:
    lib = library()
    lib.outrider_rows.argtypes, lib.outrider_rows.restype = [c_void_p, c_int32, POINTER(CTrainRows)], None
    lib.outrider_weight_bytes.argtypes, lib.outrider_weight_bytes.restype = [POINTER(CTrainWeight), c_int32], c_int64
    lib.outrider_weight_gradient.argtypes = [c_void_p, POINTER(CTrainWeight)]
    lib.outrider_weight_gradient.restype = None
    return lib


def row_kernels(x: Tensor, width: int) -> RowKernels | None:
    """The kernels, if they can take such rows: bfloat16 on the CPU, and a width that fills the registers."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or width % _LANES:
        return None
    context = training_kernels()
    return None if context is None else _of(context)


@functools.lru_cache(maxsize=4)
def _of(context: Context) -> RowKernels:
    return RowKernels(context)


class RowKernels:
    """Calls of one context. Matrices are bfloat16 with contiguous rows."""

    def __init__(self, context: Context) -> None:
        self._context, self._lib = context, _declared()

    def norm(self, x_RD: Tensor, weight_D: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """``x / sqrt(mean(x^2) + eps) * weight``, and the rows' factors in float32; the weight is float32."""
        out_RD, scales_R = torch.empty(x_RD.shape, dtype=x_RD.dtype), torch.empty(x_RD.shape[0])
        job = CTrainRows(x=CTrainMatrix.of(x_RD), out=out_RD.data_ptr(), eps=eps, scales=scales_R.data_ptr())
        job.weight = None if weight_D is None else weight_D.data_ptr()
        self._run(_NORM, job)
        return out_RD, scales_R

    def norm_back(
        self, slopes_RD: Tensor, x_RD: Tensor, scales_R: Tensor, weight_D: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of a norm by rows and weight."""
        grad_RD, weight_grad_D = torch.empty(x_RD.shape, dtype=x_RD.dtype), None
        job = CTrainRows(x=CTrainMatrix.of(x_RD), slopes=CTrainMatrix.of(slopes_RD), out=grad_RD.data_ptr())
        job.scales = scales_R.data_ptr()
        if weight_D is not None:
            sums, weight_grad_D = torch.empty(-(-x_RD.shape[0] // _PANEL), x_RD.shape[1]), torch.empty_like(weight_D)
            job.weight, job.weight_sums, job.weight_grad = (x.data_ptr() for x in (weight_D, sums, weight_grad_D))
        self._run(_NORM_BACK, job)
        return grad_RD, weight_grad_D

    def gated(self, gate_up_RI: Tensor) -> Tensor:
        """``silu(gate) * up`` of rows that hold both, one behind the other."""
        out_RI = torch.empty(gate_up_RI.shape[0], gate_up_RI.shape[1] // 2, dtype=gate_up_RI.dtype)
        self._run(_GATE, CTrainRows(x=CTrainMatrix.of(gate_up_RI), out=out_RI.data_ptr()))
        return out_RI

    def gated_back(self, slopes_RI: Tensor, gate_up_RI: Tensor) -> Tensor:
        """Gradient of :meth:`gated` by its rows."""
        grad_RI = torch.empty(gate_up_RI.shape, dtype=gate_up_RI.dtype)
        job = CTrainRows(x=CTrainMatrix.of(gate_up_RI), slopes=CTrainMatrix.of(slopes_RI), out=grad_RI.data_ptr())
        self._run(_GATE_BACK, job)
        return grad_RI

    def rotate(self, x_RHC: Tensor, cos: Tensor, signed_sin: Tensor, *, back: bool) -> Tensor:
        """Rotary embedding of all heads, or its gradient; contiguous tables of one row's angles each."""
        out_RHC = torch.empty(x_RHC.shape, dtype=x_RHC.dtype)
        job = CTrainRows(x=CTrainMatrix.of(x_RHC.flatten(1)), out=out_RHC.data_ptr(), head_width=x_RHC.shape[2])
        job.cos, job.sin = cos.data_ptr(), signed_sin.data_ptr()
        self._run(_ROTATE_BACK if back else _ROTATE, job)
        return out_RHC

    def weight_gradient(
        self, slopes_RO: Tensor, inputs_RD: Tensor, sums: Tensor | None = None, *, is_last: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Add ``slopes.T @ inputs`` to the sums of earlier uses of a matrix.

        Returns:
            The sums, in an order of their own, and at the last use the gradient, rounded once.
        """
        grad_OD = torch.empty(slopes_RO.shape[1], inputs_RD.shape[1], dtype=slopes_RO.dtype) if is_last else None
        job = CTrainWeight(slopes=CTrainMatrix.of(slopes_RO), inputs=CTrainMatrix.of(inputs_RD), is_first=sums is None)
        job.is_turned = inputs_RD.shape[1] < slopes_RO.shape[1]
        num_bytes = self._lib.outrider_weight_bytes(ctypes.byref(job), self._context.num_threads)
        if sums is None:
            squares = -(-slopes_RO.shape[1] // _PANEL) * -(-inputs_RD.shape[1] // _PANEL)
            sums = torch.empty(squares * _PANEL * _PANEL)
        job.sums, job.scratch = sums.data_ptr(), scratch_bytes("weight", num_bytes).data_ptr()
        job.is_last, job.grad = is_last, None if grad_OD is None else grad_OD.data_ptr()
        self._lib.outrider_weight_gradient(self._context.handle, ctypes.byref(job))
        return sums, grad_OD

    def _run(self, kind: int, job: CTrainRows) -> None:
        self._lib.outrider_rows(self._context.handle, kind, ctypes.byref(job))
