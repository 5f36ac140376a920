"""The grouped products of `torch_mm` through `grouped_gemm.backend.gmm`."""

from __future__ import annotations

import weakref

from grouped_gemm import backend
from torch import Tensor

from hf_moe_backends.builtin.experts.torch_mm import with_products
from hf_moe_backends.kernels.grouped import Products

_last: tuple[weakref.ref[Tensor], Tensor] | None = None


def _sizes(offsets: Tensor) -> Tensor:
    """Each expert's number of rows, (E,) int64 on the CPU: the host waits for the device.

    The products of one forward, and those of one backward, come with the same tensor: it is asked for once.
    """
    global _last
    if _last is None or _last[0]() is not offsets:
        ends = offsets.cpu().long()
        _last = weakref.ref(offsets), ends.diff(prepend=ends.new_zeros(1))
    return _last[1]


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous and on a 16-byte boundary, which weights out of a memory-mapped checkpoint need not be."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def rows_times_experts(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Row r of expert e times matrices[e]: (R, A), (E, A, B) -> (R, B), unwritten from offsets[-1] on."""
    sizes = _sizes(offsets)
    used = int(sizes.sum())
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    if used:
        transposed = not matrices.is_contiguous() and matrices.transpose(1, 2).is_contiguous()
        stored = _aligned(matrices.transpose(1, 2) if transposed else matrices)
        backend.gmm(_aligned(rows[:used]), stored, sizes, trans_b=transposed, c=out[:used])
    return out


def experts_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """left[e].T @ right[e] over each expert's rows: (R, A), (R, B) -> (E, A, B), zero for experts without rows."""
    sizes = _sizes(offsets)
    used = int(sizes.sum())
    out = left.new_zeros(offsets.numel(), left.shape[1], right.shape[1])
    if used:
        backend.gmm(_aligned(left[:used]), _aligned(right[:used]), sizes, trans_a=True, c=out)
    return out


grouped_gemm = with_products("grouped_gemm", Products(rows_times_experts, experts_outer))
