"""`experts="torch_mm"`: all experts in one grouped matrix product a projection, keeping as little as can be kept.

The products may be another library's: `with_products` makes a backend of them, and all else stays as it is here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_moe_backends.builtin.experts.layout import Weights, activate, finish, read_weights
from hf_moe_backends.kernels import decode, layer
from hf_moe_backends.kernels.grouped import PRODUCTS, Products
from hf_moe_backends.kernels.layer import combine, expert_linear, route
from hf_moe_backends.recognise import Gate, recognise_gate


def torch_mm(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each token through its experts, weighted and summed.

    Args:
        experts: a decorated experts module with E local experts.
        hidden_states: (T, H).
        top_k_index: (T, K) integers. Ids outside 0..E-1 are pairs of other ranks and contribute nothing, to the output
            or to any gradient.
        top_k_weights: (T, K), of any floating dtype.

    Returns:
        (T, H) in the dtype of `hidden_states`, summed in a fixed order in float32 (float64 for float64).
    """
    return _run(experts, hidden_states, top_k_index, top_k_weights, "torch")


def with_products(name: str, products: Products) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    """An experts backend like `torch_mm` on other grouped products.

    It serves what `torch_mm` serves where the products do: their dtypes, devices and alignment are for the backend's
    capabilities to say. It has no way of its own for few tokens, since that would be other code than was asked for.

    Args:
        name: of the products, unique in this process: "grouped_gemm".
        products: on rows sorted by expert, (E, A, B) matrices that are contiguous or transposed in their last two
            dimensions, and int32 offsets on the rows' device.

    Raises:
        ValueError: other products have this name.
    """
    if PRODUCTS.setdefault(name, products) != products:
        raise ValueError(f"grouped products of the name {name!r} are there already: {PRODUCTS[name]}")

    def backend(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _run(experts, hidden_states, top_k_index, top_k_weights, name)

    backend.__name__ = backend.__qualname__ = name
    return backend


def _run(experts: nn.Module, hidden: Tensor, ids: Tensor, shares: Tensor, products: str) -> Tensor:
    weights = _in_compute_dtype(read_weights(experts), hidden.device.type)
    x = hidden.to(weights.up.dtype)
    # kernels step through all but the matrices as if they were contiguous
    ids, shares = ids.contiguous(), shares.contiguous()
    if weights.up_bias is not None and weights.down_bias is not None:
        weights = weights._replace(up_bias=weights.up_bias.contiguous(), down_bias=weights.down_bias.contiguous())
    gate = _gate(experts)
    if gate.formula == "custom" or getattr(experts, "has_post_expert_norm", False):
        out = _composed(experts, x, ids, shares, weights, products)
    else:
        limit = 0.0 if math.isinf(gate.limit) else gate.limit
        interleaved = bool(experts.has_gate and not experts.is_concatenated)
        *tensors, transposed = weights
        form = (interleaved, gate.formula, limit, gate.alpha)
        few = products == "torch" and not transposed
        if few and decode.serves(x, ids, weights.up.shape[0], shares, *tensors):
            out = decode.run(x, ids, shares, *tensors, *form)
        else:
            out = layer.run(x, ids, shares, *tensors, transposed, *form, products)
    return out.to(hidden.dtype)


def _composed(experts: nn.Module, x: Tensor, ids: Tensor, shares: Tensor, weights: Weights, products: str) -> Tensor:
    """The layer around a gate or a norm that is a module's own code. Autograd keeps its rows, as stock does."""
    up, up_bias, down, down_bias, transposed = weights
    routing = route(ids, up.shape[0])
    rows = expert_linear(x, ids, up, up_bias, *routing, transposed, gathers=True, products=products)
    rows = activate(experts, rows)
    rows = expert_linear(rows, ids, down, down_bias, *routing, transposed, gathers=False, products=products)
    out: Tensor = combine(finish(experts, rows), ids, shares, *routing)
    return out


def _in_compute_dtype(weights: Weights, device: str) -> Weights:
    """Under autocast what eager's linear layers would compute in; Transformers' own grouped_mm ignores autocast."""
    if not torch.is_autocast_enabled(device) or weights.up.dtype == torch.float64:
        return weights
    dtype = torch.get_autocast_dtype(device)
    up, up_bias, down, down_bias, transposed = weights
    return Weights(
        up.to(dtype),
        None if up_bias is None else up_bias.to(dtype),
        down.to(dtype),
        None if down_bias is None else down_bias.to(dtype),
        transposed,
    )


_gates: WeakKeyDictionary[nn.Module, tuple[object, Gate]] = WeakKeyDictionary()


def _gate(experts: nn.Module) -> Gate:
    """The module's gate, recognised once, and again when its activation or one of its numbers is exchanged."""
    if torch.compiler.is_compiling():
        formula, limit, alpha = _gate_at(id(experts))
        return Gate(formula=formula, limit=limit, alpha=alpha)
    return _gate_of(experts)


def _gate_of(module: Any) -> Gate:
    numbers = tuple((k, v) for k, v in vars(module).items() if type(v) in (int, float, bool))
    state = (id(module._modules.get("act_fn", vars(module).get("act_fn"))), numbers)
    known = _gates.get(module)
    if known is None or known[0] != state:
        known = (state, recognise_gate(module))
        _gates[module] = known
    return known[1]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gate_at(address: int) -> tuple[str, float, float]:
    """The gate of the module at an address, while it is traced.

    torch.compile runs such a function for real, but takes only constants for its arguments. A module is none; its
    address is, and the module is there as long as it is traced.
    """
    gate = _gate_of(ctypes.cast(address, ctypes.py_object).value)
    return gate.formula, gate.limit, gate.alpha
