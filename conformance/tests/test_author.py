"""The README's path of a kernel author, block by block, from built wheels in an empty virtual environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an empty virtual environment in which the built wheels, and nothing of the checkout, are."""
    folder = tmp_path_factory.mktemp("author")
    wheels = folder / "wheels"
    # built from a copy: setuptools leaves build folders where it builds, and takes stale files from them
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    for project in (source, source / "conformance"):
        pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", wheels, project)
    venv.create(folder / "venv", with_pip=True)
    constraints = "constraints.txt" if transformers.__version__.startswith("5.24") else "constraints-oldest.txt"
    pip(folder / "venv/bin/python", "install", "--constraint", ROOT / constraints, *sorted(wheels.glob("*.whl")))
    return folder


def pip(python: object, *arguments: object) -> None:
    done = subprocess.run(
        [str(a) for a in (python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def blocks(language: str) -> list[str]:
    path = README.read_text().split("<!-- author: begin -->")[1].split("<!-- author: end -->")[0]
    return re.findall(rf"```{language}\n(.*?)```", path, re.DOTALL)


def test_the_path_of_a_kernel_author(author: Path) -> None:
    plugin = author / "mykernel"
    plugin.mkdir()
    (plugin / "pyproject.toml").write_text(*blocks("toml"))
    (plugin / "mykernel.py").write_text(*blocks("python"))
    first, fixed, whole = blocks("sh")

    broken = shell(author, first)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    # the numbers are of another draw
    for line in blocks("text")[0].splitlines():
        assert re.sub(r"[0-9.]+e[+-][0-9]+", "#", line) in re.sub(r"[0-9.]+e[+-][0-9]+", "#", broken.stderr)
    assert "(one expert takes all)" not in broken.stderr.split("FAIL grad")[0]

    right = shell(author, fixed)
    assert right.returncode == 0, right.stdout + right.stderr

    inference, _ = whole.splitlines()
    every = shell(author, inference)
    assert every.returncode == 0, every.stdout + every.stderr
    assert "unsupported" in every.stdout


def shell(folder: Path, commands: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{folder / 'venv/bin'}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["bash", "-ec", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_a_new_plugin_is_right_as_it_is(author: Path) -> None:
    """What `hf-moe-backends new-plugin` writes, from a wheel of its own, runs what it claims and refuses the rest."""
    made = shell(author, "hf-moe-backends new-plugin new-kernels && pip wheel --no-deps --wheel-dir new ./new-kernels")
    assert made.returncode == 0, made.stdout + made.stderr
    run = shell(author, "pip install --no-deps new/*.whl && moe-conformance run experts=new_kernels --tier inference")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "pass" in run.stdout and "unsupported" in run.stdout
    own_tests = shell(author, "cd new-kernels && pytest -q -p no:cacheprovider -k float32-default")
    assert own_tests.returncode == 0, own_tests.stdout + own_tests.stderr
