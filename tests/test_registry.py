"""Look-up by name, conflicts between distributions, and why a backend cannot run here."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_distributions import SitePackages, hook, offering

from hf_moe_backends import BackendConflict, ConfigError
from hf_moe_backends import registry as registry_module
from hf_moe_backends.discovery import discover
from hf_moe_backends.registry import Registry, registry


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SitePackages:
    monkeypatch.delenv("HF_MOE_BACKENDS_DISABLE", raising=False)
    return SitePackages(tmp_path / "site-packages", monkeypatch)


def installed() -> Registry:
    return Registry(discover())


def test_get_and_of_kind(site: SitePackages) -> None:
    site.install("first-kernels", offering("b_fast", "a_fast", more="priority=90"))
    site.install("last-kernels", offering("slow", more="priority=-90"))
    backend = installed().get("experts", "a_fast")
    assert (backend.spec.name, backend.plugin.label) == ("a_fast", "first-kernels 1.0")
    ordered = [b.spec.name for b in installed().of_kind("experts")]
    assert ordered[:2] == ["a_fast", "b_fast"]
    assert ordered[-1] == "slow"
    assert {b.spec.kind for b in installed().of_kind("experts")} == {"experts"}


class TestConflict:
    def test_both_are_listed_and_use_names_both_and_the_cure(
        self, site: SitePackages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site.install("a-kernels", offering("fast"))
        site.install("b-kernels", offering("fast", "other"), version="2.0")
        assert [b.plugin.distribution for b in installed().conflicting("experts", "fast")] == ["a-kernels", "b-kernels"]
        with pytest.raises(BackendConflict) as error:
            installed().get("experts", "fast")
        assert str(error.value) == (
            "experts='fast' is offered by a-kernels 1.0 and b-kernels 2.0. Uninstall one of them, or leave one out "
            "with HF_MOE_BACKENDS_DISABLE=b-kernels"
        )
        assert installed().get("experts", "other").plugin.label == "b-kernels 2.0"

        monkeypatch.setenv("HF_MOE_BACKENDS_DISABLE", "b-kernels")  # the cure cures
        assert installed().get("experts", "fast").plugin.label == "a-kernels 1.0"

    def test_the_same_name_of_another_kind_is_none(self, site: SitePackages) -> None:
        site.install("a-kernels", offering("fast"))
        site.install("b-kernels", offering("fast", kind="norm"))
        assert installed().conflicting("experts", "fast") == ()
        assert installed().get("norm", "fast").plugin.distribution == "b-kernels"

    def test_with_a_built_in_backend_the_cure_leaves_out_the_plugin(self, site: SitePackages) -> None:
        site.install("a-kernels", offering("loop"))
        with pytest.raises(BackendConflict, match=r"HF_MOE_BACKENDS_DISABLE=a-kernels$"):
            installed().get("experts", "loop")

    def test_within_one_distribution_the_cure_leaves_out_the_entry_point(
        self, site: SitePackages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        two = "[hf_moe_backends]\none = a_kernels\ntwo = a_kernels\n"
        site.install("a-kernels", offering("fast"), entry_points=two)
        with pytest.raises(BackendConflict, match=r"HF_MOE_BACKENDS_DISABLE=two$"):
            installed().get("experts", "fast")
        monkeypatch.setenv("HF_MOE_BACKENDS_DISABLE", "two")
        assert installed().get("experts", "fast").plugin.entry_point == "one"


class TestUnknownName:
    def test_the_nearest_match(self, site: SitePackages) -> None:
        with pytest.raises(ConfigError, match=r"^experts='torch_mn' is not a known backend: did you mean 'torch_mm'\?"):
            installed().get("experts", "torch_mn")

    def test_nothing_near_lists_what_there_is(self, site: SitePackages) -> None:
        with pytest.raises(ConfigError) as error:
            installed().get("loss", "zzz")
        assert "loss='zzz' is not a known backend: known: " in str(error.value)
        assert "torch" in str(error.value)

    def test_a_name_of_another_kind(self, site: SitePackages) -> None:
        with pytest.raises(ConfigError, match=r"'sdpa' is a backend of attn$"):
            installed().get("norm", "sdpa")

    def test_a_plugin_of_this_project_that_is_not_installed(self) -> None:
        with pytest.raises(ConfigError, match=r"'sonic' comes with a plugin -> pip install hf-moe-backends-sonic$"):
            Registry(discover()[:1]).get("experts", "sonic")

    def test_every_plugin_that_failed_is_named_with_its_error(
        self, site: SitePackages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site.install("hf-moe-backends-sonic", "import cutlass_of_yore", version="0.1.0")
        site.install("left-out", offering("fast"))
        monkeypatch.setenv("HF_MOE_BACKENDS_DISABLE", "left-out")
        with pytest.raises(ConfigError) as error:
            installed().get("experts", "sonic")
        assert "\n  hf-moe-backends-sonic 0.1.0 offers nothing: ModuleNotFoundError: No module named 'cutl" in str(
            error.value
        )
        assert "\n  left-out 1.0 offers nothing: left out by HF_MOE_BACKENDS_DISABLE" in str(error.value)
        assert "pip install hf-moe-backends-sonic" not in str(error.value)  # it is installed


REQUIRES_KERNEL = "requires=(Requirement(distribution='kernel-lib', import_name='cutlass', version='>=4.7'),)"


class TestUnavailable:
    """`BackendSpec.requires`, `contract` and `probe`, as an installed plugin declares them."""

    def reason(self, *, probe: bool = False) -> str | None:
        return installed().get("experts", "fast").unavailable(probe=probe)

    def test_a_missing_package_with_the_command_that_helps(self, site: SitePackages) -> None:
        site.install("fast", offering("fast", more=f"{REQUIRES_KERNEL}, install=\"pip install 'fast[cuda]'\""))
        assert self.reason() == "needs kernel-lib>=4.7, not installed -> pip install 'fast[cuda]'"

    def test_a_newer_version_names_both(self, site: SitePackages) -> None:
        site.install("fast", offering("fast", more=REQUIRES_KERNEL))
        site.install("kernel-lib", version="4.6.1")
        assert self.reason() == "needs kernel-lib>=4.7, found 4.6.1"

    def test_met(self, site: SitePackages) -> None:
        site.install("fast", offering("fast", more=REQUIRES_KERNEL))
        site.install("kernel-lib", version="4.8")
        assert self.reason() is None

    @pytest.mark.parametrize(
        ("contract", "upgrade"), [(0, "pip install -U fast-kernels"), (2, "pip install -U hf-moe-backends")]
    )
    def test_another_contract_names_the_package_to_upgrade(
        self, site: SitePackages, contract: int, upgrade: str
    ) -> None:
        # before its requirements: what a spec of another contract says may mean something else
        site.install("fast-kernels", offering("fast", more=f"{REQUIRES_KERNEL}, contract={contract}"))
        assert self.reason() == f"written for plugin contract {contract}, this is contract 1 -> {upgrade}"

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ("return None", None),
            ("return 'needs NVLink'", "needs NVLink"),
            ("raise OSError('libcuda.so')", "its probe raised OSError: libcuda.so"),
            ("raise SystemExit(1)", "its probe raised SystemExit: 1"),
        ],
    )
    def test_a_probe_runs_only_when_asked(self, site: SitePackages, body: str, reason: str | None) -> None:
        source = offering("fast", more="probe='fast:check'") + f"def check():\n    {body}\n"
        site.install("fast", source)
        assert self.reason() is None
        assert self.reason(probe=True) == reason

    def test_an_interrupted_probe_is_the_users(self, site: SitePackages) -> None:
        site.install(
            "fast", offering("fast", more="probe='fast:check'") + "def check():\n    raise KeyboardInterrupt\n"
        )
        with pytest.raises(KeyboardInterrupt):
            self.reason(probe=True)


def test_the_registry_of_the_process_is_read_once_until_refreshed(
    site: SitePackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "_registry", None)
    before = registry()
    site.install("fast", hook("return [BackendSpec(kind='experts', name='fast', target='fake_kernel:run')]"))
    assert registry() is before
    after = registry(refresh=True)
    assert after.get("experts", "fast").plugin.distribution == "fast"
    assert registry() is after


def test_a_name_that_is_chosen_at_load_time_says_how() -> None:
    with pytest.raises(ConfigError, match=r"from_pretrained\(\.\.\., experts_implementation='deepgemm_megamoe'\)"):
        registry().get("experts", "deepgemm_megamoe")
