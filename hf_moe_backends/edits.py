"""The edits that a plan is made of. Each goes through one hook of Transformers, and undoes itself.

An edit checks what it can before anything is touched (`check`), changes the model (`apply`) and restores it (`revert`).
`apply` and `revert` find modules by identity in the tree they are given, since peft and others re-parent them.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moe_backends.errors import PlanError
from hf_moe_backends.expert_parallel import (
    HAS_IMPLEMENTATIONS,
    Dispatched,
    install,
    is_dispatcher,
    sharded,
    slicing_routers,
)
from hf_moe_backends.lazy_logits import FusedLossFunction, lazy_forward
from hf_moe_backends.registry import Backend
from hf_moe_backends.spec import STOCK, AttentionBackend, FusedLoss
from hf_moe_backends.survey import Site, attachments, cannot_fuse, cannot_replace, sharding_of


class ConfigCopies:
    """The model's config objects and this plan's own copies of them.

    One config object may be shared by many models, so nothing is ever written to it. All of a model's configs are
    copied together: a sub-config that two modules share is shared by their copies as well.
    """

    def __init__(self, model: nn.Module):
        self.originals = _configs(model)
        self.copies: list[PreTrainedConfig] = copy.deepcopy(self.originals)
        self.written: list[set[str]] = [set() for _ in self.copies]
        self.as_copied: list[dict[str, Any]] = []
        self.as_left: list[dict[str, Any]] = []
        self.last_written: list[dict[str, Any]] = []

    def write(self, original: PreTrainedConfig, attribute: str, value: object) -> None:
        """Set an attribute of `original`'s copy."""
        index = next(i for i, config in enumerate(self.originals) if config is original)
        vars(self.copies[index])[attribute] = value
        self.written[index].add(attribute)

    def install(self, root: nn.Module) -> None:
        for i, before in enumerate(self.as_left):  # set while this plan was out of force
            _carry(self.originals[i], self.copies[i], since=before, but=self.written[i])
        self._swap(root, self.originals, self.copies)
        self.as_copied = [_plain(config) for config in self.copies]

    def rewrite(self) -> None:
        """Undo `write` since the last `remove`: others may have set these attributes before that."""
        for config, values in zip(self.copies, self.last_written, strict=True):
            vars(config).update(values)

    def remove(self, root: nn.Module) -> None:
        """Put the originals back, with whatever was set on the copies since, other than by this plan.

        A user who sets `model.config.pad_token_id` means the model's config, whichever object that is at the time.
        """
        self._adopt(root)
        for i, before in enumerate(self.as_copied):
            _carry(self.copies[i], self.originals[i], since=before, but=self.written[i])
        self.last_written = [
            {name: vars(config)[name] for name in written}
            for config, written in zip(self.copies, self.written, strict=True)
        ]
        self.as_left = [_plain(config) for config in self.originals]
        self._swap(root, self.copies, self.originals)

    def _adopt(self, root: nn.Module) -> None:
        """Make deep copies of this plan's copies pairs of their own. peft's `modules_to_save` deep-copies experts.

        Such a copy has no original. It gets one here: itself without what this plan wrote.
        """
        for config in _configs(root):
            if any(config is known for known in (*self.originals, *self.copies)):
                continue
            for original, copied, written in zip(self.originals, self.copies, self.written, strict=True):
                state = vars(config)
                if type(config) is type(copied) and written and all(state.get(n) == vars(copied)[n] for n in written):
                    stock = copy.copy(config)
                    vars(stock).update({name: vars(original)[name] for name in written})
                    self.originals.append(stock)
                    self.copies.append(config)
                    self.written.append(set(written))
                    self.as_copied.append(_plain(config))
                    break

    @staticmethod
    def _swap(root: nn.Module, old: list[PreTrainedConfig], new: list[PreTrainedConfig]) -> None:
        replacement = {id(o): n for o, n in zip(old, new, strict=True)}
        for module in root.modules():
            for name, value in list(vars(module).items()):
                if id(value) in replacement and isinstance(value, PreTrainedConfig):
                    vars(module)[name] = replacement[id(value)]


def _configs(root: nn.Module) -> list[PreTrainedConfig]:
    """The config objects that the modules of `root` hold, and those inside them."""
    held = [value for module in root.modules() for value in vars(module).values()]
    found: list[PreTrainedConfig] = []
    for value in held:
        if isinstance(value, PreTrainedConfig) and not any(value is seen for seen in found):
            found.append(value)
            held.extend(vars(value).values())
    return found


def _plain(config: PreTrainedConfig) -> dict[str, Any]:
    """A config's own values to compare with later; its sub-configs are compared as configs of their own.

    Copies, since a value may be changed in place, but for values without an equality: those are what they are.
    """
    plain = {}
    for name, value in vars(config).items():
        if not isinstance(value, PreTrainedConfig):
            copied = copy.deepcopy(value)
            plain[name] = copied if _same(copied, value) else value
    return plain


def _carry(source: PreTrainedConfig, target: PreTrainedConfig, *, since: dict[str, Any], but: set[str]) -> None:
    """Repeat on `target` what was set or deleted on `source` since it looked like `since`."""
    now = vars(source)
    for name in (now.keys() | since.keys()) - but:
        if name not in now:
            vars(target).pop(name, None)
        elif not isinstance(now[name], PreTrainedConfig) and (name not in since or not _same(now[name], since[name])):
            vars(target)[name] = copy.deepcopy(now[name])


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # tensors and arrays have no single answer
        return False


@dataclass
class Edit(ABC):
    """One backend on the sites of one kind."""

    backend: Backend
    options: Mapping[str, Any]
    sites: tuple[Site, ...]

    @property
    @abstractmethod
    def hook(self) -> str:
        """The hook of Transformers that the edit goes through, for the plan's text."""

    def register(self) -> None:  # noqa: B027 - most edits register nothing
        """Make the backend known to Transformers in this process. Safe to repeat."""

    def check(self) -> None:  # noqa: B027
        """Raise PlanError if the edit cannot be made. Touches nothing."""

    @abstractmethod
    def apply(self, root: nn.Module, configs: ConfigCopies) -> None:
        """Make the edit. The plan's config copies are installed already. May raise midway: `revert` follows then."""

    def verify(self) -> None:  # noqa: B027
        """Raise PlanError if the model would go on running what it ran before: an edit without effect is an error."""

    @abstractmethod
    def revert(self, root: nn.Module) -> None:
        """Undo `apply`, or as much of it as was done."""

    def check_revert(self, root: nn.Module) -> None:  # noqa: B027
        """Raise PlanError if the edit cannot be undone as the model is now. Touches nothing."""

    @property
    def _label(self) -> str:
        return f"{self.backend.spec.kind}={self.backend.spec.name!r}"

    @property
    def key(self) -> str:
        """The name under which Transformers knows this backend with these options."""
        spec = self.backend.spec
        defaults = spec.resolve_options({})
        changed = {name: value for name, value in self.options.items() if value != defaults[name]}
        return f"{spec.name}{json.dumps(changed, sort_keys=True)}" if changed else spec.name

    def _require_name(self, attribute: str) -> None:
        for site in self.sites:
            if getattr(getattr(site.module, "config", None), attribute, None) != self.key:
                raise PlanError(f"{self._label} did not reach {site.name}: its config is not one of the model's")

    def _is_stock(self) -> bool:
        return self.backend.spec.target == STOCK

    def _load(self) -> Any:
        try:
            return self.backend.spec.load()
        except Exception as error:
            raise PlanError(
                f"{self._label} ({self.backend.plugin.label}) could not be imported from {self.backend.spec.target}: "
                f"{type(error).__name__}: {error}"
            ) from error


_registered: dict[tuple[str, str], str] = {}
"""(interface, key) -> the target that this package registered there."""


def register_function(key: str, target: str, *functions: tuple[Any, object]) -> None:
    """Register a function with each of these global interfaces of Transformers: with all, or with none.

    Raises:
        PlanError: somebody else's function has that name in one of them.
    """
    for interface, _ in functions:
        if key in interface._global_mapping and (interface.__name__, key) not in _registered:
            raise PlanError(
                f"{key!r} is already registered in Transformers' {interface.__name__}, by other code than this "
                f"package: {interface._global_mapping[key]!r}. Register it under another name."
            )
    for interface, function in functions:
        if _registered.get((interface.__name__, key)) != target:
            interface.register(key, function)
            _registered[interface.__name__, key] = target


@dataclass
class SetExperts(Edit):
    """The experts implementation's name, in every config of the model.

    Every config, not only the experts' own: `generate` reads and restores the implementation of the outer configs, and
    hands theirs to nested sub-models that it does not find by name.
    """

    @property
    def hook(self) -> str:
        return "ALL_EXPERTS_FUNCTIONS, config._experts_implementation"

    def register(self) -> None:
        if not self._is_stock():
            function = partial(self._load(), **self.options) if self.options else self._load()
            register_function(self.key, self.backend.spec.target, (type(ALL_EXPERTS_FUNCTIONS), function))

    def apply(self, root: nn.Module, configs: ConfigCopies) -> None:
        for original in configs.originals:
            configs.write(original, "_experts_implementation_internal", self.key)

    def verify(self) -> None:
        self._require_name("_experts_implementation")

    def revert(self, root: nn.Module) -> None:
        """Nothing of its own: the plan puts the configs back."""


@dataclass
class DispatchLate(Edit):
    """What `@use_experts_implementation` would have done to experts classes that Transformers left undecorated."""

    owners: tuple[nn.Module, ...] = field(default=(), repr=False)
    forwards: list[LateForward] = field(default_factory=list, repr=False)

    _ATTRIBUTES = {
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,
        "is_concatenated": True,
        "_is_expert_parallel": False,
    }

    @property
    def hook(self) -> str:
        return "the module's forward, as @use_experts_implementation sets it"

    def apply(self, root: nn.Module, configs: ConfigCopies) -> None:
        self.forwards = self.forwards or [LateForward(site.module) for site in self.sites]
        for site, owner, forward in zip(self.sites, self.owners, self.forwards, strict=True):
            state = vars(site.module)
            state.update(self._ATTRIBUTES)
            state["config"] = owner.config
            state["forward"] = forward

    def check_revert(self, root: nn.Module) -> None:
        for site in self.sites:
            if not isinstance(vars(site.module).get("forward"), LateForward):
                raise PlanError(
                    f"{self._label} cannot be undone: {site.name} was hooked or sharded over ranks since, and that "
                    "would be lost. Remove it first, or load again."
                )

    def revert(self, root: nn.Module) -> None:
        for site in self.sites:
            for name in ("config", "forward", *self._ATTRIBUTES):
                vars(site.module).pop(name, None)


class LateForward:
    """An experts module's forward that looks its implementation up at each call.

    An object and not a closure: a deep copy or a pickle of the module then carries its own, bound to the copy.
    """

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self.module
        name = module.config._experts_implementation
        function = ALL_EXPERTS_FUNCTIONS.get_interface(name, type(module).forward)
        output: Tensor = function(module, *args, **kwargs)
        return output


@dataclass
class SetAttention(Edit):
    """The attention implementation's name, in the configs that attention modules read, with its mask function."""

    owners: tuple[PreTrainedModel, ...] = field(default=(), repr=False)

    @property
    def hook(self) -> str:
        return "ALL_ATTENTION_FUNCTIONS and AttentionMaskInterface, config._attn_implementation"

    def check(self) -> None:
        if self._is_stock():
            name = self.backend.spec.name
            for model in self._models():
                try:
                    allowed = model.get_correct_attn_implementation(name)
                except (ValueError, ImportError) as error:
                    raise PlanError(
                        f"{self._label}: Transformers refuses it for {type(model).__name__}: {error}"
                    ) from None
                if allowed != name:
                    raise PlanError(
                        f"{self._label}: Transformers would run {type(model).__name__} on {allowed!r} instead"
                    )

    def register(self) -> None:
        if self._is_stock():
            return
        backend = self._load()
        if not isinstance(backend, AttentionBackend):
            raise PlanError(
                f"{self._label} ({self.backend.plugin.label}): {self.backend.spec.target} must be an AttentionBackend, "
                f"with its mask function beside its attention function, got {backend!r}. Without a mask function "
                "Transformers would hand it no mask at all, in silence."
            )
        mask = backend.mask
        if isinstance(mask, str):
            if mask not in ALL_MASK_ATTENTION_FUNCTIONS:
                raise PlanError(f"{self._label}: its mask {mask!r} is none of Transformers' mask functions")
            mask = ALL_MASK_ATTENTION_FUNCTIONS[mask]
        attention = partial(backend.attention, **self.options) if self.options else backend.attention
        interfaces = (type(ALL_MASK_ATTENTION_FUNCTIONS), mask), (type(ALL_ATTENTION_FUNCTIONS), attention)
        register_function(self.key, self.backend.spec.target, *interfaces)

    def apply(self, root: nn.Module, configs: ConfigCopies) -> None:
        written: list[PreTrainedConfig] = []
        for holder in (*(site.module for site in self.sites), *self._models()):
            config: Any = holder.config
            if not any(config is seen for seen in written):
                written.append(config)
        # apply runs after the copies were installed: what the modules hold are copies, or none of the model's configs
        for original, copied in zip(configs.originals, configs.copies, strict=True):
            if any(copied is config for config in written):
                configs.write(original, "_attn_implementation_internal", self.key)

    def verify(self) -> None:
        self._require_name("_attn_implementation")

    def revert(self, root: nn.Module) -> None:
        """Nothing of its own: the plan puts the configs back."""

    def _models(self) -> list[PreTrainedModel]:
        """The models that own an attention site, whose config Transformers' own setter would change."""
        return [model for model in self.owners if model._can_set_attn_implementation()]


@dataclass
class ReplaceModules(Edit):
    """Linear or norm modules, each by what the backend's `convert` makes of it, on the same Parameter objects."""

    converted: list[tuple[nn.Module, nn.Module]] = field(default_factory=list, repr=False)
    attached: list[frozenset[tuple[str, object]]] = field(default_factory=list, repr=False)

    _NAME = "_hf_moe_backends_replaces"
    """The attribute of a converted module with the name of its site. A deep copy of the module has it too."""

    @property
    def hook(self) -> str:
        return "module replacement"

    def check(self) -> None:
        self._load()

    def apply(self, root: nn.Module, configs: ConfigCopies) -> None:
        # back in force after a plan that was only made or is over: the same modules, with what they have gathered
        before = {id(old): new for old, new in self.converted if _shares_parameters(old, new)}
        self.converted, self.attached = [], []
        convert: Callable[..., object] = self._load()
        for site in self.sites:
            reason = cannot_replace(site.module)
            if reason:  # the plan was made before
                raise PlanError(f"{self._label}: {site.name} cannot be replaced: {reason}")
            known = before.get(id(site.module))
            new = known if known is not None else convert(site.module, **self.options)
            self._require_same(site, new)
            assert isinstance(new, nn.Module)
            new.train(site.module.training)
            vars(new)[self._NAME] = site.name
            self.converted.append((site.module, new))
            self.attached.append(attachments(new))
            _replace(root, site.module, new)

    def _require_same(self, site: Site, new: object) -> None:
        """The contract of `convert`: another module on the same parameters, with the same state-dict keys."""
        old = site.module
        if not isinstance(new, nn.Module) or new is old:
            raise PlanError(f"{self._label}: converting {site.name} must give another module, got {new!r}")
        if not _shares_parameters(old, new):
            before, after = dict(old.named_parameters()), dict(new.named_parameters())
            raise PlanError(
                f"{self._label}: converting {site.name} must keep the Parameter objects {sorted(before)}, "
                f"got {sorted(after)} with other objects among them"
            )
        extra = new.state_dict(keep_vars=True).keys() ^ old.state_dict(keep_vars=True).keys()
        if extra:
            raise PlanError(
                f"{self._label}: converting {site.name} must not change the state dict's keys: {sorted(extra)}"
            )

    def check_revert(self, root: nn.Module) -> None:
        for (_, new), before in zip(self.converted, self.attached, strict=True):
            name = vars(new)[self._NAME]
            if sharding_of(new) is not None:
                raise PlanError(
                    f"{self._label} cannot be undone: the model was sharded after its modules were replaced, and the "
                    "sharding goes on gathering into the modules it knows. Reset before sharding, or load again."
                )
            if attachments(new) - before:
                raise PlanError(
                    f"{self._label} cannot be undone: hooks were put on {name} after it was replaced, and they would "
                    "be lost. Remove them first; accelerate's with accelerate.hooks.remove_hook_from_submodules(model)."
                )
        ours = {id(new) for _, new in self.converted}
        for module in root.modules():
            name = vars(module).get(self._NAME)
            if name is not None and id(module) not in ours and type(module) in {type(new) for _, new in self.converted}:
                raise PlanError(
                    f"{self._label} cannot be undone: {name} was copied while it was replaced, as peft's "
                    "modules_to_save does, and the copy would stay. Set backends after get_peft_model, or load again."
                )

    def revert(self, root: nn.Module) -> None:
        for old, new in reversed(self.converted):
            for name, parameter in new.named_parameters(recurse=False):
                old._parameters[name] = parameter  # the ones it has now, should they have been exchanged
            old.train(new.training)
            _replace(root, new, old)


def _shares_parameters(old: nn.Module, new: nn.Module) -> bool:
    before, after = dict(old.named_parameters()), dict(new.named_parameters())
    return before.keys() == after.keys() and all(after[name] is p for name, p in before.items())


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is a child."""
    for module in list(root.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


@dataclass
class SetLoss(Edit):
    """The model's `loss_function`, which Transformers reads from the instance; for a fused loss its head's forward."""

    before: list[dict[str, Any]] = field(default_factory=list, repr=False)
    heads: list[nn.Module] = field(default_factory=list, repr=False)

    @property
    def hook(self) -> str:
        return "model.loss_function" + (", the output head's forward" if self._fuses else "")

    @property
    def _fuses(self) -> bool:
        return self.backend.spec.capabilities.fuses_head

    def check(self) -> None:
        target = self._load()
        if isinstance(target, FusedLoss) is not self._fuses:
            raise PlanError(
                f"{self._label} ({self.backend.plugin.label}): its target must be a FusedLoss if and only if its "
                f"capabilities say fuses_head, got {target!r} with fuses_head={self._fuses}"
            )

    def apply(self, root: nn.Module, configs: ConfigCopies) -> None:
        backend = self._load()
        self.before, self.heads = [], []
        for site in self.sites:
            model: Any = site.module
            state = vars(model)
            self.before.append({"_loss_function": state["_loss_function"]} if "_loss_function" in state else {})
            if self._fuses:
                head = model.get_output_embeddings()
                reason = cannot_fuse(model, head)
                if reason:  # the plan was made before, or another edit has replaced the head
                    raise PlanError(f"{self._label}: {reason}")
                state["_loss_function"] = FusedLossFunction(
                    backend, self.options, model.loss_function, self.backend.spec.name
                )
                vars(head)["forward"] = MethodType(lazy_forward, head)
                self.heads.append(head)
            else:
                state["_loss_function"] = partial(backend, **self.options) if self.options else backend

    def check_revert(self, root: nn.Module) -> None:
        for head in self.heads:
            if not _is_lazy(head):
                raise PlanError(
                    f"{self._label} cannot be undone: the output head was hooked since, and the hook would be lost. "
                    "Remove it first, or load again."
                )

    def revert(self, root: nn.Module) -> None:
        for head in self.heads:
            if _is_lazy(head):
                del vars(head)["forward"]
        for site, before in zip(self.sites, self.before, strict=False):
            vars(site.module).pop("_loss_function", None)
            vars(site.module).update(before)
        self.before, self.heads = [], []


def _is_lazy(head: nn.Module) -> bool:
    return vars(head).get("forward") == MethodType(lazy_forward, head)


@dataclass
class SwapDispatcher(Edit):
    """Another dispatcher under experts that are already sharded over ranks."""

    swapped: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    """Of each site the forward that it had and the one in its place."""

    routers: list[tuple[nn.Module, Any]] = field(default_factory=list, repr=False)
    """Those that sliced what they chose (5.17, 5.18), with the forward that did."""

    @property
    def hook(self) -> str:
        return "EPImplementationInterface" if HAS_IMPLEMENTATIONS else "the forward that Transformers' style installed"

    def check(self) -> None:
        for site in self.sites:
            if sharded(site.module) is None:
                raise PlanError(f"{self._label}: {site.name} is sharded by something else than ep_dispatch_experts")

    @property
    def _in_place(self) -> bool:
        """Whether this is what stock's own forward does, where it can do but one thing (before 5.23)."""
        return self._is_stock() and not HAS_IMPLEMENTATIONS

    def register(self) -> None:
        if self._is_stock():
            return
        target = self._target()
        if HAS_IMPLEMENTATIONS:
            from transformers.distributed.expert_parallel import EPImplementationInterface

            register_function(self.key, self.backend.spec.target, (EPImplementationInterface, target))

    def _target(self) -> Callable[..., Any]:
        """What constructs an `EPImplementation` of Transformers' form."""
        loaded = self._load()
        target = partial(loaded, **self.options) if self.options else loaded
        if is_dispatcher(loaded):
            return partial(Dispatched, target, "negative_ids" in self.backend.spec.hands)
        if not HAS_IMPLEMENTATIONS:
            raise PlanError(
                f"{self._label} ({self.backend.plugin.label}): {self.backend.spec.target} has no dispatch and combine. "
                "A dispatcher of Transformers' own form, one whole call, needs transformers>=5.23"
            )
        return target

    def apply(self, root: nn.Module, configs: ConfigCopies) -> None:
        if self._in_place:
            return
        target = None if self._is_stock() else self._target()
        # back in force after a plan that was only made or is over: the same dispatchers, which may own buffers and
        # whose constructors may communicate
        before = {id(old): new for old, new in self.swapped}
        self.swapped = []
        for site in self.sites:
            state = vars(site.module)
            old = state["forward"]
            new = before.get(id(old))
            self.swapped.append((old, new))
            if new is None:
                now = sharded(site.module)
                assert now is not None
                install(site.module, now, self.key, target)
                self.swapped[-1] = old, state["forward"]
            else:
                state["forward"] = new
        self.routers = [(router, vars(router).pop("forward")) for router in slicing_routers(root)]

    def check_revert(self, root: nn.Module) -> None:
        for site, (_, new) in zip(self.sites, self.swapped, strict=not self._in_place):
            if vars(site.module).get("forward") is not new:
                raise PlanError(
                    f"{self._label} cannot be undone: {site.name} was hooked since, and the hook would be lost. "
                    "Remove it first, or load again."
                )
        for router, _ in self.routers:
            if "forward" in vars(router):
                raise PlanError(
                    f"{self._label} cannot be undone: a {type(router).__name__} was hooked since, and the hook would "
                    "be lost. Remove it first, or load again."
                )

    def revert(self, root: nn.Module) -> None:
        for site, (old, _) in zip(self.sites, self.swapped, strict=False):
            vars(site.module)["forward"] = old
        for router, forward in self.routers:
            vars(router)["forward"] = forward
        self.routers = []


def has_closure_forward(modules: Iterable[nn.Module]) -> bool:
    """Whether a module's forward is a closure, which a deep copy would share with the original, weights and all.

    A bound method is none: accelerate's mixed precision binds one to the module, and copying binds it to the copy.
    """
    forwards = (vars(module).get("forward") for module in modules)
    return any(isinstance(forward, FunctionType) and forward.__closure__ for forward in forwards)
