"""A plan's edits are made together or not at all, whichever way one of them fails."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_moe_conformance import zoo
from model_state import changes, state
from packaging.version import Version
from situations_backends import KINDS, install_toys, toy_attention, toy_experts, toy_linear, toy_loss, toy_norm
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_moe_backends
from hf_moe_backends import (
    AttentionBackend,
    BackendConfig,
    BackendSpec,
    BackendUnavailable,
    Capabilities,
    NoSite,
    Option,
    PlanError,
    edits,
    expert_parallel,
    get_moe_backend,
    moe_backend,
    plan_moe_backend,
    registry,
    reset_moe_backend,
    set_moe_backend,
)
from hf_moe_backends.discovery import Plugin
from hf_moe_backends.plan import plans
from hf_moe_backends.spec import FEATURES

TOYS = {"experts": toy_experts, "attn": toy_attention, "linear": toy_linear, "norm": toy_norm, "loss": toy_loss}

TARGETS = SimpleNamespace()
"""What the backends `mine` are, by kind. Each test puts there what it wants."""

EVERYTHING = BackendConfig(**dict.fromkeys(KINDS, "toy"))


def spec(kind: str, name: str = "mine", target: str = "", **more: Any) -> BackendSpec:
    features = frozenset(FEATURES[kind]) - {"layer_norm", "custom"}  # type: ignore[index]
    can = Capabilities(features=features, **{n: more.pop(n) for n in list(more) if n == "training"})
    return BackendSpec(
        kind=kind,  # type: ignore[arg-type]
        name=name,
        target=target or f"test_plan:TARGETS.{kind}",
        capabilities=can,
        **more,
    )


def offer(*specs: BackendSpec) -> None:
    """Add one plugin more to what is installed."""
    mine = Plugin(distribution="my-kernels", version="2.1", entry_point="mine", specs=specs)
    known = registry.registry()
    registry._registry = registry.Registry([*known.plugins, mine])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models as small as these are faster without threads waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", None)
    install_toys()
    offer(*map(spec, KINDS), spec("dispatcher", target="test_plan:constructed"))
    vars(TARGETS).clear()
    vars(TARGETS).update(TOYS)


class Undamaged:
    """A model, and the means to say that nothing happened to it."""

    def __init__(self, model: Any, in_force: BackendConfig | None):
        self.model = model
        self.inputs = zoo.sample_inputs(model)
        if in_force is not None:
            set_moe_backend(model, in_force)
        self.config = get_moe_backend(model)
        self.state = state(model)
        self.output = self.run()

    def run(self) -> Tensor:
        with torch.no_grad():
            return zoo.output(self.model, self.inputs)

    def check(self) -> None:
        assert changes(self.model, self.state) == []
        assert get_moe_backend(self.model) == self.config
        assert torch.equal(self.run(), self.output)

    def fails(self, config: BackendConfig, match: str, *, planned: bool = False, works: bool = True) -> None:
        """Setting fails and changes nothing, where the plan is made or, if it can be `planned`, where it is applied."""
        with pytest.raises(PlanError, match=match):
            set_moe_backend(self.model, config)
        self.check()
        if planned:
            plan = plan_moe_backend(self.model, config)
            with pytest.raises(PlanError, match=match):
                plan.apply()
            assert not plan.in_force
        else:
            with pytest.raises(PlanError, match=match):
                plan_moe_backend(self.model, config)
        self.check()
        if works:
            self.still_works()

    def still_works(self) -> None:
        """Another plan can be made and undone as if nothing had been."""
        set_moe_backend(self.model, BackendConfig(experts="loop"))
        assert get_moe_backend(self.model) == BackendConfig(experts="loop")
        assert torch.allclose(self.run(), self.output, rtol=1e-4, atol=1e-5)
        if self.config == BackendConfig():
            reset_moe_backend(self.model)
            self.check()
        else:
            set_moe_backend(self.model, self.config)
            assert torch.equal(self.run(), self.output)
            reset_moe_backend(self.model)


@pytest.fixture(params=[None, EVERYTHING], ids=["stock", "in force"])
def model(request: pytest.FixtureRequest) -> Undamaged:
    return Undamaged(zoo.build("qwen3_moe"), request.param)


class WrongOnce:
    """A function that does well but for one call: that after `count` others."""

    def __init__(self, count: int, well: Callable[..., Any], wrong: Callable[..., Any]):
        self.left, self.well, self.wrong = count, well, wrong

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        return (self.wrong if self.left == -1 else self.well)(*args, **kwargs)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


class TestImports:
    """What cannot be imported is found while the plan is made."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_target(self, model: Undamaged, kind: str) -> None:
        offer(spec(kind, "lost", "no_such_package.kernels:run"))
        reason = "could not be imported from no_such_package.kernels:run: ModuleNotFoundError: No module named 'no_such"
        config = dataclasses.replace(EVERYTHING, **{kind: "lost"})
        model.fails(config, rf"^{kind}='lost' \(my-kernels 2.1\) {reason}")

    @pytest.mark.parametrize("target", ["test_plan:no_such_function", "test_plan:TARGETS.nested.missing"])
    def test_an_attribute(self, model: Undamaged, target: str) -> None:
        offer(spec("linear", "lost", target))
        model.fails(BackendConfig(linear="lost"), rf"^linear='lost' .*could not be imported from {target}: AttributeE")

    def test_a_module_that_raises(self, model: Undamaged, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        (tmp_path / "broken_kernels.py").write_text("raise OSError('libkernels.so: cannot open shared object file')")
        monkeypatch.syspath_prepend(tmp_path)
        offer(spec("norm", "lost", "broken_kernels:convert"))
        model.fails(BackendConfig(norm="lost"), r"could not be imported .*OSError: libkernels.so: cannot open")


class TestNames:
    """A name that somebody else registered with Transformers is not taken from them."""

    @pytest.fixture
    def foreign(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
        def take(interface: Any) -> None:
            monkeypatch.setitem(type(interface)._global_mapping, "mine", foreign_function)

        def foreign_function(*_: Any) -> None:
            raise AssertionError("was called")

        for interface in (ALL_EXPERTS_FUNCTIONS, ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            monkeypatch.delitem(type(interface)._global_mapping, "mine", raising=False)
            monkeypatch.delitem(edits._registered, (type(interface).__name__, "mine"), raising=False)
        return take

    @pytest.mark.parametrize(
        ("kind", "interface"),
        [
            ("experts", ALL_EXPERTS_FUNCTIONS),
            ("attn", ALL_ATTENTION_FUNCTIONS),
            ("attn", ALL_MASK_ATTENTION_FUNCTIONS),
        ],
    )
    def test_foreign(self, model: Undamaged, kind: str, interface: Any, foreign: Callable[[Any], None]) -> None:
        foreign(interface)
        known = (ALL_EXPERTS_FUNCTIONS, ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
        before = [dict(type(each)._global_mapping) for each in known]
        model.fails(
            dataclasses.replace(EVERYTHING, **{kind: "mine"}),
            rf"'mine' is already registered in Transformers' {type(interface).__name__}, by other code.*another name",
        )
        # not even the other half of an attention backend, which would hand the foreign function a mask
        assert [dict(type(each)._global_mapping) for each in known] == before

    def test_options_have_names_of_their_own(self) -> None:
        """Two models may run one backend with different options at the same time."""
        seen: list[dict[str, Any]] = []

        def counting(*args: Any, **options: Any) -> Tensor:
            seen.append(options)
            return toy_experts(*args)

        TARGETS.experts = counting
        tile = Option(name="tile", type=int, default=64, help="")
        offer(spec("experts", "tiled", "test_plan:TARGETS.experts", options=(tile,)))
        config = BackendConfig(experts="tiled", options={"experts.tiled": {"tile": 1}})
        one, other = (zoo.build("qwen3_moe") for _ in range(2))
        set_moe_backend(one, config)
        set_moe_backend(other, BackendConfig(experts="tiled"))
        for model in (one, other):
            zoo.output(model, zoo.sample_inputs(model))
        assert seen == [{"tile": 1}] * 2 + [{"tile": 64}] * 2
        assert get_moe_backend(one) == config
        assert get_moe_backend(other) == BackendConfig(experts="tiled")


class OtherKeys(nn.Linear):
    def __init__(self, linear: nn.Linear):
        super().__init__(1, 1, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("scale", torch.ones(1))


class ExtraState(nn.Linear):
    """As TransformerEngine's modules."""

    def __init__(self, linear: nn.Linear):
        super().__init__(1, 1, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def get_extra_state(self) -> dict[str, int]:
        return {}

    def set_extra_state(self, state: Any) -> None:
        pass


def renamed(linear: nn.Linear) -> nn.Module:
    new = nn.Module()
    new.kernel = linear.weight
    return new


class TestConvert:
    """What `convert` gives must be another module on the same parameters."""

    WRONG = {
        "nothing": (lambda module: None, "must give another module, got None"),
        "a function": (lambda module: module.forward, "must give another module, got <bound method"),
        "the same": (lambda module: module, "must give another module, got Linear"),
        "new parameters": (
            lambda module: nn.Linear(module.in_features, module.out_features, bias=False),
            r"must keep the Parameter objects \['weight'\], got \['weight'\] with other objects among them",
        ),
        "one more": (
            lambda module: nn.Linear(module.in_features, module.out_features),
            r"must keep the Parameter objects \['weight'\], got \['bias', 'weight'\]",
        ),
        "none": (lambda module: nn.Identity(), r"must keep the Parameter objects \['weight'\], got \[\]"),
        "another name": (renamed, r"must keep the Parameter objects \['weight'\], got \['kernel'\]"),
        "a buffer": (OtherKeys, r"must not change the state dict's keys: \['scale'\]"),
        "extra state": (ExtraState, r"must not change the state dict's keys: \['_extra_state'\]"),
    }

    @pytest.mark.parametrize("count", [0, 8])
    @pytest.mark.parametrize("name", WRONG)
    def test_gives(self, model: Undamaged, name: str, count: int) -> None:
        wrong, reason = self.WRONG[name]
        sites = [n for n, m in zoo.build("qwen3_moe").named_modules() if type(m) is nn.Linear]
        match = rf"^linear='mine': converting {re.escape(sites[count])} {reason}"
        TARGETS.linear = WrongOnce(count, toy_linear, wrong)
        with pytest.raises(PlanError, match=match):
            set_moe_backend(model.model, BackendConfig(linear="mine"))
        model.check()
        model.still_works()

    @pytest.mark.parametrize("count", [0, 4, 8])
    @pytest.mark.parametrize("kind", ["linear", "norm"])
    @pytest.mark.parametrize("error", [RuntimeError("no cubin"), StopIteration()], ids=repr)
    def test_raises(self, model: Undamaged, kind: str, count: int, error: Exception) -> None:
        setattr(TARGETS, kind, WrongOnce(count, TOYS[kind], raising(error)))
        match = rf"^{kind}='mine' failed on this model and every edit was undone: {type(error).__name__}: {error}"
        with pytest.raises(PlanError, match=match) as caught:
            set_moe_backend(model.model, dataclasses.replace(EVERYTHING, **{kind: "mine"}))
        assert caught.value.__cause__ is error
        model.check()
        model.still_works()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("kind", ["linear", "norm"])
    def test_is_interrupted(self, model: Undamaged, kind: str, error: type[BaseException]) -> None:
        setattr(TARGETS, kind, WrongOnce(3, TOYS[kind], raising(error())))
        with pytest.raises(error):
            set_moe_backend(model.model, dataclasses.replace(EVERYTHING, **{kind: "mine"}))
        model.check()
        model.still_works()

    def test_a_tied_module_is_converted_once(self) -> None:
        """And what stands in its place is the same module in both places."""
        model = zoo.build("qwen3_moe")
        model.model.layers[1].mlp.gate_copy = model.lm_head
        before = state(model)
        TARGETS.linear = toy_linear
        set_moe_backend(model, BackendConfig(linear="mine"))
        assert type(model.lm_head).__name__ == "ToyLinear"
        assert model.model.layers[1].mlp.gate_copy is model.lm_head
        reset_moe_backend(model)
        assert changes(model, before) == []


class TestAttention:
    @pytest.mark.parametrize(
        ("backend", "reason"),
        [
            (lambda *_: None, "must be an AttentionBackend, with its mask function.*got <function"),
            (None, "must be an AttentionBackend.*got None"),
            (AttentionBackend(attention=print, mask="spda"), "its mask 'spda' is none of Transformers' mask functions"),
        ],
    )
    def test_refused(self, model: Undamaged, backend: Any, reason: str) -> None:
        TARGETS.attn = backend
        model.fails(dataclasses.replace(EVERYTHING, attn="mine"), f"attn='mine'.*{reason}")

    def test_a_mask_function_has_no_default(self) -> None:
        with pytest.raises(TypeError, match="mask"):
            AttentionBackend(attention=print)  # type: ignore[call-arg]

    def test_a_stock_name_that_the_model_cannot_run(self, model: Undamaged, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(model.model), "_supports_sdpa", False)
        model.fails(
            dataclasses.replace(EVERYTHING, attn="sdpa"), "attn='sdpa': Transformers refuses it for Qwen3MoeFor"
        )

    def test_a_stock_name_that_would_be_replaced(self, model: Undamaged, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(model.model), "get_correct_attn_implementation", lambda *_: "sdpa")
        model.fails(dataclasses.replace(EVERYTHING, attn="eager"), "would run Qwen3MoeForCausalLM on 'sdpa' instead")


class TestVerify:
    """An edit that changes nothing is an error."""

    @pytest.mark.parametrize(("kind", "path"), [("experts", "mlp.experts"), ("attn", "self_attn")])
    def test_a_config_that_is_none_of_the_models(self, kind: str, path: str) -> None:
        """Of a class and not of a module: the plan does not see it, and cannot put a copy in its place."""
        bare = zoo.build("qwen3_moe")
        site = bare.model.layers[1].get_submodule(path)
        real = type(site)
        site.__class__ = type("Odd", (real,), {"config": vars(site).pop("config"), "forward": real.forward})
        match = rf"^{kind}='toy' did not reach model.layers.1.{path}: its config is not one of the model's"
        Undamaged(bare, None).fails(dataclasses.replace(EVERYTHING, loss=None), match, planned=True, works=False)


def test_applying_twice_does_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = set_moe_backend(zoo.build("qwen3_moe"), EVERYTHING)
    before = state(plan.model)
    monkeypatch.setattr(edits.SetExperts, "apply", raising(ValueError("again")))
    plan.apply()
    assert changes(plan.model, before) == []


class TestLater:
    """An edit fails after those of other kinds were made."""

    @pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
    @pytest.mark.parametrize("method", ["apply", "verify"])
    @pytest.mark.parametrize(
        "edit", [edits.SetAttention, edits.ReplaceModules, edits.SetExperts, edits.SetLoss], ids=lambda e: e.__name__
    )
    def test_any_edit(
        self,
        model: Undamaged,
        edit: type[edits.Edit],
        method: str,
        error: BaseException,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        config = EVERYTHING if model.config != EVERYTHING else dataclasses.replace(EVERYTHING, experts="loop")
        plan = plan_moe_backend(model.model, config)
        real = getattr(edit, method)

        before = {id(mine) for in_force in plans(model.model) for mine in in_force.edits}

        def fails(self: edits.Edit, *args: Any) -> None:
            real(self, *args)
            if id(self) not in before:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(edit, method, fails)
            for attempt in (plan.apply, lambda: set_moe_backend(model.model, config)):
                if isinstance(error, Exception):
                    with pytest.raises(PlanError, match="failed on this model and every edit was undone: ValueError"):
                        attempt()
                else:
                    with pytest.raises(KeyboardInterrupt):
                        attempt()
                model.check()
        plan.apply()
        assert get_moe_backend(model.model) == config
        model.still_works()

    def test_the_error_names_the_edit(self, model: Undamaged, monkeypatch: pytest.MonkeyPatch) -> None:
        offer(spec("loss", "wrong"))
        real = edits.SetLoss.apply

        def fails(self: edits.Edit, *args: Any) -> None:
            if self.backend.spec.name == "wrong":
                raise ValueError("no")
            real(self, *args)

        monkeypatch.setattr(edits.SetLoss, "apply", fails)
        match = r"^loss='wrong' failed on this model and every edit was undone: ValueError: no$"
        model.fails(dataclasses.replace(EVERYTHING, norm=None, loss="wrong"), match, planned=True)


class Uncopyable:
    def __init__(self, error: BaseException):
        self.error = error

    def __deepcopy__(self, memo: Any) -> Any:
        raise self.error


class TestConfigCopies:
    @pytest.mark.parametrize("error", [TypeError("cannot pickle a lock"), KeyboardInterrupt()])
    def test_a_config_that_cannot_be_copied(self, error: BaseException) -> None:
        model = zoo.build("qwen3_moe")
        model.config.handle = Uncopyable(error)
        before = {name: vars(module).copy() for name, module in model.named_modules()}
        if isinstance(error, Exception):
            match = "^copying the config failed on this model and every edit was undone: TypeError: cannot pickle"
            with pytest.raises(PlanError, match=match):
                set_moe_backend(model, EVERYTHING)
        else:
            with pytest.raises(KeyboardInterrupt):
                set_moe_backend(model, EVERYTHING)
        assert {name: vars(module) for name, module in model.named_modules()} == before
        assert get_moe_backend(model) == BackendConfig()

    def test_configs_that_are_one_stay_one(self) -> None:
        """A wrapper's `text_config` is its language model's `config`: what is set on one is read from the other."""
        model = zoo.build("qwen3_moe")
        text = model.config.text_config = type(model.config)()
        model.model.layers[0].config = text
        set_moe_backend(model, BackendConfig(experts="torch_mm"))
        assert model.config.text_config is not text
        assert model.model.layers[0].config is model.config.text_config
        assert model.model.config is model.config
        reset_moe_backend(model)
        assert model.model.layers[0].config is model.config.text_config is text

    def test_only_what_attends_is_told_of_an_attention(self) -> None:
        """Experts are another matter: `generate` hands their implementation from config to config."""
        model = zoo.build("qwen3_moe")
        inner = model.config.inner = type(model.config)()
        inner._attn_implementation = "eager"
        set_moe_backend(model, BackendConfig(attn="toy", experts="toy"))
        assert model.config._attn_implementation == "toy"
        assert model.config.inner is not inner
        assert model.config.inner._attn_implementation == "eager"
        assert model.config.inner._experts_implementation == "toy"

    def test_nothing_is_written_to_a_config_that_others_have(self) -> None:
        shared = zoo.config("qwen3_moe")
        models = [zoo.build("qwen3_moe", config_object=shared) for _ in range(3)]
        values, states = dict(vars(shared)), [state(model) for model in models]
        set_moe_backend(models[0], EVERYTHING)
        set_moe_backend(models[1], BackendConfig(experts="torch_mm"))
        assert dict(vars(shared)) == values
        assert changes(models[2], states[2]) == []
        reset_moe_backend(models[0])
        assert changes(models[0], states[0]) == []
        assert get_moe_backend(models[1]) == BackendConfig(experts="torch_mm")
        reset_moe_backend(models[1])
        assert changes(models[1], states[1]) == []
        assert dict(vars(shared)) == values


def step3p7() -> Any:
    modeling = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = modeling.Step3p7TextConfig(
        vocab_size=zoo.VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts_per_tok=2,
        num_local_experts=8,
        n_routed_experts=8,
        moe_intermediate_size=32,
        share_expert_dim=32,
        mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = modeling.Step3p7TextModel._from_config(config).eval()
    zoo.randomise(model)
    return model


class TestDispatchLate:
    """step3p7, whose experts get a forward of their own."""

    CONFIG = BackendConfig(experts="toy", attn="toy", linear="toy")

    @pytest.fixture(params=[None, BackendConfig(experts="torch_mm", linear="toy")], ids=["stock", "in force"])
    def model(self, request: pytest.FixtureRequest) -> Undamaged:
        return Undamaged(step3p7(), request.param)

    def test_a_target_that_cannot_be_imported(self, model: Undamaged) -> None:
        offer(spec("experts", "lost", "no_such_package:run"))
        model.fails(BackendConfig(experts="lost"), "experts='lost'.*could not be imported")

    @pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
    @pytest.mark.parametrize(
        ("edit", "method"),
        [(edits.DispatchLate, "apply"), (edits.SetExperts, "apply"), (edits.SetExperts, "verify")],
    )
    def test_fails(
        self, model: Undamaged, edit: Any, method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            real = getattr(edit, method)
            before = {id(mine) for in_force in plans(model.model) for mine in in_force.edits}
            then = raising(error)
            patch.setattr(edit, method, lambda self, *args: real(self, *args) or (id(self) in before or then()))
            with pytest.raises(PlanError if isinstance(error, Exception) else KeyboardInterrupt):
                set_moe_backend(model.model, self.CONFIG)
        model.check()
        model.still_works()

    def test_fails_between_two_modules(self, model: Undamaged) -> None:
        plan = plan_moe_backend(model.model, self.CONFIG)
        late = next(edit for edit in plan.edits if isinstance(edit, edits.DispatchLate))
        assert len(late.sites) == 2
        late.owners = (late.owners[0], nn.Identity())  # which has no config
        with pytest.raises(PlanError, match=r"experts='toy' failed .*every edit was undone: AttributeError"):
            plan.apply()
        model.check()
        model.still_works()


class TestLoss:
    def test_a_loss_that_somebody_else_set(self) -> None:
        """It comes back, and so does its absence."""
        model, own = zoo.build("qwen3_moe"), toy_loss
        model.loss_function = own
        before = state(model)
        set_moe_backend(model, BackendConfig(loss="mine"))
        assert vars(model)["_loss_function"] is TARGETS.loss
        reset_moe_backend(model)
        assert changes(model, before) == []
        del model._loss_function
        before = state(model)
        set_moe_backend(model, BackendConfig(loss="mine"))
        reset_moe_backend(model)
        assert changes(model, before) == []


HAS_DISPATCHERS = Version(transformers.__version__) >= Version("5.23")


class Toy:
    """A dispatcher for one rank, which has every expert."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any):
        self.experts_forward, self.ep_mesh, self.tp_mesh = experts.forward, ep_mesh, tp_mesh

    def __call__(self, *args: Tensor) -> Tensor:
        return self.experts_forward(*args)


def constructed(*args: Any) -> Any:
    """The target of `mine`: Transformers goes on holding the first that it is given."""
    return TARGETS.constructor(*args)


@pytest.mark.skipif(not HAS_DISPATCHERS, reason="needs transformers>=5.23; the class below is for those before")
class TestDispatcher:
    """On one rank: what can fail is the same."""

    @pytest.fixture(autouse=True)
    def _ranks(self) -> Iterator[None]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.fixture(params=[None, BackendConfig(dispatcher="toy", linear="toy")], ids=["stock", "in force"])
    def model(self, request: pytest.FixtureRequest) -> Undamaged:
        """Its experts sharded over one rank, as loading with `ep_size` does."""
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

        model = zoo.build("qwen3_moe")
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            layer.mlp.experts._is_expert_parallel = True
            EpDispatchExpertsParallel().install_forward(layer.mlp.experts, mesh, tp_mesh=mesh)
        offer(spec("dispatcher", "toy", "test_plan:Toy"))
        return Undamaged(model, request.param)

    def test_works(self, model: Undamaged) -> None:
        TARGETS.constructor = Toy
        before = [vars(layer.mlp.experts)["forward"] for layer in model.model.model.layers]
        for name, kind in (("mine", "Toy"), ("all_to_all", "AllToAllEP"), ("all_reduce", "AllReduceEP")):
            set_moe_backend(model.model, BackendConfig(dispatcher=name))
            assert get_moe_backend(model.model) == BackendConfig(dispatcher=name)
            running = [expert_parallel.sharded(layer.mlp.experts).implementation for layer in model.model.model.layers]
            assert {type(each).__name__ for each in running} == {kind}
            assert torch.allclose(model.run(), model.output, rtol=1e-4, atol=1e-5)
        set_moe_backend(model.model, model.config)
        if model.config.dispatcher is None:
            assert [vars(layer.mlp.experts)["forward"] for layer in model.model.model.layers] == before
            assert torch.equal(model.run(), model.output)

    @pytest.mark.parametrize("count", [0, 1])
    @pytest.mark.parametrize("error", [ValueError("no NVLink"), KeyboardInterrupt()])
    def test_a_constructor_raises(self, model: Undamaged, count: int, error: BaseException) -> None:
        TARGETS.constructor = WrongOnce(count, Toy, raising(error))
        config = BackendConfig(experts="toy", dispatcher="mine", loss="toy")
        if isinstance(error, Exception):
            match = r"^dispatcher='mine' failed on this model and every edit was undone: ValueError: no NVLink"
            with pytest.raises(PlanError, match=match):
                set_moe_backend(model.model, config)
        else:
            with pytest.raises(KeyboardInterrupt):
                set_moe_backend(model.model, config)
        model.check()
        model.still_works()

    def test_a_target_that_cannot_be_imported(self, model: Undamaged) -> None:
        offer(spec("dispatcher", "lost", "no_such_package:Dispatcher"))
        model.fails(BackendConfig(dispatcher="lost", experts="toy"), r"^dispatcher='lost' .* could not be imported")

    def test_a_foreign_name(self, model: Undamaged, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.distributed.expert_parallel import EPImplementationInterface

        monkeypatch.setitem(EPImplementationInterface._global_mapping, "theirs", Toy)
        offer(spec("dispatcher", "theirs", "test_plan:Toy"))
        model.fails(BackendConfig(dispatcher="theirs"), "'theirs' is already registered in .*EPImplementationInterface")

    def test_a_later_edit_fails(self, model: Undamaged, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(edits.SetLoss, "apply", raising(ValueError("wrong")))
        config = BackendConfig(dispatcher="all_to_all", loss="toy")
        model.fails(config, r"^loss='toy' failed on this model and every edit was undone", planned=True)

    def test_planning_makes_no_dispatcher_again(self, model: Undamaged) -> None:
        """A constructor may allocate buffers, together with the other ranks."""
        TARGETS.constructor = WrongOnce(2, Toy, raising(ValueError("a third one")))
        set_moe_backend(model.model, BackendConfig(dispatcher="mine"))
        before = state(model.model)
        plan_moe_backend(model.model, BackendConfig(experts="loop"))
        with moe_backend(model.model, BackendConfig(experts="loop")):
            pass
        assert changes(model.model, before) == []

    def test_hooked_since(self, model: Undamaged) -> None:
        set_moe_backend(model.model, BackendConfig(dispatcher="toy"))
        experts = model.model.model.layers[1].mlp.experts
        ours = vars(experts)["forward"]
        vars(experts)["forward"] = lambda *args: ours(*args)
        before = state(model.model)
        with pytest.raises(
            PlanError, match=r"^dispatcher='toy' cannot be undone: model.layers.1.mlp.experts was hooked"
        ):
            reset_moe_backend(model.model)
        assert changes(model.model, before) == []
        vars(experts)["forward"] = ours
        reset_moe_backend(model.model)

    def test_sharded_by_something_else(self, model: Undamaged) -> None:
        reset_moe_backend(model.model)
        experts = model.model.model.layers[1].mlp.experts
        stock = vars(experts)["forward"]
        vars(experts)["forward"] = lambda *args: stock(*args)
        match = r"^dispatcher='toy': model.layers.1.mlp.experts is sharded by something else than ep_dispatch_experts$"
        Undamaged(model.model, None).fails(BackendConfig(dispatcher="toy"), match)

    def test_on_a_model_that_is_not_sharded(self) -> None:
        match = r"not sharded over ranks.*\n.*torchrun with DistributedConfig\(fsdp_size=N, ep_size=N\)"
        stock = Undamaged(zoo.build("qwen3_moe"), None)
        with pytest.raises(NoSite, match=match):
            set_moe_backend(stock.model, BackendConfig(dispatcher="all_to_all", experts="toy"))
        stock.check()


@pytest.mark.skipif(HAS_DISPATCHERS, reason="for transformers<5.23; the class above is for those after")
class TestNoDispatcher:
    def test_refused(self) -> None:
        model = zoo.build("qwen3_moe")
        for layer in model.model.layers:
            layer.mlp.experts._is_expert_parallel = True
        match = r"^dispatcher='mine': model.layers.0.mlp.experts is sharded by something else"
        Undamaged(model, None).fails(BackendConfig(dispatcher="mine"), match)


class TestTraining:
    """A backend without a backward pass is refused where the model trains, module by module."""

    @pytest.fixture(autouse=True)
    def _inference_only(self) -> None:
        offer(*(spec(kind, "fast", f"test_plan:TARGETS.{kind}", training=False, priority=900) for kind in KINDS))

    @pytest.mark.parametrize("kind", KINDS)
    def test_by_name(self, kind: str) -> None:
        config = BackendConfig(**{kind: "fast"})
        model = zoo.build("qwen3_moe").train()
        match = rf"(?s)^{kind}='fast' cannot run.*has no backward pass.*training mode: model\.eval\(\) first \(at "
        with pytest.raises(BackendUnavailable, match=match):
            plan_moe_backend(model, config)
        assert get_moe_backend(set_moe_backend(model.eval(), config).model) == config

    def test_by_auto(self) -> None:
        model = zoo.build("qwen3_moe")
        assert plan_moe_backend(model, BackendConfig(experts="auto")).config == BackendConfig(experts="fast")
        plan = plan_moe_backend(model.train(), BackendConfig(experts="auto"))
        assert plan.config == BackendConfig(experts="torch_mm")
        assert re.search(
            r"not fast: has no backward pass, .* \(at model\.layers\.0\.mlp\.experts and 1 more\)", str(plan)
        )

    def test_one_module_in_training_mode(self) -> None:
        """As when a part of a model is fine-tuned."""
        model = zoo.build("qwen3_moe")
        model.model.layers[1].mlp.train()
        with pytest.raises(BackendUnavailable, match=r"no backward pass.*\(at model\.layers\.1\.mlp\.experts\)"):
            plan_moe_backend(model, BackendConfig(experts="fast"))
        assert plan_moe_backend(model, BackendConfig(attn="fast")).config == BackendConfig(attn="fast")

    def test_the_mode_is_that_of_the_moment(self) -> None:
        model = zoo.build("qwen3_moe")
        plan = plan_moe_backend(model, BackendConfig(experts="fast"))
        model.train()
        with pytest.raises(BackendUnavailable, match="no backward pass"):
            plan_moe_backend(model, BackendConfig(experts="fast"))
        model.eval()
        plan.apply()
        assert plan.in_force


class TestText:
    """`print(plan)` is the explanation."""

    def test_a_plan_of_everything(self) -> None:
        model = zoo.build("gpt_oss")
        tile = Option(name="tile", type=int, default=64, help="")
        offer(spec("experts", "tiled", "test_plan:TARGETS.experts", options=(tile,)))
        config = BackendConfig(
            attn="eager",
            linear="mine",
            norm="torch",
            experts="tiled",
            loss="mine",
            options={"experts.tiled": {"tile": 8}},
        )
        plan = plan_moe_backend(model, config)
        ours = f"hf-moe-backends {hf_moe_backends.__version__}"
        expected = f"""\
GptOssForCausalLM: backends planned
  attn: eager on 2 sites, from {ours}
      through ALL_ATTENTION_FUNCTIONS and AttentionMaskInterface, config._attn_implementation
      1 x head 16, float32, cpu, gqa sinks sliding_window
      1 x head 16, float32, cpu, gqa sinks
  linear: mine on 9 sites, from my-kernels 2.1
      through module replacement
      4 x in 64 out 64, float32, cpu, bias
      4 x in 64 out 32, float32, cpu, bias
      1 x in 64 out 128, float32, cpu, head
  norm: torch on 5 sites, from {ours}
      5 x width 64, float32, cpu, rms(eps=1e-05)
  experts: tiled on 2 sites, from my-kernels 2.1
      through ALL_EXPERTS_FUNCTIONS, config._experts_implementation
      options tile=8
      2 x 8 experts, hidden 64 intermediate 96, float32, cpu, bias interleaved transposed, gpt_oss(limit=7, alpha=1.702)
  dispatcher: not asked for
  loss: mine on 1 site, from my-kernels 2.1
      through model.loss_function
"""
        lines = str(plan).splitlines()
        # the loss's own line is not this test's business
        assert lines[: len(expected.splitlines())] == expected.splitlines()
        plan.apply()
        assert str(plan).startswith("GptOssForCausalLM: backends in force\n")
        plan.revert()
        assert str(plan).startswith("GptOssForCausalLM: backends planned\n")

    def test_auto(self) -> None:
        text = str(plan_moe_backend(zoo.build("qwen3_moe"), BackendConfig.auto()))
        stock = "stock; auto does not swap one stock implementation for another"
        for line in (
            "  attn: stays on sdpa (2 sites)",
            "  norm: stays on torch (9 sites)",
            f"  experts: torch_mm (auto) on 2 sites, from hf-moe-backends {hf_moe_backends.__version__}",
            f"      not batched_mm, deepgemm, eager, sonicmoe: {stock}",
            "      not grouped_mm: priority 0 is not above torch_mm's 50",
            "      not loop: priority -10 is not above stock code's 0",
            "      not mine: priority 0 is not above stock code's 0",
            "      not toy: priority -100 is not above stock code's 0",
            "  dispatcher: this model has no site of kind dispatcher",
            "  loss: stays on torch (1 site)",
        ):
            assert line in text.splitlines()
        assert "options" not in text

    def test_experts_that_dispatch_late(self) -> None:
        text = str(plan_moe_backend(step3p7(), BackendConfig(experts="loop")))
        assert "      through the module's forward, as @use_experts_implementation sets it\n" in text
        assert "      through ALL_EXPERTS_FUNCTIONS, config._experts_implementation\n" in text

    def test_norms_and_their_orders(self) -> None:
        text = str(plan_moe_backend(zoo.build("qwen3_moe"), BackendConfig(norm="torch")))
        assert "      5 x width 64, float32, cpu, rms(eps=1e-06), rounds before its weight\n" in text
        assert "      4 x width 16, float32, cpu, rms(eps=1e-06), rounds before its weight\n" in text
