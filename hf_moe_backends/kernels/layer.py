"""The experts layer as custom operators: one autograd node that keeps the layer's input and the pre-activation.

Everything else is made again in backward: the gathered rows, the activation, the weighted rows. What stock autograd
keeps of a layer is about four times as much. torch.compile sees the operators whole.

A gate that is none of the known formulas is a module's own code, which an operator cannot take. Such a layer is
composed of `expert_linear`, the module's gate under autograd, `expert_linear` again and `combine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from hf_moe_backends.kernels.gates import Rows, activate, activate_backward, known_formula
from hf_moe_backends.kernels.grouped import PRODUCTS, expert_sums
from hf_moe_backends.kernels.routing import Routing, sort_by_expert
from hf_moe_backends.kernels.rows import gather, weighted_sum, weighted_sum_backward


def _matrices(stored: Tensor, transposed: bool) -> Tensor:
    """(E, in, out) whatever the layout."""
    return stored if transposed else stored.transpose(1, 2)


def _outer(inputs: Tensor, grads: Tensor, offsets: Tensor, transposed: bool, products: str) -> Tensor:
    """The gradient of weights in their stored layout."""
    left, right = (inputs, grads) if transposed else (grads, inputs)
    return PRODUCTS[products].experts_outer(left, right, offsets)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is data, and not a tracer's stand-in for data, which only operators can take."""
    return type(tensor) in (Tensor, Parameter) and not tensor.is_meta and not torch.compiler.is_compiling()


def run(*arguments: Any) -> Tensor:
    """The output of `experts_layer`.

    An operator's call costs the host 60 microseconds more than the function's: half of what a small layer takes. So
    only tracers go through the operator.
    """
    if is_plain(arguments[0]):
        out: Tensor = _Layer.apply(*arguments)  # type: ignore[no-untyped-call]
        return out
    out, *_ = experts_layer(*arguments)
    return out


def _forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool,
    interleaved: bool,
    gate: str,
    limit: float,
    alpha: float,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An experts layer with a known gate.

    Args:
        x: (T, H), of the dtype of `up` and `down`.
        ids: (T, K) integers; those outside 0..E-1 contribute nothing.
        weights: (T, K), of any floating dtype.
        up, up_bias: (E, N, H) or `transposed` (E, H, N), and (E, N); N = 2I for gated experts, else I.
        down, down_bias: (E, H, I) or `transposed` (E, I, H), and (E, H).
        gate, limit, alpha: as in `recognise.Gate`, with limit 0 for none.
        products: whose grouped products, a key of `grouped.PRODUCTS`.

    Returns:
        the output (T, H), and for backward the pre-activation (R, N) without its bias and the routing: order (R,),
        position (R,), offsets (E,).
    """
    routing = sort_by_expert(ids, up.shape[0])
    rows_times_experts = PRODUCTS[products].rows_times_experts
    rows = gather(x, routing, ids.shape[1])[0]
    pre = rows_times_experts(rows, _matrices(up, transposed), routing.offsets)
    del rows
    # Weighted here, in the accumulator's precision and over I-wide rows, and not after the H-wide product.
    activation = activate(pre, Rows(routing, ids, weights, up_bias), known_formula(gate, limit, alpha), interleaved)
    rows = rows_times_experts(activation, _matrices(down, transposed), routing.offsets)
    out = weighted_sum(rows, routing, ids, weights=weights, bias=down_bias, weigh_rows=False)
    return out, pre, *routing


experts_layer = torch.library.custom_op("hf_moe_backends::experts_layer", _forward, mutates_args=())


@experts_layer.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool,
    interleaved: bool,
    gate: str,
    limit: float,
    alpha: float,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    size = ids.shape[0] * ids.shape[1]
    pre = x.new_empty(size, up.shape[2] if transposed else up.shape[1])
    order, position = (ids.new_empty(size, dtype=torch.int32) for _ in range(2))
    return torch.empty_like(x), pre, order, position, ids.new_empty(up.shape[0], dtype=torch.int32)


def _gradients(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    pre: Tensor,
    order: Tensor,
    position: Tensor,
    offsets: Tensor,
    transposed: bool,
    interleaved: bool,
    gate: str,
    limit: float,
    alpha: float,
    products: str,
    needed: Sequence[bool],
) -> list[Tensor]:
    """The gradients of x, weights, up, up_bias, down and down_bias: of those that are `needed`, in this order."""
    need_x, need_weights, need_up, need_up_bias, need_down, need_down_bias = needed
    top_k, routing = ids.shape[1], Routing(order, position, offsets)
    rows_times_experts = PRODUCTS[products].rows_times_experts
    need_pre = need_x or need_up or need_up_bias
    grads: list[Tensor] = []
    grad_down_bias = expert_sums(grad, offsets, of_tokens=(routing, weights)) if need_down_bias else None
    if not (need_pre or need_weights or need_down):
        return [grad_down_bias.to(down.dtype)] if grad_down_bias is not None else []

    # Unweighted: its product with the activation is the router weight's gradient.
    spread, of_bias = gather(grad, routing, top_k, ids, down_bias if need_weights else None)
    incoming = rows_times_experts(spread, _matrices(down, transposed).transpose(1, 2), offsets)
    rows = Rows(routing, ids, weights, up_bias)
    grad_pre, weighted, grad_weights = activate_backward(
        incoming, of_bias, pre, rows, known_formula(gate, limit, alpha), interleaved
    )
    del incoming
    grad_down = _outer(weighted, spread, offsets, transposed, products) if need_down else None
    del weighted, spread
    if need_x:
        by_rows = rows_times_experts(grad_pre, _matrices(up, transposed).transpose(1, 2), offsets)
        grads.append(weighted_sum(by_rows, routing, ids, weights=None, bias=None, weigh_rows=False))
        del by_rows
    if need_weights:
        grads.append(grad_weights.to(weights.dtype))
    if need_up:
        grads.append(_outer(gather(x, routing, top_k)[0], grad_pre, offsets, transposed, products))
    if need_up_bias:
        grads.append(expert_sums(grad_pre, offsets).to(up.dtype))
    if grad_down is not None:
        grads.append(grad_down)
    if grad_down_bias is not None:
        grads.append(grad_down_bias.to(down.dtype))
    return grads


experts_layer_backward = torch.library.custom_op("hf_moe_backends::experts_layer_backward", _gradients, mutates_args=())


@experts_layer_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    pre: Tensor,
    order: Tensor,
    position: Tensor,
    offsets: Tensor,
    transposed: bool,
    interleaved: bool,
    gate: str,
    limit: float,
    alpha: float,
    products: str,
    needed: Sequence[bool],
) -> list[Tensor]:
    inputs = (x, weights, up, up_bias, down, down_bias)
    return [t.new_empty(t.shape) for t, need in zip(inputs, needed, strict=True) if need and t is not None]


_TENSORS = 7  # the leading tensor arguments of `experts_layer`
_DIFFERENTIABLE = (0, 2, 3, 4, 5, 6)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[1:])
    ctx.static = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    found: list[Tensor | None] = [None] * (_TENSORS + len(ctx.static))
    if grad is None:
        return tuple(found)
    needed = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    gradients: Callable[..., list[Tensor]] = _gradients if is_plain(grad) else experts_layer_backward
    grads = iter(gradients(grad.contiguous(), *ctx.saved_tensors, *ctx.static, needed))
    for i, need in zip(_DIFFERENTIABLE, needed, strict=True):
        if need:
            found[i] = next(grads)
    return tuple(found)


experts_layer.register_autograd(_backward, setup_context=_keep)


class _Layer(torch.autograd.Function):
    """The operator without the operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad)


@torch.library.custom_op("hf_moe_backends::route", mutates_args=())
def route(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`sort_by_expert` for a composed layer: order (R,), position (R,), offsets (E,)."""
    order, position, offsets = sort_by_expert(ids, num_experts)
    return order, position, offsets


@route.register_fake
def _(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    size = ids.shape[0] * ids.shape[1]
    order, position = (ids.new_empty(size, dtype=torch.int32) for _ in range(2))
    return order, position, ids.new_empty(num_experts, dtype=torch.int32)


@torch.library.custom_op("hf_moe_backends::expert_linear", mutates_args=())
def expert_linear(
    x: Tensor,
    ids: Tensor,
    stored: Tensor,
    bias: Tensor | None,
    order: Tensor,
    position: Tensor,
    offsets: Tensor,
    transposed: bool,
    gathers: bool,
    products: str,
) -> Tensor:
    """Each row through its expert's linear layer.

    Args:
        x: tokens (T, A) if it `gathers`, else rows (R, A).
        stored, bias: (E, B, A) or `transposed` (E, A, B), and (E, B).

    Returns:
        (R, B), zero in rows of nobody: what computes on them next is not ours.
    """
    routing = Routing(order, position, offsets)
    rows = gather(x, routing, ids.shape[1])[0] if gathers else x
    out = PRODUCTS[products].rows_times_experts(rows, _matrices(stored, transposed), offsets)
    if bias is not None:
        out += bias[ids.reshape(-1)[order.long()].clamp(0, bias.shape[0] - 1)]
    return _clear_unused(out, offsets)


def _clear_unused(rows: Tensor, offsets: Tensor) -> Tensor:
    unused = torch.arange(rows.shape[0], device=rows.device) >= offsets[-1]
    return rows.masked_fill_(unused[:, None], 0)


@expert_linear.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    stored: Tensor,
    bias: Tensor | None,
    order: Tensor,
    position: Tensor,
    offsets: Tensor,
    transposed: bool,
    gathers: bool,
    products: str,
) -> Tensor:
    return x.new_empty(order.shape[0], stored.shape[2] if transposed else stored.shape[1])


@torch.library.custom_op("hf_moe_backends::expert_linear_backward", mutates_args=())
def expert_linear_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    stored: Tensor,
    order: Tensor,
    position: Tensor,
    offsets: Tensor,
    transposed: bool,
    gathers: bool,
    products: str,
    needed: Sequence[bool],
) -> list[Tensor]:
    """The gradients of x, stored and bias: of those that are `needed`, in this order."""
    routing, top_k = Routing(order, position, offsets), ids.shape[1]
    need_x, need_stored, need_bias = needed
    grads: list[Tensor] = []
    if need_x:
        matrices = _matrices(stored, transposed).transpose(1, 2)
        by_rows = PRODUCTS[products].rows_times_experts(grad, matrices, offsets)
        if gathers:
            grads.append(weighted_sum(by_rows, routing, ids, weights=None, bias=None, weigh_rows=False))
        else:
            grads.append(_clear_unused(by_rows, offsets))
    if need_stored:
        rows = gather(x, routing, top_k)[0] if gathers else x
        grads.append(_outer(rows, grad, offsets, transposed, products))
    if need_bias:
        grads.append(expert_sums(grad, offsets).to(stored.dtype))
    return grads


@expert_linear_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    stored: Tensor,
    order: Tensor,
    position: Tensor,
    offsets: Tensor,
    transposed: bool,
    gathers: bool,
    products: str,
    needed: Sequence[bool],
) -> list[Tensor]:
    made = (x.new_empty(x.shape), stored.new_empty(stored.shape), stored.new_empty(stored.shape[0], grad.shape[1]))
    return [tensor for tensor, need in zip(made, needed, strict=True) if need]


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ids, stored, _, order, position, offsets, *static = inputs
    ctx.save_for_backward(x, ids, stored, order, position, offsets)
    ctx.static = static


def _backward_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, _, stored, bias, *_ = ctx.needs_input_grad
    grads = iter(expert_linear_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.static, [x, stored, bias]))
    return (
        next(grads) if x else None,
        None,
        next(grads) if stored else None,
        next(grads) if bias else None,
        *[None] * 6,
    )


expert_linear.register_autograd(_backward_linear, setup_context=_keep_linear)


@torch.library.custom_op("hf_moe_backends::combine", mutates_args=())
def combine(rows: Tensor, ids: Tensor, weights: Tensor, order: Tensor, position: Tensor, offsets: Tensor) -> Tensor:
    """Each token's rows (R, H), weighted by (T, K) and summed: (T, H)."""
    return weighted_sum(rows, Routing(order, position, offsets), ids, weights=weights, bias=None, weigh_rows=True)


@combine.register_fake
def _(rows: Tensor, ids: Tensor, weights: Tensor, order: Tensor, position: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(ids.shape[0], rows.shape[1])


@torch.library.custom_op("hf_moe_backends::combine_backward", mutates_args=())
def combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, position: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of rows (R, H), zero in rows of nobody, and weights (T, K)."""
    grad_rows, grad_weights = weighted_sum_backward(grad, rows, Routing(order, position, offsets), weights)
    return grad_rows, grad_weights.to(weights.dtype)


@combine_backward.register_fake
def _(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, position: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), weights.new_empty(weights.shape)


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, _, weights, *routing = inputs
    ctx.save_for_backward(rows, weights, *routing)


def _backward_combine(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_rows, grad_weights = combine_backward(grad.contiguous(), *ctx.saved_tensors)
    return grad_rows, None, grad_weights, None, None, None


combine.register_autograd(_backward_combine, setup_context=_keep_combine)
