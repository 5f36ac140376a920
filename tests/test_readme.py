"""What README.md shows is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import readme_tables
import torch
from fake_distributions import SitePackages
from hf_moe_conformance import zoo

import hf_moe_backends
from hf_moe_backends import BackendConfig, BackendUnavailable, registry, set_moe_backend

TEXT = readme_tables.README.read_text()


def block(after: str, language: str) -> str:
    """The first fenced block of a language after a phrase."""
    found = re.search(rf"{re.escape(after)}.*?```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    assert found, after
    return found[1]


@pytest.mark.parametrize("path", readme_tables.TABLES, ids=lambda path: str(path.relative_to(readme_tables.ROOT)))
def test_generated_tables_are_current(path: Path) -> None:
    assert readme_tables.generate(path) == path.read_text(), "run: python tests/readme_tables.py"


@pytest.fixture
def refreshed(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield lambda: registry.registry(refresh=True)
    monkeypatch.undo()
    registry.registry(refresh=True)


def test_the_plugin_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refreshed: Any) -> None:
    pyproject, module = block("Write a plugin", "toml"), block("`my_kernels.py`", "python")
    assert len(module.splitlines()) <= 30
    entry_points = re.search(r'\[project\.entry-points\.hf_moe_backends\]\n(\w+) = "(\w+)"', pyproject)
    assert entry_points
    site = SitePackages(tmp_path, monkeypatch)
    site.install("my-kernels", module, entry_points=f"[hf_moe_backends]\n{entry_points[1]} = {entry_points[2]}\n")
    refreshed()

    for family in ("qwen3_moe", "mixtral"):
        model = zoo.build(family)
        inputs = zoo.sample_inputs(model)
        expected = zoo.output(model, inputs)
        set_moe_backend(model, BackendConfig(experts="dense"))
        torch.testing.assert_close(zoo.output(model, inputs), expected, rtol=1e-5, atol=1e-6)

    sentence = re.search(r"refuses GPT-OSS: \*(.*?)\*", TEXT)
    assert sentence
    with pytest.raises(BackendUnavailable, match=re.escape(sentence[1])):
        set_moe_backend(zoo.build("gpt_oss"), BackendConfig(experts="dense"))


def test_the_calls_run_as_written(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    zoo.build("qwen3_moe").save_pretrained(path)
    names: dict[str, Any] = {"path": str(path)}
    exec(block("## Use", "python"), names)
    assert hf_moe_backends.get_moe_backend(names["model"]) == BackendConfig()
    exec(block("Or with one import line", "python"), names)
    assert hf_moe_backends.get_moe_backend(names["model"]).experts == "torch_mm"
