"""The calls a user makes: what they take, what they refuse, and how they stand beside Transformers' own arguments."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_moe_conformance import zoo
from model_state import changes, state
from situations_backends import install_toys
from torch import Tensor, nn

from hf_moe_backends import (
    AutoModelForCausalLM,
    BackendConfig,
    BackendUnavailable,
    ConfigError,
    NoSite,
    get_moe_backend,
    moe_backend,
    plan_moe_backend,
    registry,
    reset_moe_backend,
    set_moe_backend,
)

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "plan": plan_moe_backend,
    "set": set_moe_backend,
    "with": lambda model, config: moe_backend(model, config).__enter__(),
}


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registry", None)
    install_toys()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model."""
    path = tmp_path_factory.mktemp("qwen3_moe")
    zoo.build("qwen3_moe").save_pretrained(path)
    return path


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(**zoo.sample_inputs(model)).logits


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


class TestArguments:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("config", [None, "torch_mm", {"experts": "torch_mm"}, BackendConfig])
    def test_a_config_that_is_none(self, call: str, config: Any) -> None:
        model = zoo.build("qwen3_moe")
        before = state(model)
        with pytest.raises(
            ConfigError, match=r"^config must be a BackendConfig, got .*BackendConfig.from_dict takes a"
        ):
            CALLS[call](model, config)
        assert changes(model, before) == []

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("model", [None, "Qwen/Qwen3-30B-A3B", object()])
    def test_a_model_that_is_none(self, call: str, model: Any) -> None:
        with pytest.raises(ConfigError, match=f"^model must be a torch module, got {type(model).__name__}$"):
            CALLS[call](model, BackendConfig(experts="torch_mm"))

    @pytest.mark.parametrize("call", [get_moe_backend, reset_moe_backend])
    def test_a_path_in_the_place_of_a_model(self, call: Callable[[Any], Any]) -> None:
        with pytest.raises(ConfigError, match=r"^model must be a torch module, got str$"):
            call("Qwen/Qwen3-30B-A3B")

    def test_a_config_that_asks_for_nothing(self) -> None:
        model = zoo.build("qwen3_moe")
        expected = logits(model)
        assert get_moe_backend(set_moe_backend(model, BackendConfig()).model) == BackendConfig()
        assert torch.equal(logits(model), expected)

    def test_the_device_to_plan_for(self) -> None:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(zoo.config("qwen3_moe"))
        config = BackendConfig(experts="torch_mm")
        for device in ("cpu", "cuda"):
            assert plan_moe_backend(model, config, device=device).config == config
        with pytest.raises(BackendUnavailable, match=r"torch_mm .*runs on cpu, cuda, not on tpu"):
            plan_moe_backend(model, config, device="tpu")
        # a model that is somewhere is planned for where it is
        assert plan_moe_backend(zoo.build("qwen3_moe"), config, device="tpu").config == config

    def test_what_is_given_back(self) -> None:
        model = zoo.build("qwen3_moe")
        plan = set_moe_backend(model, BackendConfig(experts="loop"))
        assert plan.in_force and plan.model is model and plan.config == BackendConfig(experts="loop")
        with moe_backend(model, BackendConfig(experts="torch_mm")) as inner:
            assert inner.in_force and not plan.in_force
        assert plan.in_force and not inner.in_force

    def test_auto_is_resolved(self) -> None:
        model = zoo.build("qwen3_moe")
        set_moe_backend(model, BackendConfig.auto())
        assert get_moe_backend(model) == BackendConfig(experts="torch_mm")
        set_moe_backend(model, get_moe_backend(model))
        assert get_moe_backend(model) == BackendConfig(experts="torch_mm")

    def test_a_dense_model(self) -> None:
        """There is nothing to dispatch, and that is no success."""
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM._from_config(config)
        before = state(model)
        with pytest.raises(NoSite, match=r"no site of kind experts. It is a dense model"):
            set_moe_backend(model, BackendConfig(attn="toy", experts="torch_mm"))
        assert changes(model, before) == []
        plan = set_moe_backend(model, BackendConfig(attn="toy", experts="auto"))
        assert plan.config == BackendConfig(attn="toy")
        assert "  experts: this model has no site of kind experts" in str(plan)

    def test_a_stock_model_is_reset_without_complaint(self) -> None:
        model = zoo.build("qwen3_moe")
        before = state(model)
        reset_moe_backend(model)
        reset_moe_backend(nn.Linear(1, 1))
        assert changes(model, before) == []
        assert get_moe_backend(nn.Linear(1, 1)) == BackendConfig()


class TestThreads:
    def test_set_reset_and_contexts_on_one_model(self) -> None:
        model = zoo.build("qwen3_moe")
        before, expected = state(model), logits(model)
        failed: list[BaseException] = []

        def work(call: Callable[[], Any]) -> None:
            try:
                for _ in range(4):
                    call()
            except BaseException as error:
                failed.append(error)

        calls: list[Callable[[], Any]] = [
            lambda: set_moe_backend(model, BackendConfig(experts="loop", linear="toy")),
            lambda: set_moe_backend(model, BackendConfig(norm="toy", loss="toy")),
            lambda: plan_moe_backend(model, BackendConfig.auto()),
            lambda: reset_moe_backend(model),
        ]
        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        reset_moe_backend(model)
        assert changes(model, before) == []
        assert torch.equal(logits(model), expected)


class TestFromPretrained:
    def test_auto_by_default(self, folder: Path) -> None:
        stock = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is type(stock)
        assert get_moe_backend(model) == BackendConfig(experts="torch_mm")
        assert relative(logits(model), logits(stock)) <= 1e-6
        reset_moe_backend(model)
        assert torch.equal(logits(model), logits(stock))

    @pytest.mark.parametrize("kind", ["experts", "attn"])
    def test_stock_arguments_are_respected(self, folder: Path, kind: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, **{f"{kind}_implementation": "eager"})
        assert getattr(model.config, f"_{kind}_implementation") == "eager"
        assert getattr(get_moe_backend(model), kind) is None
        assert get_moe_backend(model).experts == (None if kind == "experts" else "torch_mm")
        # and beside a config that says something of the other kind
        other = {"experts": "attn", "attn": "experts"}[kind]
        config = BackendConfig(**{other: "toy"})
        model = AutoModelForCausalLM.from_pretrained(folder, backend=config, **{f"{kind}_implementation": "eager"})
        assert getattr(model.config, f"_{kind}_implementation") == "eager"
        assert get_moe_backend(model) == config

    @pytest.mark.parametrize("kind", ["experts", "attn"])
    def test_two_that_say_the_same_thing(self, kind: str) -> None:
        """Before anything is loaded."""
        match = rf"^{kind}_implementation='eager' and backend {kind}='toy' both say what {kind} runs on; give one of"
        config = BackendConfig(**{kind: "toy"})
        arguments = {f"{kind}_implementation": "eager", "backend": config}
        with pytest.raises(ConfigError, match=match):
            AutoModelForCausalLM.from_pretrained("nowhere/nothing", **arguments)
        with pytest.raises(ConfigError, match=match):
            AutoModelForCausalLM.from_config(zoo.config("qwen3_moe"), **arguments)

    def test_a_backend_by_name(self, folder: Path) -> None:
        config = BackendConfig(experts="loop", linear="toy", norm="toy")
        model = AutoModelForCausalLM.from_pretrained(folder, backend=config, dtype=torch.bfloat16)
        assert get_moe_backend(model) == config
        assert model.dtype == torch.bfloat16

    def test_nothing_at_all(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, backend=BackendConfig())
        assert get_moe_backend(model) == BackendConfig()
        assert torch.equal(logits(model), logits(transformers.AutoModelForCausalLM.from_pretrained(folder)))

    def test_with_loading_info(self, folder: Path) -> None:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert get_moe_backend(model) == BackendConfig(experts="torch_mm")
        assert not info["missing_keys"] and not info["unexpected_keys"]

    @pytest.mark.parametrize("config", [None, BackendConfig(experts="loop", linear="toy", norm="toy", attn="toy")])
    def test_a_checkpoint_saved_afterwards(self, folder: Path, config: BackendConfig | None, tmp_path: Path) -> None:
        """Byte for byte what stock saves: the keys, the weights and the config."""
        transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "stock")
        AutoModelForCausalLM.from_pretrained(folder, backend=config).save_pretrained(tmp_path / "ours")
        stock = {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()} == stock

    @pytest.mark.parametrize(
        ("backend", "match"),
        [
            (BackendConfig(experts="torch_nm"), "^experts='torch_nm' is not a known backend: did you mean 'torch_mm'"),
            (
                BackendConfig(loss="auto", options={"loss.toy": {"chunk": 8}}),
                "^loss.toy has no option 'chunk'",
            ),
            ("torch_mm", "^backend must be a BackendConfig, got 'torch_mm'; BackendConfig.from_dict takes a mapping$"),
            ({"experts": "torch_mm"}, "^backend must be a BackendConfig, got {'experts'"),
        ],
    )
    def test_refused_before_anything_is_loaded(self, backend: Any, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            AutoModelForCausalLM.from_pretrained("nowhere/nothing", backend=backend)
        with pytest.raises(ConfigError, match=match):
            AutoModelForCausalLM.from_config(None, backend=backend)

    @pytest.mark.parametrize(
        ("backend", "error", "match"),
        [
            (BackendConfig(experts="sonicmoe"), BackendUnavailable, "experts='sonicmoe' cannot run this model"),
            (
                BackendConfig(dispatcher="all_to_all"),
                NoSite,
                r"not sharded over ranks.\n.*from_pretrained\(path, distributed_config=",
            ),
        ],
    )
    def test_refused(self, folder: Path, backend: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            AutoModelForCausalLM.from_pretrained(folder, backend=backend)
        with pytest.raises(error, match=match):
            AutoModelForCausalLM.from_config(zoo.config("qwen3_moe"), backend=backend)


class TestFromConfig:
    def test_the_config_is_not_shared(self) -> None:
        config = zoo.config("qwen3_moe")
        before = copy.deepcopy(vars(config))
        one = AutoModelForCausalLM.from_config(config)
        other = AutoModelForCausalLM.from_config(config, backend=BackendConfig(experts="loop"))
        stock = transformers.AutoModelForCausalLM.from_config(config)
        assert get_moe_backend(one) == BackendConfig(experts="torch_mm")
        assert get_moe_backend(other) == BackendConfig(experts="loop")
        assert stock.config._experts_implementation not in ("torch_mm", "loop")
        for model in (one, other):
            reset_moe_backend(model)
            assert model.config is not config
        del before["dtype"], before["_attn_implementation_internal"], before["_experts_implementation_internal"]
        assert {name: vars(config)[name] for name in before} == before  # what stock itself sets, aside

    @pytest.mark.parametrize("kind", ["experts", "attn"])
    def test_stock_arguments_are_respected(self, kind: str) -> None:
        model = AutoModelForCausalLM.from_config(zoo.config("qwen3_moe"), **{f"{kind}_implementation": "eager"})
        assert getattr(model.config, f"_{kind}_implementation") == "eager"
        assert getattr(get_moe_backend(model), kind) is None

    def test_on_meta(self) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(zoo.config("qwen3_moe"))
        assert get_moe_backend(model) == BackendConfig(experts="torch_mm")


class Wrapper(nn.Module):
    """What DDP and many a trainer put around a model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model

    def forward(self, **inputs: Tensor) -> Any:
        return self.module(**inputs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("around", ["compile(wrapper)", "wrapper(compile)"])
def test_a_compiled_model_in_a_wrapper(around: str) -> None:
    torch._dynamo.reset()
    model = zoo.build("qwen3_moe")
    expected = logits(model)
    whole: Any = (
        torch.compile(Wrapper(model), backend="eager", fullgraph=True)
        if around == "compile(wrapper)"
        else Wrapper(torch.compile(model, backend="eager", fullgraph=True))  # type: ignore[arg-type]
    )

    @torch.no_grad()
    def run() -> Tensor:
        return whole(**zoo.sample_inputs(model)).logits

    assert relative(run(), expected) <= 1e-6
    config = BackendConfig(experts="torch_mm", linear="toy", norm="toy")
    set_moe_backend(whole, config)
    assert get_moe_backend(whole) == get_moe_backend(model) == config
    assert relative(run(), expected) <= 1e-6
    reset_moe_backend(whole)
    assert torch.equal(logits(model), expected)
    torch._dynamo.reset()
