"""`hf-moe-backends bench layer`: nothing is timed before it is right, and a run says what it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_distributions import SitePackages, offering
from typer.testing import CliRunner

from hf_moe_backends import registry
from hf_moe_backends.bench import layer
from hf_moe_backends.cli import app

TINY = ["bench", "layer", "--geometry", "tiny", "--dtype", "float32", "--repetitions", "2", "--device", "cpu"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*TINY, *arguments])


@pytest.mark.filterwarnings("default")  # torch.compile warns of what is deprecated in its own code
def test_every_backend_at_every_size_with_what_they_were_run_on(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    backends = ("eager", "grouped_mm", "loop", "torch_mm", "torch_mm+compile")
    sizes = ("--tokens", "64", "--tokens", "200", "--routing", "zipf", "--routing", "balanced")
    result = run(*sizes, *(a for name in backends for a in ("--backend", name)), "--json", str(file))
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["environment"].keys() >= {"date", "torch", "transformers", "device", "hf_moe_backends"}
    assert [(r["routing"], r["backend"]) for r in report["rows"] if r["tokens"] == 64] == [
        (routing, name) for routing in ("zipf", "balanced") for name in backends
    ]
    for row in report["rows"]:
        assert min(row["forward"], row["both"], row["alone"]) > 0 and row["worst_error"] <= 3, row
    kept = {row["backend"]: row["kept"] for row in report["rows"] if row["tokens"] == 200}
    # the pre-activation and little else, where autograd keeps every intermediate
    assert kept["torch_mm"] < 0.3 * kept["grouped_mm"]
    assert len(result.output.splitlines()) == 1 + len(report["rows"])


def test_a_wrong_backend_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = SitePackages(tmp_path, monkeypatch)
    wrong = (
        "\ndef run(experts, x, ids, weights):\n"
        "    from hf_moe_backends.builtin.experts.loop import loop\n"
        "    return loop(experts, x, ids, weights) * 1.01\n"
    )
    site.install("wrong-kernels", offering("off_by_a_hundredth").replace("fake_kernel", "wrong_kernels") + wrong)
    registry.registry(refresh=True)
    try:
        result = run("--tokens", "64", "--backend", "off_by_a_hundredth", "--backend", "loop")
    finally:
        monkeypatch.undo()
        registry.registry(refresh=True)
    assert result.exit_code == 1
    row = next(line for line in result.output.splitlines() if "off_by_a_hundredth" in line)
    assert "wrong: its error is" in row and "times stock eager's" in row


def test_a_captured_routing_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "layer3.pt"
    torch.save(torch.randint(0, 8, (40, 2)), file)
    assert run("--tokens", "40", "--routing", str(file), "--backend", "torch_mm").exit_code == 0
    result = run("--tokens", "41", "--routing", str(file), "--backend", "torch_mm")
    assert result.exit_code == 1
    assert "holds ids of shape (40, 2), not (41, 2)" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--geometry", "qwen3-30b"], "geometry 'qwen3-30b' is not known: did you mean 'qwen3-30b-a3b'?"),
        (["--routing", "zip"], "routing 'zip' is neither a file nor one of balanced, uniform, zipf"),
        (["--backend", "torch_mn"], "experts='torch_mn' is not a known backend: did you mean 'torch_mm'?"),
        (["--backend", "deepgemm"], "experts='deepgemm' cannot run on this machine: needs kernels, not installed"),
    ],
)
def test_what_cannot_be_measured_is_said_first(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.output


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    rows = [
        layer.Row(geometry="tiny", tokens=tokens, routing="uniform", backend=name, both=float(tokens), kept=1.0)
        for tokens in (64, 128)
        for name in ("a", "b")
    ]
    layer.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
