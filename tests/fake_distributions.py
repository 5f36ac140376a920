"""Distributions that importlib.metadata truly finds: a `.dist-info` and a module, in a folder on `sys.path`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

IMPORTS = "from hf_moe_backends import BackendSpec, Capabilities, Option, Requirement, hookimpl\n"


def hook(body: str, *, name: str = "hf_moe_backends_register", parameters: str = "") -> str:
    """The source of a plugin whose hook is `body`."""
    return f"{IMPORTS}@hookimpl\ndef {name}({parameters}):\n    {body}\n"


def offering(*names: str, more: str = "", kind: str = "experts") -> str:
    """The source of a plugin that offers backends of these names; `more` are further arguments of each spec."""
    specs = ", ".join(f"BackendSpec(kind={kind!r}, name={n!r}, target='fake_kernel:run', {more})" for n in names)
    return hook(f"return [{specs}]")


class SitePackages:
    """A folder of fake distributions, first on `sys.path` until the test ends."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        self.path, self._monkeypatch = path, monkeypatch
        path.mkdir(parents=True, exist_ok=True)
        monkeypatch.syspath_prepend(path)

    def install(
        self,
        distribution: str,
        source: str = "",
        *,
        version: str = "1.0",
        module: str | None = None,
        entry_points: str | None = None,
    ) -> None:
        """Write one distribution with one module.

        Args:
            source: the module's source. Without any, the distribution has no module and no entry point.
            module: what it imports as, by default the distribution's name with underscores.
            entry_points: the text of `entry_points.txt`, by default one entry point of the module's name.
        """
        module = module or distribution.replace("-", "_")
        if entry_points is None:
            entry_points = f"[hf_moe_backends]\n{module} = {module}\n" if source else ""
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        if source:
            (self.path / f"{module}.py").write_text(source)
            # set and deleted, so that monkeypatch takes out what the test imports
            self._monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
            del sys.modules[module]
        importlib.invalidate_caches()
