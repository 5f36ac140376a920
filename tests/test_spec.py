"""What a backend declares: refused where it is written when it cannot be meant, checked where it is used."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from fake_distributions import SitePackages

from hf_moe_backends import BackendSpec, Capabilities, Option, Requirement
from hf_moe_backends.spec import FEATURES, KINDS, STOCK_NAMES, load_object


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SitePackages:
    return SitePackages(tmp_path / "site-packages", monkeypatch)


def spec(**more: Any) -> BackendSpec:
    return BackendSpec(**{"kind": "experts", "name": "fast", "target": "kernel:run"} | more)


def test_the_tables_cover_every_kind() -> None:
    assert set(STOCK_NAMES) == set(FEATURES) == set(KINDS)


class TestBackendSpec:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (
                {"kind": "expert"},
                "BackendSpec kind='expert' is none of attn, linear, norm, experts, dispatcher, loss",
            ),
            ({"name": "auto"}, "BackendSpec name='auto' must be an identifier other than 'auto'"),
            ({"name": "flash-attn"}, "BackendSpec name='flash-attn' must be an identifier other than 'auto'"),
            ({"name": ""}, "BackendSpec name='' must be an identifier other than 'auto'"),
            ({"target": "kernel.run"}, "BackendSpec target='kernel.run' must read 'package.module:attribute'"),
            ({"target": "kernel:"}, "BackendSpec target='kernel:' must read 'package.module:attribute'"),
            ({"target": ":run"}, "BackendSpec target=':run' must read 'package.module:attribute'"),
            ({"probe": "check"}, "BackendSpec probe='check' must read 'package.module:attribute'"),
            (
                {"capabilities": Capabilities(features=frozenset({"bias", "sinks", "biases"}))},
                "experts='fast' claims unknown features ['biases', 'sinks']; known: transposed, interleaved, bias, ",
            ),
            (
                {"kind": "loss", "capabilities": Capabilities(features=frozenset({"bias"}))},
                "loss='fast' claims unknown features ['bias']; known: none",
            ),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError) as error:
            spec(**wrong)
        assert str(error.value).startswith(message)

    def test_the_target_is_imported_by_load_and_not_before(
        self, site: SitePackages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site.install("kernel", "class Kernel:\n    run = 'found'\n")
        declared = spec(target="kernel:Kernel.run")
        assert "kernel" not in sys.modules
        assert declared.load() == "found"

    @pytest.mark.parametrize(
        ("path", "error"),
        [
            ("os.path:joyn", AttributeError),
            ("os.path:join.joyn", AttributeError),
            ("kernel_of_yore:run", ModuleNotFoundError),
        ],
    )
    def test_load_object_of_what_is_not_there(self, path: str, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"joyn|kernel_of_yore"):
            load_object(path)


def option(type: Any = int, default: Any = 1, name: str = "tile") -> Option:
    return Option(name=name, type=type, default=default, help="The size of a tile.")


class TestOptions:
    @pytest.mark.parametrize(
        ("type", "default", "value"),
        [
            (int, 1, 2),
            (int, None, 2),
            (int, None, None),
            (bool, True, False),
            (float, 1.0, 0.5),
            (float, 1.0, 2),  # as YAML reads "2"
            (float, 1, 2.0),
            (str, "a", "b"),
        ],
    )
    def test_taken(self, type: Any, default: Any, value: Any) -> None:
        resolved = spec(options=(option(type, default),)).resolve_options({"tile": value})
        assert resolved == {"tile": value}
        assert resolved["tile"] is value

    @pytest.mark.parametrize(
        ("type", "value", "message"),
        [
            (int, True, "takes int, got True (bool)"),
            (int, 1.0, "takes int, got 1.0 (float)"),
            (int, "1", "takes int, got '1' (str)"),
            (int, None, "takes int, got None (NoneType)"),
            (float, False, "takes float, got False (bool)"),
            (float, "0.5", "takes float, got '0.5' (str)"),
            (bool, 1, "takes bool, got 1 (int)"),
            (str, 1, "takes str, got 1 (int)"),
            (str, True, "takes str, got True (bool)"),
        ],
    )
    def test_a_value_of_another_type_is_refused(self, type: Any, value: Any, message: str) -> None:
        with pytest.raises(ValueError) as error:
            spec(options=(option(type, type()),)).resolve_options({"tile": value})
        assert str(error.value) == f"option experts.fast.tile {message}"

    def test_an_unknown_name_is_refused_with_the_nearest(self) -> None:
        declared = spec(options=(option(), option(name="stages")))
        with pytest.raises(ValueError) as error:
            declared.resolve_options({"tiles": 2})
        assert str(error.value) == "experts.fast has no option 'tiles': did you mean 'tile'? (known: stages, tile)"
        with pytest.raises(ValueError, match=r"^experts.fast has no option 'tile': known: none$"):
            spec().resolve_options({"tile": 2})

    def test_what_is_not_given_has_its_default(self) -> None:
        declared = spec(options=(option(), option(name="stages", default=None)))
        assert declared.resolve_options({}) == {"tile": 1, "stages": None}
        assert declared.resolve_options({"tile": 2}) == {"tile": 2, "stages": None}

    def test_a_default_of_another_type_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"^option 'tile' takes int, but its default is True$"):
            option(int, True)


class TestRequirement:
    def test_installed(self, site: SitePackages) -> None:
        site.install("kernel-lib", version="1.2")
        assert Requirement(distribution="kernel-lib").missing() is None
        assert Requirement(distribution="Kernel_Lib", version=">=1.2,<2").missing() is None

    @pytest.mark.parametrize(
        ("version", "found", "wanted"),
        [(">=1.3", "1.2", "kernel-lib>=1.3"), ("<1", "1.2", "kernel-lib<1"), ("==1.2.*", "1.3", "kernel-lib==1.2.*")],
    )
    def test_another_version_names_both(self, site: SitePackages, version: str, found: str, wanted: str) -> None:
        site.install("kernel-lib", version=found)
        assert Requirement(distribution="kernel-lib", version=version).missing() == f"needs {wanted}, found {found}"

    @pytest.mark.parametrize("found", ["2.0.dev20261101", "2.0rc1", "1.9+cu130"])
    def test_nightlies_and_local_builds_count(self, site: SitePackages, found: str) -> None:
        site.install("kernel-lib", version=found)
        assert Requirement(distribution="kernel-lib", version=">=1.9").missing() is None

    def test_a_build_whose_version_is_none(self, site: SitePackages) -> None:
        site.install("kernel-lib", version="by_hand")
        assert Requirement(distribution="kernel-lib").missing() is None
        wanted = Requirement(distribution="kernel-lib", version=">=1")
        assert wanted.missing() == "needs kernel-lib>=1, found by_hand"

    def test_not_installed(self) -> None:
        assert Requirement(distribution="kernel-of-yore").missing() == "needs kernel-of-yore, not installed"
        wanted = Requirement(distribution="kernel-of-yore", import_name="yore", version=">=4")
        assert wanted.missing() == "needs kernel-of-yore>=4, not installed"

    def test_the_same_module_from_a_distribution_of_another_name(self, site: SitePackages) -> None:
        # a build from source, or kernel-lib-cu13
        site.install("kernel-lib-cu13", "value = 1", module="kernel_lib", entry_points="")
        assert Requirement(distribution="kernel-lib").missing() is None
        assert Requirement(distribution="lib-of-kernels", import_name="kernel_lib").missing() is None
        assert "kernel_lib" not in sys.modules
        # whose version is not that of the distribution asked for
        wanted = Requirement(distribution="kernel-lib", version=">=1")
        assert wanted.missing() == "needs kernel-lib>=1, not installed"

    def test_a_part_of_a_package_without_importing_it(self, site: SitePackages) -> None:
        """flash-attn-4 is `flash_attn.cute`, and flash-attn 2 is a `flash_attn` without it."""
        package = site.path / "kernel_parts"
        (package / "inner").mkdir(parents=True)
        for path in (package, package / "inner"):
            (path / "__init__.py").write_text("raise AssertionError('imported')")
        (package / "inner" / "deep.py").write_text("")
        (site.path / "deeper.py").write_text("")  # a module of the same last name is another module
        for name in ("kernel_parts", "kernel_parts.inner", "kernel_parts.inner.deep"):
            assert Requirement(distribution="parts", import_name=name).missing() is None
        for name in ("kernel_parts.outer", "kernel_parts.inner.deep.deeper", "kernel_of_yore.inner"):
            assert Requirement(distribution="parts", import_name=name).missing() == "needs parts, not installed"

    def test_a_stub_is_not_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "kernel_stub", types.ModuleType("kernel_stub"))
        assert Requirement(distribution="kernel-stub").missing() == "needs kernel-stub, not installed"

    def test_a_version_that_is_none_is_refused(self) -> None:
        with pytest.raises(ValueError, match="Invalid specifier: '4 or so'"):
            Requirement(distribution="kernel-lib", version="4 or so")
