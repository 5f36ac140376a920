"""`hf-moe-backends new-plugin`. That what it writes is right is shown in `conformance/tests/test_author.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_moe_backends.cli import app

TEMPLATE = Path(__file__).parents[1] / "plugins" / "template"


def contents(folder: Path) -> dict[str, str]:
    leftovers = ("__pycache__", ".egg-info", ".pytest_cache", "build/")
    files = (p for p in folder.rglob("*") if p.is_file() and not any(part in f"{p}" for part in leftovers))
    return {str(p.relative_to(folder)): p.read_text() for p in files}


def test_the_template_in_the_repository_is_what_it_writes(tmp_path: Path) -> None:
    name = "hf-moe-backends-template"
    result = CliRunner().invoke(app, ["new-plugin", name, "--output", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert contents(TEMPLATE) == contents(tmp_path / "new" / name)
    assert [p.name for p in tmp_path.iterdir()] == ["new"]  # and nothing else is left


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my kernels", "use letters, digits and dashes, such as 'my-kernels'"),
        ("../elsewhere", "use letters, digits and dashes"),
        ("-kernels", "No such option"),
        ("lambda", "'lambda' is a word of Python's own"),
        ("torch-mm", "experts='torch_mm' is there already"),
        ("grouped_mm", "experts='grouped_mm' is there already"),
        ("auto", "experts='auto' is there already"),
        ("torch", "a module 'torch' can be imported here already"),
    ],
)
def test_a_name_that_cannot_be_leaves_nothing(tmp_path: Path, name: str, why: str) -> None:
    result = CliRunner().invoke(app, ["new-plugin", name, "--output", str(tmp_path)])
    assert result.exit_code != 0
    assert why in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "my-kernels").mkdir()
    (tmp_path / "my-kernels" / "work.py").write_text("mine")
    result = CliRunner().invoke(app, ["new-plugin", "my-kernels", "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "is there already: remove it, or choose another name or --output" in " ".join(result.output.split())
    assert contents(tmp_path) == {"my-kernels/work.py": "mine"}
