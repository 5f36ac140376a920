"""Backends set in every situation that a training script gets a model into: each works, or refuses with the reason."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hf_moe_conformance import zoo
from situations_backends import CALLS, KINDS, ToyLinear, ToyNorm, counted, install_toys
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_moe_backends import (
    BackendConfig,
    BackendUnavailable,
    PlanError,
    get_moe_backend,
    moe_backend,
    plan_moe_backend,
    registry,
    reset_moe_backend,
    set_moe_backend,
)
from hf_moe_backends.survey import survey

# Transformers 5.24 renames gradient checkpointing; peft and Trainer, like most scripts, go by the name that all have
pytestmark = pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")

TESTS = Path(__file__).parent
RELATIVE = 1e-6

EVERYTHING = BackendConfig(**dict.fromkeys(KINDS, "toy"))
REPLACED = ("linear", "norm")
IN_PLACE = ("experts", "attn", "loss")
CONFIGS = {
    "torch_mm": BackendConfig(experts="torch_mm"),
    "loop": BackendConfig(experts="loop"),
    **{kind: BackendConfig(**{kind: "toy"}) for kind in KINDS},
    "everything": EVERYTHING,
}


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", None)
    install_toys()
    CALLS.clear()


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> BackendConfig:
    return CONFIGS[request.param]


def build(family: str = "qwen3_moe", **options: Any) -> Any:
    return zoo.build(family, **options)


class Step(NamedTuple):
    """What one training step computes."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def inputs(model: Any) -> dict[str, Tensor]:
    ids = zoo.sample_inputs(model)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def step(model: Any, *, backward: bool = True) -> Step:
    """Run a model, whatever is around it. Gradients go by the names that the bare model has."""
    model.zero_grad()
    with nullcontext() if backward else torch.no_grad():
        out = model(**inputs(model))
    if backward:
        out.loss.backward()
    gradients = {
        name.replace("_orig_mod.", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Step(out.logits.detach().clone(), out.loss.detach(), gradients)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_close(got: Step, expected: Step) -> None:
    assert relative(got.logits, expected.logits) <= RELATIVE
    assert relative(got.loss, expected.loss) <= RELATIVE
    assert got.gradients.keys() == expected.gradients.keys()
    wrong = {n: relative(got.gradients[n], g) for n, g in expected.gradients.items()}
    assert {n: error for n, error in wrong.items() if error > RELATIVE} == {}


def assert_equal(got: Step, expected: Step) -> None:
    """Bit for bit."""
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.loss, expected.loss)
    assert got.gradients.keys() == expected.gradients.keys()
    assert [n for n, g in expected.gradients.items() if not torch.equal(got.gradients[n], g)] == []


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a reset must restore: the objects themselves, what they hold, and what the configs say."""
    configs = {name: vars(m)["config"] for name, m in model.named_modules() if "config" in vars(m)}
    return {
        "modules": {name: id(m) for name, m in model.named_modules(remove_duplicate=False)},
        "parameters": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "forwards": {name: id(vars(m).get("forward")) for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "training": {name: m.training for name, m in model.named_modules()},
        "configs": {name: id(config) for name, config in configs.items()},
        "values": {name: dict(vars(config)) for name, config in configs.items()},
        "keys": list(model.state_dict()),
    }


def asked(config: BackendConfig) -> set[str]:
    return {kind for kind in KINDS if getattr(config, kind) is not None}


def toys_in(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, (ToyLinear, ToyNorm))]


def run_in_force(model: Any, config: BackendConfig, *, backward: bool = True) -> Step:
    """A step with the backends of `config` in force, which must be those that are called."""
    assert get_moe_backend(model) == config
    CALLS.clear()
    with counted(config.experts) if config.experts in ("torch_mm", "loop") else nullcontext():
        done = step(model, backward=backward)
    assert set(CALLS) == asked(config)
    return done


def check_works(model: Any, config: BackendConfig, *, backward: bool = True, but: str = "") -> None:
    """Set, run, reset: as stock within RELATIVE, then stock bit for bit in the same objects.

    `but` is what stock code itself does not keep from one step to the next.
    """
    stock = step(model, backward=backward)
    before = snapshot(model)
    set_moe_backend(model, config)
    assert_close(run_in_force(model, config, backward=backward), stock)
    reset_moe_backend(model)
    assert get_moe_backend(model) == BackendConfig()
    after = snapshot(model)
    assert [what for what in before if what != but and after[what] != before[what]] == []
    CALLS.clear()
    assert_equal(step(model, backward=backward), stock)
    assert CALLS == []


def check_refuses(model: Any, config: BackendConfig, match: str) -> None:
    """Refused with the reason, and nothing touched."""
    before, in_force = snapshot(model), get_moe_backend(model)
    with pytest.raises((PlanError, BackendUnavailable), match=match):
        set_moe_backend(model, config)
    assert snapshot(model) == before
    assert get_moe_backend(model) == in_force


def check_stays(model: Any, match: str) -> None:
    """A reset is refused with the reason, and what was in force still is."""
    before, in_force = snapshot(model), get_moe_backend(model)
    with pytest.raises(PlanError, match=match):
        reset_moe_backend(model)
    assert snapshot(model) == before
    assert get_moe_backend(model) == in_force


class TestPlainModel:
    def test_in_eval_mode(self, config: BackendConfig) -> None:
        check_works(build(), config)

    def test_in_training_mode(self, config: BackendConfig) -> None:
        check_works(build().train(), config)

    def test_the_mode_may_change_while_in_force(self) -> None:
        model = build().train()
        set_moe_backend(model, EVERYTHING)
        assert all(m.training for m in model.modules())
        model.eval()
        reset_moe_backend(model)
        assert not any(m.training for m in model.modules())

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing(self, config: BackendConfig, reentrant: bool) -> None:
        model = build().train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        check_works(model, config)

    def test_checkpointing_enabled_while_in_force(self, config: BackendConfig) -> None:
        model = build().train()
        stock = step(model)
        set_moe_backend(model, config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_close(run_in_force(model, config), stock)
        if config.experts == "toy":
            assert CALLS.count("experts") == 4  # 2 layers, each computed again in backward
        reset_moe_backend(model)
        assert_equal(step(model), stock)

    def test_greedy_generation(self, config: BackendConfig) -> None:
        model = build(use_cache=True)
        prompt = zoo.sample_inputs(model)

        def generate() -> Tensor:
            return model.generate(**prompt, max_new_tokens=8, do_sample=False)

        stock = generate()
        set_moe_backend(model, config)
        with counted(config.experts) if config.experts in ("torch_mm", "loop") else nullcontext():
            assert torch.equal(generate(), stock)
        assert set(CALLS) == asked(config) - {"loss"}
        assert get_moe_backend(model) == config
        reset_moe_backend(model)
        assert torch.equal(generate(), stock)

    def test_dtype_and_weights_changed_while_in_force(self) -> None:
        model = build()
        set_moe_backend(model, EVERYTHING)
        model.double()
        model.float()
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        doubled = step(model)
        reset_moe_backend(model)
        assert_close(doubled, step(model))

    def test_a_discarded_model_is_freed(self) -> None:
        """By the garbage collector: a plan knows its model, so that counting references is not enough."""
        model = build()
        set_moe_backend(model, EVERYTHING)
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None


class TestSettingAgain:
    def test_the_same_twice(self, config: BackendConfig) -> None:
        model = build()
        stock, before = step(model), snapshot(model)
        set_moe_backend(model, config)
        set_moe_backend(model, config)
        once = len(toys_in(model))
        assert once == {"linear": 9, "norm": 9, "everything": 18}.get(name_of(config), 0)
        assert_close(run_in_force(model, config), stock)
        reset_moe_backend(model)
        reset_moe_backend(model)
        assert snapshot(model) == before

    def test_another_replaces_the_one_before(self) -> None:
        model = build()
        stock, before = step(model), snapshot(model)
        for config in CONFIGS.values():
            set_moe_backend(model, config)
            assert_close(run_in_force(model, config), stock)
        reset_moe_backend(model)
        assert snapshot(model) == before

    def test_one_kind_changed(self) -> None:
        model = build()
        set_moe_backend(model, EVERYTHING)
        set_moe_backend(model, dataclasses.replace(get_moe_backend(model), linear=None))
        run_in_force(model, dataclasses.replace(EVERYTHING, linear=None))

    def test_a_refused_one_leaves_the_one_before(self) -> None:
        model = build()
        model.model.norm.register_forward_hook(lambda *_: None)
        set_moe_backend(model, BackendConfig(linear="toy", experts="toy"))
        check_refuses(model, BackendConfig(linear="toy", norm="toy"), "hooks")
        run_in_force(model, BackendConfig(linear="toy", experts="toy"))

    def test_planning_changes_nothing(self) -> None:
        """Not even the identity of converted modules, which may have state of their own by now."""
        model = build()
        set_moe_backend(model, EVERYTHING)
        before = snapshot(model)
        plan_moe_backend(model, BackendConfig(experts="loop", attn="toy"))
        assert snapshot(model) == before
        run_in_force(model, EVERYTHING)

    def test_a_plan_applied_and_reverted_by_hand(self, config: BackendConfig) -> None:
        model = build()
        stock, before = step(model), snapshot(model)
        plan = plan_moe_backend(model, config)
        for _ in range(2):
            plan.apply()
            plan.apply()
            assert_close(run_in_force(model, config), stock)
            plan.revert()
            plan.revert()
            assert snapshot(model) == before

    def test_a_plan_that_became_impossible(self) -> None:
        model = build()
        plan = plan_moe_backend(model, EVERYTHING)
        model.lm_head.register_forward_hook(lambda *_: None)
        before = snapshot(model)
        with pytest.raises(PlanError, match=r"lm_head cannot be replaced: it has hooks"):
            plan.apply()
        assert snapshot(model) == before


def name_of(config: BackendConfig) -> str:
    return next(name for name, known in CONFIGS.items() if known == config)


class TestContexts:
    def test_nested(self) -> None:
        model = build()
        stock, before = step(model), snapshot(model)
        with moe_backend(model, EVERYTHING):
            outer = snapshot(model)
            with moe_backend(model, BackendConfig(experts="loop")):
                assert toys_in(model) == []
                with moe_backend(model, BackendConfig(linear="toy")):
                    assert_close(run_in_force(model, BackendConfig(linear="toy")), stock)
                assert_close(run_in_force(model, BackendConfig(experts="loop")), stock)
            assert snapshot(model) == outer
            assert_close(run_in_force(model, EVERYTHING), stock)
        assert snapshot(model) == before

    def test_an_exception_inside(self) -> None:
        model = build()
        before = snapshot(model)
        with pytest.raises(KeyboardInterrupt), moe_backend(model, EVERYTHING):
            with pytest.raises(ZeroDivisionError), moe_backend(model, BackendConfig(experts="loop")):
                raise ZeroDivisionError
            assert get_moe_backend(model) == EVERYTHING
            raise KeyboardInterrupt
        assert snapshot(model) == before

    def test_set_and_reset_inside(self) -> None:
        model = build()
        set_moe_backend(model, BackendConfig(norm="toy"))
        with moe_backend(model, EVERYTHING):
            set_moe_backend(model, BackendConfig(experts="loop"))
            reset_moe_backend(model)
        assert get_moe_backend(model) == BackendConfig(norm="toy")

    def test_config_values_set_in_a_context_outlive_it(self) -> None:
        model = build()
        set_moe_backend(model, BackendConfig(experts="toy"))
        with moe_backend(model, BackendConfig(experts="loop")):
            model.config.set_inside = 1
        assert model.config.set_inside == 1
        reset_moe_backend(model)
        assert model.config.set_inside == 1

    def test_what_stock_code_set_comes_back(self) -> None:
        """What was in force on entry, even where it was not this package that put it there."""
        model = build()
        set_moe_backend(model, BackendConfig(experts="toy", linear="toy"))
        model.set_experts_implementation("eager")
        with moe_backend(model, BackendConfig(experts="loop")):
            pass
        assert get_moe_backend(model) == BackendConfig(experts="eager", linear="toy")


class TestThreads:
    def test_a_worker_thread_sets_for_all(self) -> None:
        model = build()
        stock = step(model)
        worker = threading.Thread(target=set_moe_backend, args=(model, EVERYTHING))
        worker.start()
        worker.join()
        assert_close(run_in_force(model, EVERYTHING), stock)
        worker = threading.Thread(target=reset_moe_backend, args=(model,))
        worker.start()
        worker.join()
        assert_equal(step(model), stock)

    def test_two_threads_on_two_models(self) -> None:
        config = zoo.config("qwen3_moe")
        models = [zoo.build("qwen3_moe", config_object=config) for _ in range(2)]
        before = [snapshot(model) for model in models]
        stock = step(models[0])
        together = threading.Barrier(2, timeout=60)
        failed: list[BaseException] = []

        def work(model: Any, mine: BackendConfig) -> None:
            try:
                for _ in range(5):
                    together.wait()
                    set_moe_backend(model, mine)
                    assert_close(step(model), stock)
                    assert get_moe_backend(model) == mine
                    reset_moe_backend(model)
            except BaseException as error:
                together.abort()
                failed.append(error)

        configs = (EVERYTHING, BackendConfig(experts="loop", linear="toy"))
        run_threads([lambda m=m, c=c: work(m, c) for m, c in zip(models, configs, strict=True)])
        assert failed == []
        assert [snapshot(model) for model in models] == before

    def test_many_threads_on_one_model(self) -> None:
        model = build()
        before = snapshot(model)
        configs = (EVERYTHING, BackendConfig(experts="loop"), BackendConfig(linear="toy"), BackendConfig(norm="toy"))

        def work(config: BackendConfig) -> None:
            for _ in range(5):
                set_moe_backend(model, config)

        run_threads([lambda c=c: work(c) for c in configs])
        run_in_force(model, get_moe_backend(model))
        assert get_moe_backend(model) in configs
        reset_moe_backend(model)
        assert snapshot(model) == before


def run_threads(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestConfigs:
    def test_two_models_from_one_config_object(self, config: BackendConfig) -> None:
        shared = zoo.config("qwen3_moe")
        one, other = (zoo.build("qwen3_moe", config_object=shared) for _ in range(2))
        assert one.config is other.config
        stock, before = step(other), snapshot(other)
        set_moe_backend(one, config)
        assert snapshot(other) == before
        CALLS.clear()
        assert_equal(step(other), stock)
        assert CALLS == []
        assert get_moe_backend(other) == BackendConfig()
        reset_moe_backend(one)
        assert one.config is shared

    def test_changes_while_in_force_survive_the_reset(self) -> None:
        model = build()
        original = model.config
        original.unused = "dropped"
        original.nested = {"kept": 1}
        set_moe_backend(model, EVERYTHING)
        model.config.pad_token_id = 7
        model.config.new = [1]
        model.config.nested["added"] = 2
        del model.config.unused
        assert original.pad_token_id == 0
        assert original.nested == {"kept": 1}
        reset_moe_backend(model)
        assert model.config is original
        assert (original.pad_token_id, original.new, original.nested) == (7, [1], {"kept": 1, "added": 2})
        assert not hasattr(original, "unused")

    def test_changes_of_the_original_while_in_force_survive_too(self) -> None:
        """Another model built from the same config object may be given something."""
        model = build()
        original = model.config
        set_moe_backend(model, EVERYTHING)
        original.given = 1
        reset_moe_backend(model)
        assert original.given == 1

    def test_changes_of_a_config_inside(self) -> None:
        """Which no module needs to hold."""
        model = build()
        inner = model.config.inner = type(model.config)()
        set_moe_backend(model, EVERYTHING)
        model.config.inner.given = 1
        assert not hasattr(inner, "given")
        reset_moe_backend(model)
        assert model.config.inner is inner
        assert inner.given == 1
        assert inner._experts_implementation == type(model.config)()._experts_implementation

    def test_values_that_do_not_compare(self) -> None:
        model = build()
        opaque, tensor = object(), torch.ones(3)
        model.config.opaque, model.config.tensor = opaque, tensor
        set_moe_backend(model, EVERYTHING)
        reset_moe_backend(model)
        assert model.config.opaque is opaque
        assert model.config.tensor is tensor

    @pytest.mark.parametrize("kind", ["experts", "attn"])
    def test_stock_setters_behind_our_back(self, kind: str) -> None:
        model = build()
        stock, before = step(model), snapshot(model)
        set_moe_backend(model, EVERYTHING)
        getattr(model, f"set_{kind}_implementation")("eager")
        changed = dataclasses.replace(EVERYTHING, **{kind: "eager"})
        assert get_moe_backend(model) == changed
        plan_moe_backend(model, BackendConfig(experts="loop"))
        assert get_moe_backend(model) == changed
        CALLS.clear()
        step(model)
        assert set(CALLS) == set(KINDS) - {kind}
        reset_moe_backend(model)
        assert snapshot(model) == before
        assert_equal(step(model), stock)

    def test_stock_setters_for_kinds_that_are_not_ours(self) -> None:
        model = build()
        set_moe_backend(model, BackendConfig(linear="toy"))
        model.set_experts_implementation("batched_mm")
        assert get_moe_backend(model) == BackendConfig(linear="toy")
        reset_moe_backend(model)
        assert model.config._experts_implementation == "batched_mm"

    def test_save_pretrained_writes_what_stock_writes(self, config: BackendConfig, tmp_path: Path) -> None:
        model = build()
        model.save_pretrained(tmp_path / "stock")
        set_moe_backend(model, config)
        model.save_pretrained(tmp_path / "set")
        reset_moe_backend(model)
        model.save_pretrained(tmp_path / "reset")
        stock = files(tmp_path / "stock")
        assert {"config.json", "model.safetensors"} <= stock.keys()
        assert files(tmp_path / "set") == files(tmp_path / "reset") == stock
        assert not any(word in stock["config.json"] for word in (b"toy", b"torch_mm", b"loop", b"backend"))

    def test_resized_embeddings_while_in_force(self, config: BackendConfig, tmp_path: Path) -> None:
        model, expected = build(), build()
        original = model.config
        set_moe_backend(model, config)
        for each in (model, expected):
            torch.manual_seed(0)
            each.resize_token_embeddings(140)
        assert_close(run_in_force(model, config), step(expected))
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 140
        assert original.vocab_size == zoo.VOCABULARY
        reset_moe_backend(model)
        assert model.config is original
        assert (original.vocab_size, model.lm_head.weight.shape[0]) == (140, 140)
        assert_equal(step(model), step(expected))
        assert toys_in(model) == []


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestSubmodels:
    def test_part_of_a_model_in_force(self) -> None:
        model = build()
        set_moe_backend(model, BackendConfig(experts="toy"))
        check_refuses(model.model, BackendConfig(experts="loop"), r"part of a Qwen3MoeForCausalLM.*on that model")
        assert get_moe_backend(model.model) == BackendConfig(experts="toy")

    def test_the_whole_after_a_part(self) -> None:
        model = build()
        stock, before = step(model), snapshot(model)
        set_moe_backend(model.model, BackendConfig(experts="toy", linear="toy"))
        assert get_moe_backend(model) == BackendConfig()
        assert "lm_head" not in toys_in(model)
        set_moe_backend(model, BackendConfig(experts="loop", norm="toy"))
        assert_close(run_in_force(model, BackendConfig(experts="loop", norm="toy")), stock)
        reset_moe_backend(model)
        assert snapshot(model) == before

    def test_a_context_on_the_whole_brings_the_part_back(self) -> None:
        model = build()
        set_moe_backend(model.model, BackendConfig(experts="toy", linear="toy"))
        before = snapshot(model)
        with moe_backend(model, BackendConfig(experts="loop")):
            assert get_moe_backend(model.model) == BackendConfig(experts="loop")
        assert snapshot(model) == before
        assert get_moe_backend(model.model) == BackendConfig(experts="toy", linear="toy")

    def test_all_models_inside_a_module_or_none(self) -> None:
        pair = nn.ModuleList([build(), build()])
        set_moe_backend(pair[0], BackendConfig(linear="toy"))
        set_moe_backend(pair[1], BackendConfig(linear="toy", experts="toy"))
        handle = pair[1].lm_head.register_forward_hook(lambda *_: None)
        before = snapshot(pair)
        for call in (
            lambda: reset_moe_backend(pair),
            lambda: plan_moe_backend(pair, BackendConfig(experts="loop")),
            lambda: set_moe_backend(pair, BackendConfig(experts="loop")),
        ):
            with pytest.raises(PlanError, match="cannot be undone"):
                call()
            assert snapshot(pair) == before
        handle.remove()
        set_moe_backend(pair, BackendConfig(experts="loop"))
        assert [get_moe_backend(model) for model in (pair, *pair)] == [BackendConfig(experts="loop")] * 3
        reset_moe_backend(pair)
        assert toys_in(pair) == []


class TestHooks:
    """What hangs on a module would be lost with it."""

    @pytest.mark.parametrize(
        "register",
        ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
    )
    @pytest.mark.parametrize("kind", REPLACED)
    def test_on_a_module_to_replace(self, kind: str, register: str) -> None:
        model = build()
        module = {"linear": model.lm_head, "norm": model.model.norm}[kind]
        handle = getattr(module, register)(lambda *_: None)
        check_refuses(model, CONFIGS[kind], "it has hooks or a forward of its own, which would be lost")
        handle.remove()
        check_works(model, CONFIGS[kind])

    @pytest.mark.parametrize("kind", REPLACED)
    def test_on_a_replaced_module(self, kind: str) -> None:
        model = build()
        before = snapshot(model)
        set_moe_backend(model, CONFIGS[kind])
        module = {"linear": model.lm_head, "norm": model.model.norm}[kind]
        handle = module.register_forward_hook(lambda *_: None)
        check_stays(model, "hooks were put on (lm_head|model.norm) after it was replaced")
        check_refuses(model, BackendConfig(experts="loop"), "cannot be undone")
        handle.remove()
        reset_moe_backend(model)
        assert snapshot(model) == before

    def test_a_compiled_layer_is_not_replaced(self) -> None:
        model = build()
        model.lm_head.compile(backend="eager")
        check_refuses(model, CONFIGS["linear"], "forward of its own")

    def test_auto_leaves_them_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prefer_toys(monkeypatch)
        model = build()
        plan = plan_moe_backend(model, BackendConfig.auto())
        assert plan.config == EVERYTHING
        model.lm_head.register_forward_hook(lambda *_: None)
        plan = plan_moe_backend(model, BackendConfig.auto())
        assert plan.config == dataclasses.replace(EVERYTHING, linear=None)
        assert "linear: stays on torch: it has hooks" in str(plan)

    @pytest.mark.parametrize("kind", IN_PLACE)
    def test_hooks_go_on_where_modules_stay(self, kind: str) -> None:
        model = build()
        seen: list[nn.Module] = []
        for module in model.modules():
            module.register_forward_hook(lambda module, *_: seen.append(module))
        check_works(model, CONFIGS[kind])
        layer = model.model.layers[0]
        for module in (model, layer.mlp, layer.mlp.gate, layer.mlp.experts, layer.self_attn, model.lm_head):
            assert sum(module is called for called in seen) == 3


def prefer_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `auto` choose the toys."""
    toys = registry.registry()
    chosen = tuple(
        dataclasses.replace(b, spec=dataclasses.replace(b.spec, priority=1000)) if b.spec.name == "toy" else b
        for b in toys.backends
    )
    monkeypatch.setattr(toys, "backends", chosen)


class TestPeft:
    peft = pytest.importorskip("peft")
    EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

    def lora(self, model: Any, *, experts: bool = False, **options: Any) -> Any:
        torch.manual_seed(0)
        if experts:
            options["target_parameters"] = list(self.EXPERTS)
        settings = self.peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
        return self.peft.get_peft_model(model, settings).eval()

    @pytest.mark.parametrize("experts", [False, True], ids=["attention", "experts"])
    def test_set_after(self, config: BackendConfig, experts: bool) -> None:
        model = build()
        original = model.config
        wrapped = self.lora(model, experts=experts)
        check_works(wrapped, config)
        assert wrapped.config is model.config is original

    @pytest.mark.parametrize("experts", [False, True], ids=["attention", "experts"])
    def test_set_before(self, config: BackendConfig, experts: bool) -> None:
        reference = self.lora(build(), experts=experts)
        stock, expected = step(reference), snapshot(reference)
        model = build()
        original = model.config
        set_moe_backend(model, config)
        wrapped = self.lora(model, experts=experts)
        assert_close(run_in_force(wrapped, config), stock)
        assert get_moe_backend(model) == config
        assert wrapped.config is model.config
        reset_moe_backend(wrapped)
        assert wrapped.config is model.config is original
        assert toys_in(wrapped) == []
        assert snapshot(wrapped)["keys"] == expected["keys"]
        assert_equal(step(wrapped), stock)

    @pytest.mark.parametrize("experts", [False, True], ids=["attention", "experts"])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_merged_while_in_force(self, when: str, experts: bool) -> None:
        reference = self.lora(build(), experts=experts).merge_and_unload()
        merged = step(reference.requires_grad_(True))
        model = build()
        if when == "before":
            set_moe_backend(model, EVERYTHING)
        wrapped = self.lora(model, experts=experts)
        if when == "after":
            set_moe_backend(wrapped, EVERYTHING)
        bare = wrapped.merge_and_unload().requires_grad_(True)
        assert bare is model
        assert set(bare.state_dict()) == set(build().state_dict())
        assert_close(run_in_force(bare, EVERYTHING), merged)
        reset_moe_backend(bare)
        assert toys_in(bare) == []
        assert_equal(step(bare), merged)

    def test_disabled_adapter(self) -> None:
        stock = step(build(), backward=False)
        wrapped = self.lora(build(), experts=True)
        set_moe_backend(wrapped, EVERYTHING)
        with wrapped.disable_adapter():
            assert_close(run_in_force(wrapped, EVERYTHING, backward=False), stock)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_an_adapter_of_transformers(self, when: str, config: BackendConfig) -> None:
        """`model.add_adapter`, which injects layers and wraps nothing."""
        settings = self.peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        reference, model = build(), build()
        torch.manual_seed(0)
        try:
            reference.add_adapter(settings)
        except ValueError as error:
            pytest.skip(str(error))
        if when == "before":
            set_moe_backend(model, config)
        torch.manual_seed(0)
        model.add_adapter(settings)
        if when == "after":
            set_moe_backend(model, config)
        stock = step(reference.eval())
        assert_close(run_in_force(model.eval(), config), stock)
        reset_moe_backend(model)
        assert_equal(step(model), stock)

    def test_a_checkpoint_of_the_adapter(self, tmp_path: Path) -> None:
        self.lora(build(), experts=True).save_pretrained(tmp_path / "stock")
        model = build()
        set_moe_backend(model, EVERYTHING)
        self.lora(model, experts=True).save_pretrained(tmp_path / "set")
        assert files(tmp_path / "set") == files(tmp_path / "stock")

    def test_experts_among_modules_to_save(self) -> None:
        """peft deep-copies them, with their config."""
        stock = step(self.lora(build(), modules_to_save=["experts"]))
        model = build()
        set_moe_backend(model, BackendConfig(experts="toy", attn="toy"))
        wrapped = self.lora(model, modules_to_save=["experts"])
        plan_moe_backend(wrapped, BackendConfig(experts="loop"))
        assert_close(run_in_force(wrapped, BackendConfig(experts="toy", attn="toy")), stock)
        reset_moe_backend(wrapped)
        CALLS.clear()
        assert_equal(step(wrapped), stock)
        assert CALLS == []

    def test_a_replaced_module_among_modules_to_save(self) -> None:
        stock = step(self.lora(build(), modules_to_save=["lm_head"]))
        model = build()
        set_moe_backend(model, BackendConfig(linear="toy"))
        wrapped = self.lora(model, modules_to_save=["lm_head"])
        assert_close(run_in_force(wrapped, BackendConfig(linear="toy")), stock)
        check_stays(wrapped, r"lm_head was copied while it was replaced.*after get_peft_model")
        check_works(self.lora(build(), modules_to_save=["lm_head"]), BackendConfig(linear="toy"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("kind", KINDS)
    def test_set_on_the_compiled_model(self, kind: str) -> None:
        """Before and after its first call: switching compiles anew."""
        compiled = torch.compile(build(), backend="eager")
        set_moe_backend(compiled, CONFIGS[kind])
        run_in_force(compiled, CONFIGS[kind])
        reset_moe_backend(compiled)
        check_works(compiled, CONFIGS[kind])

    def test_with_compiled_backward(self) -> None:
        check_works(torch.compile(build(), backend="aot_eager"), EVERYTHING)

    CAPTURED = dataclasses.replace(EVERYTHING, experts=None)  # the toy experts break the graph, and take their time

    def test_set_before_compiling(self) -> None:
        model = build()
        stock = step(model)
        set_moe_backend(model, self.CAPTURED)
        compiled = torch.compile(model, backend="eager")
        assert_close(run_in_force(compiled, self.CAPTURED), stock)
        reset_moe_backend(compiled)
        CALLS.clear()
        assert_close(step(compiled), stock)
        assert CALLS == []

    def test_compiled_in_place(self) -> None:
        model = build()
        model.compile(backend="eager")
        check_works(model, self.CAPTURED)

    def test_torch_mm_in_bfloat16(self) -> None:
        model = build(dtype=torch.bfloat16)
        set_moe_backend(model, CONFIGS["torch_mm"])
        plain, compiled = step(model), step(torch.compile(model, backend="eager"))
        assert relative(compiled.logits, plain.logits) <= 1e-2
        assert max(relative(compiled.gradients[n], g) for n, g in plain.gradients.items()) <= 5e-2

    def test_torch_mm_in_float32(self) -> None:
        check_works(torch.compile(build(), backend="eager"), CONFIGS["torch_mm"])

    def test_compiled_layer_by_layer(self) -> None:
        model = build()
        for layer in model.model.layers:
            layer.compile(backend="eager")
        check_works(model, EVERYTHING)


class TestCopies:
    def test_a_deep_copy_is_on_its_own(self, config: BackendConfig) -> None:
        model = build()
        stock, before = step(model), snapshot(model)
        set_moe_backend(model, config)
        copied = copy.deepcopy(model)
        assert_close(run_in_force(copied, config), stock)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(1.1)
        assert_close(run_in_force(model, config), stock)
        assert relative(step(copied).logits, stock.logits) > 1e-3
        reset_moe_backend(copied)
        assert get_moe_backend(copied) == BackendConfig()
        assert toys_in(copied) == []
        assert (
            vars(copied.config)["_experts_implementation_internal"]
            == before["values"][""]["_experts_implementation_internal"]
        )
        CALLS.clear()
        step(copied)
        assert CALLS == []
        assert_close(run_in_force(model, config), stock)
        reset_moe_backend(model)
        assert snapshot(model) == before

    def test_set_on_the_copy_only(self) -> None:
        model = build()
        set_moe_backend(model, EVERYTHING)
        copied = copy.deepcopy(model)
        set_moe_backend(copied, BackendConfig(experts="loop"))
        run_in_force(copied, BackendConfig(experts="loop"))
        run_in_force(model, EVERYTHING)

    def test_a_copied_part(self) -> None:
        model = build()
        set_moe_backend(model, EVERYTHING)
        part = copy.deepcopy(model.model)
        assert get_moe_backend(part) == EVERYTHING
        reset_moe_backend(part)
        assert toys_in(part) == []
        run_in_force(model, EVERYTHING)
        set_moe_backend(part, BackendConfig(experts="loop"))

    def test_a_peft_model_copied(self) -> None:
        peft = pytest.importorskip("peft")
        model = build()
        set_moe_backend(model, EVERYTHING)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        wrapped = peft.get_peft_model(model, settings).eval()
        copied = copy.deepcopy(wrapped)
        expected = step(wrapped)
        reset_moe_backend(wrapped)
        assert_close(run_in_force(copied, EVERYTHING), expected)
        reset_moe_backend(copied)
        assert_close(step(copied), expected)

    def test_mixed_precision_of_accelerate(self) -> None:
        """It binds a forward to the model, which a copy has bound to itself."""
        accelerate = pytest.importorskip("accelerate")
        model = build()
        set_moe_backend(model, EVERYTHING)
        prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
        run_in_force(copy.deepcopy(prepared), EVERYTHING)

    def test_a_closure_is_not_copied(self) -> None:
        """The copy would run the original's weights."""
        model = build()
        set_moe_backend(model, EVERYTHING)
        experts = model.model.layers[0].mlp.experts
        stock = experts.forward
        experts.forward = lambda *args: stock(*args)
        with pytest.raises(PlanError, match="cannot be deep-copied"):
            copy.deepcopy(model)

    def test_unpickled_in_this_process(self, config: BackendConfig, tmp_path: Path) -> None:
        model = build()
        stock = step(model)
        set_moe_backend(model, config)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert_close(run_in_force(loaded, config), stock)
        reset_moe_backend(loaded)
        assert_equal(step(loaded), stock)
        run_in_force(model, config)

    def test_unpickled_in_a_fresh_process(self, tmp_path: Path) -> None:
        stock = step(build())
        for name, config in CONFIGS.items():
            model = build()
            set_moe_backend(model, config)
            torch.save(model, tmp_path / f"{name}.pt")
        torch.save((inputs(model), stock.logits), tmp_path / "expected.pt")
        found = json.loads(python(UNPICKLE, str(tmp_path), *CONFIGS, path=[str(TESTS)]))
        for name, config in CONFIGS.items():
            row = found[name]
            assert row["config"] == config.to_dict()
            assert row["error"] <= RELATIVE
            assert set(row["calls"]) == (asked(config) if "toy" in config.to_dict().values() else set())
            assert row["after reset"] == {"config": {}, "equal": True, "calls": []}

    @pytest.mark.parametrize("name", KINDS)
    def test_unpickled_without_the_plugin(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error names the module that is missing; where pickle does not get there first, the backend as well."""
        model = build()
        set_moe_backend(model, CONFIGS[name])
        torch.save(model, tmp_path / "model.pt")
        monkeypatch.setitem(sys.modules, "situations_backends", None)
        expected = (
            (PlanError, rf"{name}='toy' \(situations-toys 1.0\) could not be imported from situations_backends:")
            if name in ("experts", "attn")
            else (ModuleNotFoundError, "situations_backends")
        )
        with pytest.raises(expected[0], match=expected[1]):
            torch.load(tmp_path / "model.pt", weights_only=False)


UNPICKLE = """
import json, sys
import torch
folder, *names = sys.argv[1:]
inputs, logits = torch.load(f"{folder}/expected.pt")
assert "hf_moe_backends" not in sys.modules
report = {}
for name in names:
    model = torch.load(f"{folder}/{name}.pt", weights_only=False)
    from hf_moe_backends import get_moe_backend, reset_moe_backend
    from situations_backends import CALLS
    row = report[name] = {"config": get_moe_backend(model).to_dict()}
    CALLS.clear()
    with torch.no_grad():
        row["error"] = ((model(**inputs).logits - logits).norm() / logits.norm()).item()
    row["calls"] = list(CALLS)
    reset_moe_backend(model)
    CALLS.clear()
    with torch.no_grad():
        equal = torch.equal(model(**inputs).logits, logits)
    row["after reset"] = {"config": get_moe_backend(model).to_dict(), "equal": equal, "calls": list(CALLS)}
print(json.dumps(report))
"""


def python(code: str, *arguments: str, path: list[str]) -> str:
    """What a fresh process prints."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*path, str(TESTS.parent), str(TESTS.parent / "conformance")])
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_ranks(world: int, folder: Path, *wraps: str, **environment: str) -> dict[tuple[str, Any, Any], dict[str, Any]]:
    """`situations_ranks.py` on so many processes: its rows by wrapper, kind and when it was set."""
    processes = []
    for rank in range(world):
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), str(TESTS.parent / "conformance")])
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "PYTHONPATH": path}
        command = [str(TESTS / "situations_ranks.py"), str(folder / "store"), str(folder / "report.json"), *wraps]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", *command],
                env=os.environ | environment | ranks,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(printed)
    rows = json.loads((folder / "report.json").read_text())
    return {(row["wrap"], row["kind"], row.get("when")): row for row in rows}


def check_row(rows: dict[tuple[str, Any, Any], dict[str, Any]], wrap: str, kind: str, when: str) -> None:
    """Everything works under any wrapper, but that a module is not exchanged under one that shards it."""
    stock, row = rows[wrap, None, None], rows[wrap, kind, when]
    held = wrap != "ddp" and kind in REPLACED
    assert row["losses"] == pytest.approx(stock["losses"], rel=RELATIVE)
    assert row["loss after reset"] == pytest.approx(stock["last"], rel=RELATIVE)
    if held and when == "after":
        assert re.match(r"BackendUnavailable: .*(\n.*)*sharded already.*Set backends before sharding", row["set"])
        assert not row["in force"]
        assert row["calls"] == 0
    else:
        assert row["set"] == "works"
        assert row["in force"]
        assert row["calls"] > 0
    if held and when == "before":
        assert re.match(r"PlanError: .* cannot be undone: the model was sharded.*Reset before sharding", row["reset"])
        assert row["calls after reset"] > 0
    else:
        assert row["reset"] == "works"
        assert row["calls after reset"] == 0


WRAPS = ("ddp", "fsdp1", "fsdp1-layers", "fsdp2", "fsdp2-layers")


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_ranks(request.param, tmp_path_factory.mktemp("ranks"), *WRAPS)


class TestRanks:
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("wrap", WRAPS)
    def test_wrapped(self, rows: Any, wrap: str, kind: str, when: str) -> None:
        check_row(rows, wrap, kind, when)

    @pytest.mark.parametrize("wrap", WRAPS)
    def test_experts_in_a_context(self, rows: Any, wrap: str) -> None:
        assert {rows[wrap, "experts", when]["context"] for when in ("before", "after")} == {"loop"}


class TestZero3:
    @pytest.mark.slow
    @pytest.mark.parametrize("world", [1, 2])
    def test_for_real(self, world: int, tmp_path: Path) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed")
        rows = on_ranks(
            world,
            tmp_path,
            "zero3",
            DS_ACCELERATOR="cpu",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(29500 + os.getpid() % 1000),
            LOCAL_SIZE=str(world),
        )
        for kind in KINDS:
            for when in ("before", "after"):
                check_row(rows, "zero3", kind, when)

    def test_emulated(self) -> None:
        """The attributes that DeepSpeed gives the parameters it has partitioned."""
        model = build()
        stock = survey(model)
        set_moe_backend(model, EVERYTHING)
        partitioned = {name: parameter.data for name, parameter in model.named_parameters()}
        for i, parameter in enumerate(model.parameters()):
            parameter.ds_id, parameter.ds_shape = i, parameter.shape
            parameter.data = torch.empty(0)
        check_stays(model, "the model was sharded after its modules were replaced")

        model = build()
        for i, parameter in enumerate(model.parameters()):
            parameter.ds_id, parameter.ds_shape = i, parameter.shape
            parameter.data = torch.empty(0)
        for kind, sites in survey(model).items():
            for site, expected in zip(sites, stock[kind], strict=True):
                assert site.demand.sizes == expected.demand.sizes
                assert site.demand.features == expected.demand.features
                assert site.demand.sharding in ("zero3", None)
        for kind in REPLACED:
            check_refuses(model, CONFIGS[kind], r"sharded already.*Set backends before sharding")
        config = BackendConfig(experts="torch_mm", attn="toy", loss="toy")
        set_moe_backend(model, config)
        for name, parameter in model.named_parameters():
            parameter.data = partitioned[name]  # as its hooks do for the time of a forward
        CALLS.clear()
        assert_close(step(model), step(build()))
        assert set(CALLS) == {"attn", "loss"}
        reset_moe_backend(model)


class TestAccelerate:
    accelerate = pytest.importorskip("accelerate")

    def dispatched(self, model: Any, how: str, folder: Path) -> Any:
        """The model with accelerate's hooks on its modules."""
        if how == "cpu_offload":
            return self.accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        if how == "disk_offload":
            return self.accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
        device_map = {"model": "cpu", "lm_head": "disk"}
        return self.accelerate.dispatch_model(
            model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True
        )

    HOW = ("cpu_offload", "disk_offload", "device_map")

    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("name", ["torch_mm", "loop", *IN_PLACE])
    def test_set_after(self, how: str, name: str, tmp_path: Path) -> None:
        model = self.dispatched(build(), how, tmp_path)
        check_works(model, CONFIGS[name], backward=False, but="parameters")  # each forward loads new ones

    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("kind", REPLACED)
    def test_modules_stay_after(self, how: str, kind: str, tmp_path: Path) -> None:
        model = self.dispatched(build(), how, tmp_path)
        match = r"accelerate has hooked it \(device_map or offload\).*Set backends before dispatch_model"
        check_refuses(model, CONFIGS[kind], match)

    def test_auto_goes_round_the_hooks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        prefer_toys(monkeypatch)
        model = self.dispatched(build(), "cpu_offload", tmp_path)
        stock = step(model, backward=False)
        set_moe_backend(model, BackendConfig.auto())
        taken = BackendConfig(experts="toy", attn="toy", loss="toy")
        assert_close(run_in_force(model, taken, backward=False), stock)

    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("name", CONFIGS)
    def test_set_before(self, how: str, name: str, tmp_path: Path) -> None:
        model = build()
        stock, before = step(model, backward=False), snapshot(model)
        config = CONFIGS[name]
        set_moe_backend(model, config)
        model = self.dispatched(model, how, tmp_path)
        assert_close(run_in_force(model, config, backward=False), stock)
        if asked(config) & set(REPLACED):
            check_stays(model, r"hooks were put on .* after it was replaced.*remove_hook_from_submodules")
            self.accelerate.hooks.remove_hook_from_submodules(model)
            if how == "cpu_offload":
                reset_moe_backend(model)
                assert snapshot(model)["modules"] == before["modules"]
        else:
            reset_moe_backend(model)
            CALLS.clear()
            assert_equal(step(model, backward=False), stock)
            assert CALLS == []


class TestQuantised:
    def test_a_subclass_of_linear_is_no_site(self) -> None:
        """bitsandbytes emulated: its layers are subclasses of nn.Linear with packed weights."""

        class Linear4bit(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.zeros(*x.shape[:-1], self.out_features)

        model = build()
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                projection = getattr(layer.self_attn, name)
                projection.__class__ = Linear4bit
                packed = torch.zeros(projection.weight.numel() // 2, 1, dtype=torch.uint8)
                projection.weight = nn.Parameter(packed, requires_grad=False)
        assert [site.name for site in survey(model)["linear"]] == ["lm_head"]
        for config in CONFIGS.values():
            check_works(model, config)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("bits", [4, 8])
    def test_bitsandbytes_for_real(self, bits: int, config: BackendConfig, tmp_path: Path) -> None:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        build().save_pretrained(tmp_path)
        quantised = (
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
            if bits == 4
            else BitsAndBytesConfig(load_in_8bit=True)
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, device_map="cpu").eval()
        assert [site.name for site in survey(model)["linear"]] == ["lm_head"]
        check_works(model, config, backward=False)

    def fp8(self) -> Any:
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

        return replace_with_fp8_linear(
            build(), quantization_config=FineGrainedFP8Config(), modules_to_not_convert=["lm_head"]
        )

    @pytest.mark.parametrize("name", ["torch_mm", "loop", "experts"])
    def test_fp8_experts(self, name: str) -> None:
        match = r"FP8 checkpoint.*set_experts_implementation.*FineGrainedFP8Config\(dequantize=True\)"
        check_refuses(self.fp8(), CONFIGS[name], match)

    def test_auto_leaves_fp8_experts_alone(self) -> None:
        plan = plan_moe_backend(self.fp8(), BackendConfig(experts="auto"))
        assert plan.config == BackendConfig()
        assert "FineGrainedFP8Config(dequantize=True)" in str(plan)

    def test_other_kinds_of_an_fp8_model(self) -> None:
        """Its kernels are for the GPU, so this stops at the plan."""
        model = self.fp8()
        plan = plan_moe_backend(model, dataclasses.replace(EVERYTHING, experts=None))
        sites = {choice.kind: [site.name for site in choice.sites] for choice in plan.choices}
        assert sites["linear"] == ["lm_head"]
        assert len(sites["norm"]) == 9
        assert len(sites["attn"]) == 2

    def test_mxfp4_experts(self) -> None:
        from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

        model = build("gpt_oss")
        with torch.device("meta"):
            for layer in model.model.layers:
                layer.mlp.experts = Mxfp4GptOssExperts(model.config)
        for name in ("torch_mm", "loop", "experts"):
            check_refuses(model, CONFIGS[name], r"quantised; load with Mxfp4Config\(dequantize=True\)")
        plan = plan_moe_backend(model, dataclasses.replace(EVERYTHING, experts=None))
        assert plan.config == dataclasses.replace(EVERYTHING, experts=None)


class TestLateDispatch:
    """step3p7, whose experts Transformers left undecorated: they get a forward of their own."""

    def step3p7(self) -> Any:
        modeling = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
        config = modeling.Step3p7TextConfig(
            vocab_size=zoo.VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts_per_tok=2,
            num_local_experts=8,
            n_routed_experts=8,
            moe_intermediate_size=32,
            share_expert_dim=32,
            mlp_layer_types=["dense", "sparse"],
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=8,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        model = modeling.Step3p7TextModel._from_config(config).eval()
        zoo.randomise(model)
        return model

    @torch.no_grad()
    def hidden(self, model: Any) -> Tensor:
        return model(**zoo.sample_inputs(model)).last_hidden_state

    def check(self, model: Any, expected: Tensor) -> None:
        CALLS.clear()
        assert relative(self.hidden(model), expected) <= RELATIVE
        assert CALLS == ["experts"]

    def check_stock(self, model: Any, expected: Tensor) -> None:
        CALLS.clear()
        assert torch.equal(self.hidden(model), expected)
        assert CALLS == []

    def test_plain(self) -> None:
        model = self.step3p7()
        stock, before = self.hidden(model), snapshot(model)
        set_moe_backend(model, CONFIGS["experts"])
        self.check(model, stock)
        plan_moe_backend(model, BackendConfig(experts="loop"))
        self.check(model, stock)
        reset_moe_backend(model)
        assert snapshot(model) == before
        self.check_stock(model, stock)

    def test_copied_and_pickled(self, tmp_path: Path) -> None:
        model = self.step3p7()
        stock = self.hidden(model)
        set_moe_backend(model, CONFIGS["experts"])
        torch.save(model, tmp_path / "model.pt")
        for copied in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            self.check(copied, stock)
            with torch.no_grad():
                copied.embed_tokens.weight.mul_(2)
                copied.layers[1].mlp.experts.down_proj.mul_(2)
            self.check(model, stock)
            copied_stock = self.hidden(copied)
            reset_moe_backend(copied)
            CALLS.clear()
            assert relative(self.hidden(copied), copied_stock) <= RELATIVE
            assert CALLS == []

    def test_compiled(self) -> None:
        model = self.step3p7()
        stock = self.hidden(model)
        set_moe_backend(model, CONFIGS["experts"])
        self.check(torch.compile(model, backend="eager"), stock)
        torch._dynamo.reset()

    def test_hooked_by_accelerate(self) -> None:
        accelerate = pytest.importorskip("accelerate")
        model = accelerate.cpu_offload(self.step3p7(), execution_device=torch.device("cpu"))
        check_refuses(model, CONFIGS["experts"], "Step3p7Experts already has a forward of its own")
        model = self.step3p7()
        stock = self.hidden(model)
        set_moe_backend(model, CONFIGS["experts"])
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        self.check(model, stock)
        check_stays(model, r"layers.1.mlp.experts was hooked or sharded over ranks since")
        accelerate.hooks.remove_hook_from_submodules(model)
        reset_moe_backend(model)
        self.check_stock(model, stock)


class TestTrainer:
    pytest.importorskip("accelerate")

    def trained(self, model: Any, folder: Path, **options: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        rows = [{"input_ids": row, "labels": row} for row in zoo.sample_inputs(model, batch=4)["input_ids"]]
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            optim="sgd",
            learning_rate=0.1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
            **options,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        return trainer

    def test_two_steps(self, config: BackendConfig, tmp_path: Path) -> None:
        stock, model = build(), build()
        self.trained(stock, tmp_path)
        set_moe_backend(model, config)
        with counted(config.experts) if config.experts in ("torch_mm", "loop") else nullcontext():
            self.trained(model, tmp_path)
        assert set(CALLS) == asked(config)
        assert get_moe_backend(model) == config
        reset_moe_backend(model)
        assert toys_in(model) == []
        trained = dict(model.named_parameters())
        errors = {name: relative(trained[name], p) for name, p in stock.named_parameters()}
        assert {name: error for name, error in errors.items() if error > RELATIVE} == {}

    def test_its_checkpoint(self, tmp_path: Path) -> None:
        stock, model = build(), build()
        self.trained(stock, tmp_path).save_model(str(tmp_path / "stock"))
        set_moe_backend(model, dataclasses.replace(EVERYTHING, experts=None))
        self.trained(model, tmp_path).save_model(str(tmp_path / "set"))
        different = {"training_args.bin"}
        saved, expected = files(tmp_path / "set"), files(tmp_path / "stock")
        assert saved.keys() == expected.keys()
        assert [n for n in expected.keys() - different if saved[n] != expected[n]] == []


def test_stock_functions_are_left_in_place() -> None:
    """Nothing that this package registers takes the name of Transformers' own."""
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    set_moe_backend(build(), EVERYTHING)
    after = ALL_EXPERTS_FUNCTIONS._global_mapping
    assert {name: after[name] for name in before} == before
