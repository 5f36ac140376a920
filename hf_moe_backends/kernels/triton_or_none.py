"""Triton where it is installed. CPU builds of torch come without it, and their twins need none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None


def jit(function: Any) -> Any:
    """`triton.jit`, or the function itself where there is no Triton: it is never called then."""
    return function if triton is None else triton.jit(function)


def use_triton(tensor: Tensor) -> bool:
    """Whether a tensor is the Triton kernels' to compute on."""
    return triton is not None and tensor.is_cuda


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
