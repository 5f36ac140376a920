"""Logits that are computed when somebody uses them, so that a fused loss can do without them.

A model's own forward calls its output head, scales or caps what comes out and hands it to `self.loss_function`. In
training the head gives a `LazyLogits` in the place of the (B, S, V) product: it remembers the hidden states and what
is done to it elementwise. The fused loss takes these; any other use computes the logits first, as the head would have.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hf_moe_backends.spec import FusedLoss


@dataclass(frozen=True)
class Product:
    """What the head was asked for, and in which modes: `hidden` (..., H) times `weight` (V, H), plus `bias` (V,)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: torch.dtype | None
    versions: tuple[int, ...]

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
        device = hidden.device.type
        casts = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64  # which autocast leaves alone
        autocast = torch.get_autocast_dtype(device) if casts else None
        return cls(hidden, weight, bias, autocast, cls._versions(hidden, weight, bias))

    @staticmethod
    def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
        return tuple(t._version for t in tensors if t is not None)

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype if self.autocast is None else self.autocast

    def check(self) -> None:
        """Raise RuntimeError if the product would not be that of the time when the head was called."""
        if self._versions(self.hidden, self.weight, self.bias) != self.versions:
            raise RuntimeError(
                "these logits were not computed in training, since a fused loss needs none, and the head's weight has "
                "changed since: they cannot be computed any more. Read them before optimizer.step(), or train with "
                "loss='torch'."
            )
        if self.weight.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                "these logits were not computed in training, since a fused loss needs none, and FSDP has freed the "
                "head's gathered weight since. Read them inside of the model's forward, or train with loss='torch'."
            )

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states (N, H), weight and bias in the dtype that the head would have multiplied in."""
        self.check()
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.hidden.flatten(0, -2).to(self.dtype), self.weight.to(self.dtype), bias

    def compute(self) -> Tensor:
        self.check()
        with torch.autocast(self.hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return F.linear(self.hidden, self.weight, self.bias)


@dataclass(frozen=True)
class Chain:
    """Elementwise steps on logits: `outer * tanh(inner * logits)` where they are capped, else `inner * logits`."""

    inner: float = 1.0
    capped: bool = False
    outer: float = 1.0

    def scaled(self, by: float) -> Chain:
        return replace(self, outer=self.outer * by) if self.capped else replace(self, inner=self.inner * by)

    @property
    def softcap(self) -> float | None:
        return self.outer if self.capped else None

    @property
    def scale(self) -> float:
        """Before the cap: `softcap * tanh(scale * logits / softcap)`."""
        return self.inner * self.outer


class LazyLogits(Tensor):
    """Logits (..., V) that are not computed yet. Made by the output head in training under a fused loss."""

    _product: Product
    _chain: Chain
    _columns: int
    _step: Callable[[Tensor], Tensor] | None
    _source: LazyLogits | None
    _real: Tensor | None
    _gradient_hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]]

    @staticmethod
    def of(product: Product) -> LazyLogits:
        return LazyLogits._make(product, Chain(), product.weight.shape[0], product.dtype)

    @staticmethod
    def _make(
        product: Product,
        chain: Chain,
        columns: int,
        dtype: torch.dtype,
        source: LazyLogits | None = None,
        step: Callable[[Tensor], Tensor] | None = None,
    ) -> LazyLogits:
        shape = (*product.hidden.shape[:-1], columns)
        made: LazyLogits = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=product.hidden.device)
        made._product, made._chain, made._columns = product, chain, columns
        made._source, made._step, made._real = source, step, None
        made._gradient_hooks = OrderedDict()
        return made

    @property
    def chain(self) -> Chain:
        return self._chain

    @property
    def computed(self) -> bool:
        """Whether somebody has used them, and may have changed them in place."""
        return self._real is not None or (self._source is not None and self._source.computed)

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states (N, H), weight (V, H) and bias (V,) of these logits."""
        hidden, weight, bias = self._product.operands()
        return hidden, weight[: self._columns], None if bias is None else bias[: self._columns]

    def compute(self) -> Tensor:
        """The logits themselves, with their graph: computed once."""
        if self._real is None:
            with torch.enable_grad():  # a lazy one exists only where gradients are recorded
                self._real = self._fresh()
            for hook in self._gradient_hooks.values():
                self._real.register_hook(hook)  # type: ignore[no-untyped-call]
        return self._real

    def _fresh(self) -> Tensor:
        if self._source is None or self._step is None:
            return self._product.compute()
        source = self._source
        # kept only where somebody holds it or its hooks: a step's input need not outlive the step
        kept = source._real is not None or source._gradient_hooks
        return self._step(source.compute() if kept else source._fresh())

    def _next(self, step: Callable[[Tensor], Tensor], **changes: Any) -> LazyLogits:
        settings: dict[str, Any] = {"chain": self._chain, "columns": self._columns, "dtype": self.dtype} | changes
        return self._make(self._product, source=self, step=step, **settings)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits):
            if func == _REQUIRES_GRAD and first._real is None:
                return True
            if func in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if not first.computed:
                recorded = _record(first, func, args[1:], kwargs)
                if recorded is not None:
                    return recorded
        elif func in _SCALINGS and len(args) == 2 and isinstance(args[1], LazyLogits) and not args[1].computed:
            recorded = _record(args[1], func, (first,), kwargs) if func not in _DIVISIONS else None
            if recorded is not None:
                return recorded
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.compute, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # below autograd: what is computed here would have no gradient
        raise TypeError(
            f"{func} was called from C++ on logits that a fused loss has not computed. Pass `logits + 0`, or train "
            "with loss='torch'."
        )


_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_quantized",
    "is_meta",
    "is_nested",
)
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_METADATA = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_METADATA |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size}
_METADATA |= {Tensor.__hash__, Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.numel}
_DIVISIONS = {torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__}
_SCALINGS = _DIVISIONS | {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}


def _record(logits: LazyLogits, func: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The step as another lazy object, or None if it is none of those that a fused loss can follow."""
    if func in _SCALINGS and len(rest) == 1 and not kwargs and type(rest[0]) in (int, float) and rest[0]:
        by = 1 / rest[0] if func in _DIVISIONS else rest[0]
        return logits._next(lambda real: func(real, rest[0]), chain=logits._chain.scaled(float(by)))
    if func in (torch.tanh, Tensor.tanh) and not rest and not kwargs and not logits._chain.capped:
        return logits._next(torch.tanh, chain=replace(logits._chain, capped=True))
    if func in (Tensor.float, Tensor.to) and not kwargs and len(rest) == (func is Tensor.to):
        target = torch.float32 if func is Tensor.float else rest[0]
        if target == logits.dtype or (
            isinstance(target, (torch.device, str)) and torch.device(target) == logits.device
        ):
            return logits
        if isinstance(target, torch.dtype) and torch.promote_types(target, logits.dtype) == target:
            return logits._next(lambda real: real.to(target), dtype=target)  # a fused loss computes in float32 anyway
    if func is Tensor.contiguous and not rest and not kwargs:
        return logits
    if func is Tensor.__getitem__ and len(rest) == 1:
        columns = _leading_columns(rest[0], logits._columns)
        if columns is not None:
            return logits._next(lambda real: real[..., :columns], columns=columns)
    if func is Tensor.register_hook and len(rest) == 1:  # FSDP2 hooks every output that has a gradient
        handle = RemovableHandle(logits._gradient_hooks)
        logits._gradient_hooks[handle.id] = rest[0]
        return handle
    return None


def _leading_columns(index: Any, columns: int) -> int | None:
    """n where `index` is `..., :n`, else None."""
    if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice):
        start, stop, step = index[1].indices(columns)
        if (start, step) == (0, 1):
            return stop
    return None


def lazy_forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    """The forward of an output head under a fused loss: lazy in training, and else the head's own."""
    learns = hidden.requires_grad or any(p.requires_grad for p in head.parameters(recurse=False))
    if head.training and torch.is_grad_enabled() and learns:
        product = Product.of(hidden, head.weight, head.bias)
        if product.autocast or hidden.dtype == head.weight.dtype:
            return LazyLogits.of(product)
    return nn.Linear.forward(head, hidden)


class FusedLossFunction:
    """A model's `loss_function` that hands the operands of lazy logits to a fused loss.

    Logits that are real, in evaluation or since something has read them, take the stock loss that it stands in for.
    """

    def __init__(self, fused: FusedLoss, options: Mapping[str, Any], stock: Callable[..., Tensor], name: str):
        self.fused, self.options, self.stock, self.name = fused, dict(options), stock, name

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Transformers' `ForCausalLMLoss`: logits (B, S, V), labels (B, S) -> scalar in float32."""
        if isinstance(logits, LazyLogits) and not logits.computed and logits.shape[-1] == vocab_size:
            if shift_labels is None:
                assert labels is not None
                shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            return self._fused(logits, shift_labels.reshape(-1), num_items_in_batch, ignore_index)
        if logits.requires_grad:
            warnings.warn(
                f"loss={self.name!r} saved nothing: the full logits were computed and the stock loss taken, since "
                + (
                    "the model has read its logits before the loss, or they are not as wide as its vocabulary"
                    if isinstance(logits, LazyLogits)
                    else "the output head gave logits that are computed: it is in evaluation mode, or was wrapped or "
                    "hooked after set_moe_backend"
                ),
                stacklevel=2,
            )
        return self.stock(
            logits,
            labels,
            vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            shift_labels=shift_labels,
            **kwargs,
        )

    def _fused(self, logits: LazyLogits, targets: Tensor, num_items: Tensor | int | None, ignore_index: int) -> Tensor:
        hidden, weight, bias = logits.operands()
        if targets.shape[0] != hidden.shape[0]:
            raise ValueError(f"{targets.shape[0]} labels for {hidden.shape[0]} rows of logits")
        with torch.autocast(hidden.device.type, enabled=False):  # the operands are cast already
            loss: Tensor = self.fused.function(
                hidden,
                weight,
                targets.to(hidden.device),
                bias=bias,
                ignore_index=ignore_index,
                num_items=num_items,
                scale=logits.chain.scale,
                softcap=logits.chain.softcap,
                **self.options,
            )
        return loss
