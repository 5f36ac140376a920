"""The demonstration on a model of a few thousand parameters: what it shows, and that it notices when it must not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_distributions import SitePackages, offering
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner, Result

from hf_moe_backends import BackendConfig, ConfigError, get_moe_backend, registry
from hf_moe_backends.cli import app
from hf_moe_backends.demo import JUDGED_STEPS, LIMIT, Job, failures, inputs, relative, roundtrip
from hf_moe_backends.demo.show import sparkline
from hf_moe_backends.demo.side import Run

TEXT = "The quick brown fox jumps over the lazy dog, and every pangram has its day. " * 20
SMALL = ["--steps", "4", "--batch", "2", "--sequence", "16", "--device", "cpu"]


def save_small_model(path: Path, *, vocabulary: int = 256) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,  # at the default 0.02 experts as narrow as these hardly matter to the loss
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def demo(model: Path, text: Path, *arguments: str) -> Result:
    given = ["demo", "--model", str(model), "--text", str(text), *SMALL, *arguments]
    return CliRunner().invoke(app, given, catch_exceptions=False)


@pytest.fixture(scope="module")
def done(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Any, Path]:
    """What the command printed, the figures that it wrote, and the checkpoint that it kept."""
    folder = tmp_path_factory.mktemp("demo")
    output, figures = folder / "trained", folder / "figures.json"
    result = demo(model, text, "--json", str(figures), "--output", str(output))
    assert result.exit_code == 0, result.output
    return result, json.loads(figures.read_text()), output


class TestWhole:
    """One demonstration, looked at from several sides."""

    def test_the_curves_are_those_of_a_plain_training_loop(
        self, done: tuple[Result, Any, Path], model: Path, text: Path, tmp_path: Path
    ) -> None:
        from hf_moe_backends.demo.side import CLIP, RATE, WARM_UP

        inputs.save_batches(tmp_path / "b.pt", text=text, model=str(model), vocabulary=256, shape=(4, 2, 16), seed=0)
        stock = AutoModelForCausalLM.from_pretrained(model, experts_implementation="eager").train()
        optimiser = torch.optim.AdamW(stock.parameters())
        losses = []
        for step, ids in enumerate(torch.load(tmp_path / "b.pt")):
            optimiser.param_groups[0]["lr"] = RATE * (step + 1) / WARM_UP
            loss = stock(input_ids=ids, labels=ids).loss
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(stock.parameters(), CLIP)
            optimiser.step()
            losses.append(loss.item())
        eager, *_ = done[1]["runs"]
        assert eager["losses"] == pytest.approx(losses, rel=1e-6)

    def test_stock_eager_then_the_chosen_backends_then_the_control(self, done: tuple[Result, Any, Path]) -> None:
        result, figures, _ = done
        runs = figures["runs"]
        assert [run["label"] for run in runs] == ["stock eager", "chosen backends", "stock grouped_mm"]
        assert "experts: torch_mm on 2 sites" in figures["plan"]
        for run in runs:
            assert len(run["losses"]) == len(run["seconds"]) == 4
            assert run["step_seconds"] > 0
            assert f"{run['losses'][-1]:.6f}" in result.stdout
        assert all(max(parts) <= LIMIT for parts in figures["differences"].values())
        assert figures["failures"] == figures["notes"] == []

    def test_the_peak_is_the_sides_own(self, done: tuple[Result, Any, Path], model: Path) -> None:
        weights = 4 * done[1]["parameters"]
        for run in done[1]["runs"]:
            # the process as a whole takes hundreds of MiB, of which imports are most
            assert weights < run["peak_bytes"] < 200 * 2**20

    def test_the_checkpoint_is_stock_and_was_reloaded(
        self, done: tuple[Result, Any, Path], model: Path, text: Path, tmp_path: Path
    ) -> None:
        result, figures, output = done
        assert figures["reload"] == {
            "equal": True,
            "greatest_difference": 0.0,
            "imported": False,
            "transformers": figures["reload"]["transformers"],
        }
        assert "bit-equal" in result.stdout
        initial, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (model, output))
        assert get_moe_backend(trained) == BackendConfig()
        assert initial.state_dict().keys() == trained.state_dict().keys()
        moved = [n for n, p in trained.named_parameters() if not torch.equal(p, initial.get_parameter(n))]
        assert {name for name, _ in trained.named_parameters()} == set(moved)
        inputs.save_batches(tmp_path / "b.pt", text=text, model=None, vocabulary=256, shape=(1, 64, 16), seed=9)
        (ids,) = torch.load(tmp_path / "b.pt")
        with torch.no_grad():
            assert trained(input_ids=ids, labels=ids).loss < initial(input_ids=ids, labels=ids).loss  # it has learnt


WRONG = """
def run(experts, hidden_states, top_k_index, top_k_weights):
    from hf_moe_backends.builtin.experts.loop import loop

    return 1.01 * loop(experts, hidden_states, top_k_index, top_k_weights)
"""
DYING = """
import os

def run(experts, hidden_states, top_k_index, top_k_weights):
    os._exit(7)
"""
RAISING = """
def run(experts, hidden_states, top_k_index, top_k_weights):
    raise RuntimeError("illegal memory access")
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SitePackages:
    monkeypatch.delenv("HF_MOE_BACKENDS_DISABLE", raising=False)
    monkeypatch.setattr(registry, "_registry", None)
    return SitePackages(tmp_path / "site-packages", monkeypatch)


class TestWrongBackends:
    def test_experts_that_are_one_percent_off_are_found(
        self, site: SitePackages, model: Path, text: Path, tmp_path: Path
    ) -> None:
        site.install("wrong-kernels", offering("wrong"))
        site.install("wrong-kernel", WRONG, module="fake_kernel", entry_points="")
        figures = tmp_path / "figures.json"
        result = demo(model, text, "--experts", "wrong", "--json", str(figures))
        assert result.exit_code == 1
        (failure,) = json.loads(figures.read_text())["failures"]
        assert "part from stock eager's by" in failure
        assert "the chosen backends do not compute what stock code computes" in failure
        assert f"FAILED: {failure}" in result.stderr
        assert "stock grouped_mm" in result.stdout  # what was measured is shown all the same

    @pytest.mark.parametrize(
        ("source", "message"),
        [(RAISING, "RuntimeError: illegal memory access"), (DYING, "its process ended with code 7")],
    )
    def test_one_that_fails_is_an_error_and_not_a_hang(
        self, site: SitePackages, model: Path, text: Path, source: str, message: str
    ) -> None:
        site.install("bad-kernels", offering("bad"))
        site.install("bad-kernel", source, module="fake_kernel", entry_points="")
        result = demo(model, text, "--experts", "bad")
        assert result.exit_code == 1
        assert f"DemoError: chosen backends failed: {message}" in result.stderr


class TestRefusedBeforeTheFirstStep:
    def test_a_backend_that_the_model_cannot_have(self, model: Path, text: Path) -> None:
        result = demo(model, text, "--experts", "torch_m")
        assert result.exit_code == 1
        assert "did you mean 'torch_mm'?" in result.stderr
        assert result.stdout == ""

    def test_a_dense_model(self, tmp_path: Path, text: Path) -> None:
        config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        LlamaForCausalLM(config).save_pretrained(tmp_path)
        result = demo(tmp_path, text)
        assert result.exit_code == 1
        assert "NoSite: experts='torch_mm' has nothing to replace" in result.stderr

    def test_an_output_that_would_be_overwritten(self, model: Path, text: Path, tmp_path: Path) -> None:
        (tmp_path / "kept").write_text("mine")
        result = demo(model, text, "--output", str(tmp_path))
        assert result.exit_code == 1
        assert f"DemoError: --output {tmp_path} exists and is not an empty folder" in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]


class TestFailures:
    EAGER = [2.0] * 30

    def run(self, label: str, losses: list[float]) -> Run:
        return Run(label=label, losses=losses, seconds=[1.0] * len(losses), peak_bytes=None)

    def found(
        self, chosen: list[float], control: list[float] | None = None, *, dtype: str = "float32", **reload: Any
    ) -> list[str]:
        runs = [self.run("stock eager", self.EAGER), self.run("chosen backends", chosen)]
        runs += [] if control is None else [self.run("stock grouped_mm", control)]
        fine = roundtrip.Reload(equal=True, greatest_difference=0.0, imported=False, transformers="5.24.0")
        job = Job(backend=BackendConfig(experts="torch_mm"), dtype=dtype)
        return failures(job, runs, replace(fine, **reload))

    def parted(self, step: int, by: float = 2 * LIMIT) -> list[float]:
        return [loss * (1 + by) if i + 1 == step else loss for i, loss in enumerate(self.EAGER)]

    def test_agreement(self) -> None:
        assert self.found(self.EAGER, self.EAGER) == []
        assert self.found(self.parted(5, by=0.9 * LIMIT), self.EAGER) == []

    def test_the_last_judged_step_counts_and_the_next_does_not(self) -> None:
        (message,) = self.found(self.parted(JUDGED_STEPS), self.EAGER)
        assert f"by 2.0e-04 at step {JUDGED_STEPS} (2.000400, eager 2.000000)" in message
        assert self.found(self.parted(JUDGED_STEPS + 1), self.EAGER) == []

    def test_nan_is_no_agreement(self) -> None:
        assert len(self.found([*self.EAGER[:3], float("nan"), *self.EAGER[4:]], self.EAGER)) == 1

    def test_what_stock_itself_does_is_said(self) -> None:
        (message,) = self.found(self.parted(7), self.EAGER)
        assert "do not compute what stock code computes" in message
        (message,) = self.found(self.parted(7), self.parted(3))
        assert "this run cannot tell a wrong backend from a router's choice that rounding flipped" in message
        (message,) = self.found(self.parted(7), self.parted(9))  # the control parted later: no excuse
        assert "do not compute what stock code computes" in message
        (message,) = self.found(self.parted(7))
        assert "grouped_mm" not in message

    def test_bfloat16_is_not_judged(self) -> None:
        assert self.found(self.parted(1), self.EAGER, dtype="bfloat16") == []

    def test_a_reload_that_differs_or_shows_nothing(self) -> None:
        (message,) = self.found(self.EAGER, equal=False, greatest_difference=0.5)
        assert "gives other logits than the model that was saved: they differ by up to 0.5" in message
        (message,) = self.found(self.EAGER, imported=True)
        assert "had imported hf_moe_backends" in message


class TestReload:
    @pytest.fixture
    def saved(self, model: Path, tmp_path: Path) -> Path:
        loaded = AutoModelForCausalLM.from_pretrained(model, experts_implementation="eager")
        loaded.save_pretrained(tmp_path / "checkpoint")
        roundtrip.save_expected(loaded, torch.randint(256, (2, 16)), tmp_path)
        return tmp_path

    def test_a_changed_checkpoint_is_found(self, saved: Path) -> None:
        assert roundtrip.reload(saved / "checkpoint", saved, device="cpu").equal
        file = saved / "checkpoint" / "model.safetensors"
        weights = load_file(file)
        weights["model.norm.weight"][0] *= 1 + 2**-20
        save_file(weights, file, metadata={"format": "pt"})
        found = roundtrip.reload(saved / "checkpoint", saved, device="cpu")
        assert not found.equal
        assert 0 < found.greatest_difference < 1e-5

    def test_a_process_that_imports_this_package_is_found(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(roundtrip, "_SCRIPT", "import hf_moe_backends.config\n" + roundtrip._SCRIPT)
        assert roundtrip.reload(saved / "checkpoint", saved, device="cpu").imported

    def test_a_checkpoint_that_does_not_load(self, saved: Path) -> None:
        (saved / "checkpoint" / "model.safetensors").write_bytes(b"short")
        with pytest.raises(roundtrip.ReloadError, match="does not load without this package"):
            roundtrip.reload(saved / "checkpoint", saved, device="cpu")


class TestInputs:
    def save(self, path: Path, text: Path | None, **more: Any) -> tuple[torch.Tensor, inputs.Corpus]:
        given: dict[str, Any] = {"model": None, "vocabulary": 256, "shape": (3, 2, 16), "seed": 0} | more
        corpus = inputs.save_batches(path / "batches.pt", text=text, **given)
        return torch.load(path / "batches.pt"), corpus

    def test_the_default_is_english_that_every_python_has(self, tmp_path: Path) -> None:
        batches, corpus = self.save(tmp_path, None, shape=(40, 4, 256))
        assert batches.shape == (40, 4, 256)
        assert batches.dtype == torch.int64
        assert corpus.count > 40 * 4 * 256
        assert corpus.passes < 1
        assert b" the " in bytes(batches.flatten().tolist())

    def test_sequences_do_not_overlap_and_the_seed_orders_them(self, tmp_path: Path, text: Path) -> None:
        batches, _ = self.save(tmp_path, text)
        rows = [bytes(row.tolist()).decode() for row in batches.view(-1, 16)]
        windows = [TEXT[i : i + 16] for i in range(0, len(TEXT) - 15, 16)]
        assert set(rows) <= set(windows)
        assert torch.equal(batches, self.save(tmp_path, text)[0])
        assert not torch.equal(batches, self.save(tmp_path, text, seed=1)[0])

    def test_a_short_text_is_read_again(self, tmp_path: Path) -> None:
        short = tmp_path / "short.txt"
        short.write_bytes(bytes(range(33, 33 + 50)))  # three sequences and two bytes
        batches, corpus = self.save(tmp_path, short)
        assert corpus.passes == 2
        rows = [tuple(row.tolist()) for row in batches.view(-1, 16)]
        assert len(set(rows[:3])) == 3
        assert set(rows[:3]) == set(rows[3:])

    @pytest.mark.parametrize(
        ("content", "more", "message"),
        [
            (None, {}, "No such file"),
            (b"", {}, "is empty"),
            (b"ten bytes.", {}, "has 10 tokens, fewer than one sequence of 16: --sequence 10 or less"),
            (b"z" * 100, {"vocabulary": 100}, "vocabulary has 100 tokens and the text has id 122"),
        ],
    )
    def test_a_text_that_does_not_do(
        self, tmp_path: Path, content: bytes | None, more: dict[str, Any], message: str
    ) -> None:
        path = tmp_path / "some.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            self.save(tmp_path, path, **more)

    def test_a_checkpoints_own_tokenizer_is_used(self, tmp_path: Path, text: Path) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace
        from transformers import PreTrainedTokenizerFast

        words = sorted(set(TEXT.replace(",", " ,").replace(".", " .").split()))
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
        tokenizer.pre_tokenizer = Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
        batches, corpus = self.save(tmp_path, text, model=str(tmp_path), vocabulary=len(words) + 1)
        assert corpus.tokens == "the model's own tokenizer"
        assert corpus.count == len(TEXT.replace(",", " ,").replace(".", " .").split())
        assert (batches > 0).all()  # no word is unknown


def test_the_default_model_is_of_the_shape_that_is_claimed(tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(inputs.save_model(tmp_path, seed=0)).config
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 32, 4)
    assert config.vocab_size == inputs.BYTES


def test_a_sparkline_goes_the_way_of_its_curve() -> None:
    falling = [float(n) for n in range(40, 0, -1)]
    assert sparkline(falling, width=8) == "█▇▆▅▄▃▂▁"
    assert sparkline(falling[::-1], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 1.0]) == "█▁"
    assert sparkline([1.0, float("nan")]) == "▁▁"


def test_relative_differences() -> None:
    assert relative([1.1, 2.0], [1.0, 4.0]) == pytest.approx([0.1, 0.5])


def test_the_command_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from hf_moe_backends.cli import app; app()", "demo", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "Fine-tune on stock code, then on backends" in done.stdout
