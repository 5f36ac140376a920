"""Entry points -> specs. Every way in which a plugin can be broken is a record, and nobody else's problem."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_distributions import IMPORTS, SitePackages, hook, offering

import hf_moe_backends
from hf_moe_backends import hookspecs
from hf_moe_backends.discovery import Plugin, discover


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SitePackages:
    monkeypatch.delenv("HF_MOE_BACKENDS_DISABLE", raising=False)
    return SitePackages(tmp_path / "site-packages", monkeypatch)


def found(distribution: str) -> list[Plugin]:
    return [plugin for plugin in discover() if plugin.distribution == distribution]


def names(plugin: Plugin) -> list[str]:
    return [spec.name for spec in plugin.specs]


def test_every_hook_is_documented_and_tested() -> None:
    hooks = [f for f in vars(hookspecs).values() if hasattr(f, f"{hookspecs.PROJECT}_spec")]
    assert hooks
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    for function in hooks:
        assert function.__doc__, f"{function.__name__} has no docstring"
        assert re.search(rf"\b{function.__name__}\b", tests), f"no test mentions {function.__name__}"


def test_a_plugin_is_found_with_its_label_and_specs(site: SitePackages) -> None:
    # the module has another name than the distribution
    site.install("fast-kernels", offering("fast", "faster"), version="1.2", module="kernels_of_mine")
    (plugin,) = found("fast-kernels")
    assert plugin.label == "fast-kernels 1.2"
    assert plugin.entry_point == "kernels_of_mine"
    assert names(plugin) == ["fast", "faster"]
    assert plugin.error is None


def test_the_built_in_backends_are_first_and_whole() -> None:
    builtin, *_ = discover()
    assert (builtin.distribution, builtin.version) == ("hf-moe-backends", hf_moe_backends.__version__)
    assert builtin.error is None
    assert {"torch_mm", "loop", "eager", "grouped_mm"} <= set(names(builtin))


def test_plugins_are_ordered_by_distribution_and_entry_point(site: SitePackages) -> None:
    site.install("Zz-kernels", offering("a"))
    two = "[hf_moe_backends]\ntwo = aa_kernels\none = aa_kernels\n"
    site.install("aa-kernels", offering("b"), entry_points=two)
    ours = [(p.distribution, p.entry_point) for p in discover() if p.distribution in ("Zz-kernels", "aa-kernels")]
    assert ours == [("aa-kernels", "one"), ("aa-kernels", "two"), ("Zz-kernels", "Zz_kernels")]


RETURN = "TypeError: hf_moe_backends_register must return BackendSpecs, got "
BROKEN: dict[str, tuple[str, str]] = {
    "import raises": ("import kernel_of_yore", "ModuleNotFoundError: No module named 'kernel_of_yore'"),
    "syntax": ("def", r"SyntaxError: invalid syntax \(broken.py, line 1\)"),
    "import exits": ("raise SystemExit('no GPU here')", "SystemExit: no GPU here"),
    # what a panic in a Rust extension derives from
    "import panics": ("class Panic(BaseException): pass\nraise Panic('unwrap')", "Panic: unwrap"),
    "hook raises": (hook("raise RuntimeError('no licence')"), "RuntimeError: no licence"),
    "hook exits": (hook("exit(3)"), "SystemExit: 3"),
    "a string": (hook("return 'fast'"), RETURN + "'fast'"),
    "a number": (hook("return 7"), RETURN + "7"),
    "nothing": (hook("BackendSpec"), RETURN + "None"),
    "a wrong item": (hook("return [{'kind': 'experts'}]"), RETURN + r"\{'kind': 'experts'\} among them"),
    "raises midway": (
        offering("fast").replace("return", "yield from") + "    raise OSError('disk')\n",
        "OSError: disk",
    ),
    "misspelled": (
        hook("return []", name="hf_moe_backends_registr"),
        "PluginValidationError: unknown hook 'hf_moe_backends_registr' in plugin <module 'broken' from .*>",
    ),
    # optionalhook hides a misspelled name from pluggy's check_pending
    "misspelled and optional": (
        hook("return []", name="hf_moe_backends_registr").replace("@hookimpl", "@hookimpl(optionalhook=True)"),
        "TypeError: broken has no function hf_moe_backends_register marked with hf_moe_backends.hookimpl",
    ),
    "unmarked": (
        "def hf_moe_backends_register(): return []",
        "TypeError: broken has no function hf_moe_backends_register marked with hf_moe_backends.hookimpl",
    ),
    "signature": (
        hook("return []", parameters="model"),
        r"PluginValidationError: Plugin 'broken' for hook 'hf_moe_backends_register'\n"
        r"hookimpl definition: hf_moe_backends_register\(model\)\n"
        r"Argument\(s\) \{'model'\} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "twice the same": (
        offering("fast", "fast"),
        "ValueError: hf_moe_backends_register returned the same kind and name twice",
    ),
    "a stock name": (
        offering("fast", "eager", "grouped_mm"),
        "ValueError: it offers experts=eager, experts=grouped_mm, a name reserved for Transformers' own code",
    ),
    "unknown kind": (
        offering("fast", kind="expert"),
        "ValueError: BackendSpec kind='expert' is none of attn, linear, norm, experts, dispatcher, loss",
    ),
    # else it would raise at whoever lists the backends
    "unreadable version": (
        offering("fast", more="requires=(Requirement(distribution='torch', version='2 or so'),)"),
        "InvalidSpecifier: Invalid specifier: '2 or so'",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_a_record_with_its_error_and_breaks_no_other(site: SitePackages, how: str) -> None:
    source, error = BROKEN[how]
    # one before and one after it in the order of names
    site.install("all-good", offering("good"))
    site.install("broken", source, version="0.3")
    site.install("could-be-good", offering("fine"))

    (plugin,) = found("broken")
    assert re.fullmatch(error, plugin.error or ""), plugin.error
    assert plugin.specs == ()
    assert plugin.label == "broken 0.3"
    assert [names(p) for p in found("all-good") + found("could-be-good")] == [["good"], ["fine"]]
    assert names(discover()[0])


def test_an_interrupt_is_the_users_not_the_plugins(site: SitePackages) -> None:
    site.install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("broken:plugin", "AttributeError: module 'broken' has no attribute 'plugin'"),
        ("nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_an_entry_point_that_names_nothing(site: SitePackages, value: str, error: str) -> None:
    site.install("broken", offering("fast"), entry_points=f"[hf_moe_backends]\nx = {value}\n")
    (plugin,) = found("broken")
    assert (plugin.entry_point, plugin.error) == ("x", error)


def test_an_entry_point_may_name_an_object(site: SitePackages) -> None:
    source = IMPORTS + (
        "class Kernels:\n"
        "    @hookimpl\n"
        "    def hf_moe_backends_register(self):\n"
        "        return [BackendSpec(kind='norm', name='fast', target='fake_kernel:run')]\n"
        "kernels = Kernels()\n"
    )
    site.install("fast", source, entry_points="[hf_moe_backends]\nx = fast:kernels\n")
    assert [names(plugin) for plugin in found("fast")] == [["fast"]]


def test_metadata_that_cannot_be_read_breaks_no_other(site: SitePackages) -> None:
    site.install("malformed", offering("fast"), entry_points="[hf_moe_backends]\nno value\n")
    site.install("someone-elses", offering("fast"), entry_points="[console_scripts]\nno value\n")
    (site.path / "removed-1.0.dist-info").mkdir()
    site.install("undecodable")
    (site.path / "undecodable-1.0.dist-info" / "METADATA").write_bytes(b"\xff")
    site.install("zz-good", offering("good"))

    (plugin,) = found("malformed")
    assert plugin.entry_point == "entry_points.txt"
    assert plugin.error
    assert found("someone-elses") == []  # not a plugin of this project, so not this project's to report
    assert [names(plugin) for plugin in found("zz-good")] == [["good"]]


def test_a_distribution_on_the_path_twice_counts_once_as_the_first(
    site: SitePackages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("fast.kernels", offering("fast"), version="1.0", module="fast_kernels")
    shadowing = SitePackages(tmp_path / "first", monkeypatch)
    shadowing.install("Fast-Kernels", offering("faster"), version="2.0", module="fast_kernels")
    plugins = [plugin for plugin in discover() if "ernels" in plugin.distribution]
    assert [(plugin.label, names(plugin)) for plugin in plugins] == [("Fast-Kernels 2.0", ["faster"])]


@pytest.mark.parametrize("disable", ["fast-kernels", "Fast_Kernels", "entry", " other , entry ,"])
def test_disable_by_distribution_or_entry_point(
    site: SitePackages, monkeypatch: pytest.MonkeyPatch, disable: str
) -> None:
    # it must not even be imported: that may be what is wrong with it
    site.install(
        "fast-kernels", "raise RuntimeError('imported')", entry_points="[hf_moe_backends]\nentry = fast_kernels"
    )
    site.install("kept", offering("good"))
    monkeypatch.setenv("HF_MOE_BACKENDS_DISABLE", disable)
    (plugin,) = found("fast-kernels")
    assert plugin.error == "left out by HF_MOE_BACKENDS_DISABLE"
    assert plugin.specs == ()
    assert [names(plugin) for plugin in found("kept")] == [["good"]]


def test_disable_leaves_the_built_in_backends(site: SitePackages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MOE_BACKENDS_DISABLE", "hf-moe-backends,builtin")
    assert names(discover()[0])


LIST_ALL = """
import json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not to be had")

if sys.argv[1] == "blocked":
    sys.meta_path.insert(0, Block())

import hf_moe_backends
from hf_moe_backends.registry import registry

hf_moe_backends.BackendConfig.auto(), hf_moe_backends.ConfigError, dir(hf_moe_backends)
listed = {f"{b.spec.kind}.{b.spec.name}": b.unavailable() for b in registry().backends}
print(json.dumps({"listed": listed, "modules": sorted(sys.modules)}))
"""


@pytest.mark.parametrize("torch", ["importable", "blocked"])
def test_listing_imports_no_torch_no_transformers_and_no_target(site: SitePackages, torch: str) -> None:
    site.install("fast-kernels", offering("fast", more="requires=(Requirement(distribution='absent-kernel'),)"))
    paths = [str(site.path), str(Path(hf_moe_backends.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIST_ALL, torch],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    assert said["listed"]["experts.fast"] == "needs absent-kernel, not installed"
    assert "experts.torch_mm" in said["listed"]
    assert not {"torch", "transformers", "fake_kernel", "hf_moe_backends.builtin.experts.torch_mm"} & set(
        said["modules"]
    )
