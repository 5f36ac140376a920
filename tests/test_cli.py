"""`hf-moe-backends list` and `explain`, as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from fake_distributions import SitePackages, offering
from typer.testing import CliRunner, Result

from hf_moe_backends import listing, registry
from hf_moe_backends.cli import app
from hf_moe_backends.spec import KINDS, LOAD_TIME, STOCK_NAMES

CONFIGS = Path(__file__).parent / "data" / "configs"
QWEN = str(CONFIGS / "qwen3_30b_a3b.json")


def run(*arguments: str) -> Result:
    """One command. An exception that the command does not turn into a message is raised here."""
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def answer(*arguments: str) -> Any:
    """The JSON that a command prints."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    """The message of a command that exits with 1."""
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake distributions; the registry knows them from the first command on and forgets them afterwards."""
    monkeypatch.delenv("HF_MOE_BACKENDS_DISABLE", raising=False)
    monkeypatch.setattr(registry, "_registry", None)
    yield SitePackages(tmp_path / "site-packages", monkeypatch)


def row(kind: str, name: str, *arguments: str) -> dict[str, Any]:
    (found,) = [r for r in answer("list", *arguments)["backends"] if (r["kind"], r["name"]) == (kind, name)]
    return found  # type: ignore[no-any-return]


class TestList:
    def test_json_has_every_backend_and_its_documented_form(self, site: SitePackages) -> None:
        listed = answer("list")
        assert listed.keys() == {"schema", "probed", "backends", "plugins"}
        assert (listed["schema"], listed["probed"]) == (1, False)
        fields = ["kind", "name", "distribution", "version", "stock", "priority", "state", "reason", "helps"]
        assert all(list(r) == fields for r in listed["backends"])
        names = {(r["kind"], r["name"]) for r in listed["backends"] if r["stock"]}
        assert names == {(kind, name) for kind in KINDS for name in STOCK_NAMES[kind]} - LOAD_TIME.keys()
        assert row("experts", "torch_mm") == {
            "kind": "experts",
            "name": "torch_mm",
            "distribution": "hf-moe-backends",
            "version": registry.registry().plugins[0].version,
            "stock": False,
            "priority": 50,
            "state": "ready",
            "reason": "",
            "helps": "",
        }
        builtin, *_ = listed["plugins"]
        assert builtin["entry_point"] == "builtin"
        assert builtin["error"] is None

    def test_the_table_names_every_backend_and_folds_stock_ones(self, site: SitePackages) -> None:
        text = run("list").stdout
        for found in answer("list")["backends"]:
            assert found["name"] in text
            assert found["distribution"] in text
        assert "batched_mm, eager, grouped_mm" in text
        assert f"transformers {transformers.__version__}" in text
        assert len(text.splitlines()) < 50

    def test_what_is_missing_is_said_with_what_helps_and_neither_is_cut(self, site: SitePackages) -> None:
        more = (
            "requires=(Requirement(distribution='a-library-with-a-rather-long-name', version='>=4.7'),), "
            "install=\"pip install 'fast-kernels[cuda,every-other-extra-that-there-is]'\""
        )
        site.install("fast-kernels", offering("fast", more=more), version="1.2")
        found = row("experts", "fast")
        assert found["state"] == "unavailable"
        assert found["reason"] == "needs a-library-with-a-rather-long-name>=4.7, not installed"
        assert found["helps"] == "pip install 'fast-kernels[cuda,every-other-extra-that-there-is]'"
        (line,) = [line for line in run("list").stdout.splitlines() if " fast " in line]
        assert "fast-kernels 1.2" in line
        assert found["reason"] in line
        assert found["helps"] in line

    def test_only_a_probe_asks_the_device(self, site: SitePackages, monkeypatch: pytest.MonkeyPatch) -> None:
        site.install(
            "gpu-kernels", offering("hopper", more="capabilities=Capabilities(devices=frozenset({'cuda'}), min_sm=90)")
        )
        found = row("experts", "hopper")
        assert (found["state"], found["reason"]) == ("unknown", "cuda of compute capability 9.0 or higher")
        assert found["helps"] == "hf-moe-backends list --probe"

        monkeypatch.setattr(listing, "_devices", lambda: frozenset({"cpu"}))
        found = row("experts", "hopper", "--probe")
        assert found["state"] == "unavailable"
        assert found["reason"] == "needs cuda of compute capability 9.0 or higher; this machine has cpu"

        monkeypatch.setattr(listing, "_devices", lambda: frozenset({"cpu", "cuda"}))
        monkeypatch.setattr(listing, "_compute_capability", lambda: 80)
        found = row("experts", "hopper", "--probe")
        assert found["reason"] == "needs cuda of compute capability 9.0 or higher; this GPU has 8.0"
        monkeypatch.setattr(listing, "_compute_capability", lambda: 90)
        assert row("experts", "hopper", "--probe")["state"] == "ready"

    def test_a_backends_own_probe_runs_only_when_asked(self, site: SitePackages) -> None:
        site.install("probed-kernels", offering("probed", more="probe='probed_probe:check'"))
        site.install(
            "probe-module", "def check():\n    return 'no NVLink [v4] here'\n", module="probed_probe", entry_points=""
        )
        assert row("experts", "probed")["state"] == "unknown"
        assert "probed_probe" not in sys.modules
        found = row("experts", "probed", "--probe")
        assert (found["state"], found["reason"]) == ("unavailable", "no NVLink [v4] here")
        assert "unavailable: no NVLink [v4] here" in run("list", "--probe").stdout

    def test_a_plugin_that_fails_is_shown_with_its_error(self, site: SitePackages) -> None:
        site.install("broken-kernels", "raise RuntimeError('libfast.so [v2] is gone')\n", version="3.1")
        (plugin,) = [p for p in answer("list")["plugins"] if p["distribution"] == "broken-kernels"]
        assert plugin["error"] == "RuntimeError: libfast.so [v2] is gone"
        (line,) = [line for line in run("list").stdout.splitlines() if "broken-kernels 3.1" in line]
        assert "RuntimeError: libfast.so [v2] is gone" in line

    def test_a_plugin_that_is_left_out_is_shown(self, site: SitePackages, monkeypatch: pytest.MonkeyPatch) -> None:
        site.install("fast-kernels", offering("fast"))
        monkeypatch.setenv("HF_MOE_BACKENDS_DISABLE", "fast-kernels")
        listed = answer("list")
        assert "fast" not in {r["name"] for r in listed["backends"]}
        assert "left out by HF_MOE_BACKENDS_DISABLE" in {p["error"] for p in listed["plugins"]}
        (line,) = [line for line in run("list").stdout.splitlines() if "fast-kernels 1.0" in line]
        assert "left out by HF_MOE_BACKENDS_DISABLE" in line

    def test_a_conflict_is_two_rows_and_each_says_how_to_get_it(self, site: SitePackages) -> None:
        site.install("my-kernels", offering("fast"))
        site.install("your-kernels", offering("fast"), version="2.0")
        mine, yours = [r for r in answer("list")["backends"] if r["name"] == "fast"]
        assert mine["state"] == yours["state"] == "conflict"
        assert (mine["distribution"], mine["reason"]) == ("my-kernels", "also offered by your-kernels 2.0")
        assert mine["helps"] == "HF_MOE_BACKENDS_DISABLE=your-kernels"
        assert (yours["distribution"], yours["reason"]) == ("your-kernels", "also offered by my-kernels 1.0")
        lines = [line for line in run("list").stdout.splitlines() if "conflict" in line]
        assert [("my-kernels 1.0" in line, "your-kernels 2.0" in line) for line in lines] == [(True, True)] * 2

    def test_known_plugins_are_listed_until_they_are_installed(self, site: SitePackages) -> None:
        distribution = registry.KNOWN_PLUGINS["experts", "sonic"]
        found = row("experts", "sonic")
        assert (found["state"], found["helps"]) == ("missing", f"pip install {distribution}")
        site.install(distribution, offering("sonic"))
        registry.registry(refresh=True)
        assert row("experts", "sonic")["state"] == "ready"

    def test_it_answers_at_once_and_imports_neither_torch_nor_transformers(self) -> None:
        # Processor time, of the interpreter's start as well: wall time says how busy the machine is. Beside the import
        # of torch, in the same minute: how fast a machine is, is not what this asks.
        code = (
            "import json, sys, time\n"
            "from hf_moe_backends.cli import app\n"
            "app(['list'], standalone_mode=False)\n"
            "heavy = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]\n"
            "print(json.dumps({'heavy': heavy, 'seconds': time.process_time()}))\n"
        )
        torch = "import time, torch; print(time.process_time())"
        measured = [(json.loads(_python(code).splitlines()[-1]), float(_python(torch))) for _ in range(3)]
        assert measured[0][0]["heavy"] == []
        assert min(listed["seconds"] for listed, _ in measured) < min(imported for _, imported in measured) / 2


def _python(code: str, *arguments: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


EXPLAIN = """
import json, sys, time
from hf_moe_backends.cli import app

app(["explain", sys.argv[1], "--json", "--device", "cuda"], standalone_mode=False)
status = open("/proc/self/status").read()
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
print(json.dumps({"seconds": time.process_time(), "peak": peak}))
"""


class TestExplain:
    @pytest.mark.skipif(sys.platform != "linux", reason="the peak memory is read from /proc")
    @pytest.mark.parametrize(
        ("config", "billions", "sites", "demand"),
        [
            ("qwen3_30b_a3b", 30.5, 48, "128 experts, hidden 2048 intermediate 768, bfloat16"),
            ("gpt_oss_120b", 116.8, 36, "bias interleaved transposed, gpt_oss(limit=7, alpha=1.702)"),
            ("deepseek_v3", 671.0, 58, "256 experts, hidden 7168 intermediate 2048, bfloat16"),
            (
                "nemotron_h_550b",
                549.3,
                48,
                "512 experts, hidden 2048 intermediate 5120, bfloat16, meta, ungated, relu2",
            ),
        ],
    )
    def test_the_largest_models_take_seconds(self, config: str, billions: float, sites: int, demand: str) -> None:
        explained, _, cost = _python(EXPLAIN, str(CONFIGS / f"{config}.json")).rpartition("}\n{")
        measured = json.loads("{" + cost)
        assert measured["seconds"] < 15
        assert measured["peak"] < 2 * 2**30
        found = json.loads(explained + "}")
        assert round(found["parameters"] / 1e9, 1) == billions
        (experts,) = [kind for kind in found["kinds"] if kind["kind"] == "experts"]
        assert (experts["backend"], experts["sites"]) == ("torch_mm", sites)
        (demanded,) = experts["demands"]
        assert demanded["count"] == sites
        assert demand in demanded["demand"]

    def test_the_plan_has_every_kind_with_its_sites_and_the_trace(self) -> None:
        text = run("explain", QWEN, "--device", "cpu").stdout
        assert "30.5 billion parameters, planned for cpu" in text
        assert "experts: torch_mm (auto) on 48 sites" in text
        assert "linear: stays on torch (193 sites)" in text
        assert "not loop: priority -10 is not above stock code's 0" in text
        assert [line.split(":")[0].strip() for line in text.splitlines()[2:] if line[2] != " "] == list(KINDS)

    def test_json_has_its_documented_form(self) -> None:
        found = answer("explain", QWEN, "--device", "cpu", "--experts", "loop")
        assert list(found) == ["schema", "model", "source", "parameters", "device", "config", "notes", "kinds"]
        assert (found["schema"], found["model"]) == (1, "Qwen3MoeForCausalLM")
        assert found["config"] == {"experts": "loop"}
        assert [kind["kind"] for kind in found["kinds"]] == list(KINDS)
        keys = [
            "kind",
            "asked",
            "backend",
            "distribution",
            "version",
            "sites",
            "hooks",
            "options",
            "demands",
            "note",
            "candidates",
        ]
        assert all(list(kind) == keys for kind in found["kinds"])

    def test_a_kind_that_is_named_leaves_the_others_alone(self) -> None:
        found = answer("explain", QWEN, "--norm", "torch")
        asked = {kind["kind"]: kind["asked"] for kind in found["kinds"]}
        assert asked == dict.fromkeys(KINDS) | {"norm": "torch"}

    def test_a_checkpoint_directory_and_a_vision_language_model(self, tmp_path: Path) -> None:
        name = "Qwen3VLMoeForConditionalGeneration"
        config = transformers.Qwen3VLMoeConfig(architectures=[name])
        config.save_pretrained(tmp_path)
        found = answer("explain", str(tmp_path))
        assert found["model"] == name  # whole: AutoModelForCausalLM would refuse it or build a part
        layers = config.text_config.num_hidden_layers, config.vision_config.depth
        sites = {kind["kind"]: kind["sites"] for kind in found["kinds"]}
        assert (sites["experts"], sites["attn"]) == (layers[0], sum(layers))

    def test_a_config_without_a_dtype_is_said_to_be_planned_in_float32(self) -> None:
        config = str(CONFIGS / "gpt_oss_120b.json")
        (note,) = answer("explain", config)["notes"]
        assert "names no dtype" in note
        found = answer("explain", config, "--dtype", "bfloat16")
        assert found["notes"] == []
        assert "bfloat16" in found["kinds"][KINDS.index("experts")]["demands"][0]["demand"]

    def test_options_are_read_as_the_type_that_the_backend_declares(self, site: SitePackages) -> None:
        declared = ", ".join(
            f"Option(name={name!r}, type={kind}, default={default}, help='')"
            for name, kind, default in (("tile", "int", 1), ("scale", "float", 1.0), ("plan", "str", "'a'"))
        )
        site.install("fast-kernels", offering("fast", more=f"options=({declared},)"))
        site.install("kernel", "def run(): ...\n", module="fake_kernel", entry_points="")
        given = ["experts.fast.tile=64", "experts.fast.scale=0.5", "experts.fast.plan=7"]
        arguments = ["explain", QWEN, "--experts", "fast", *(a for o in given for a in ("--options", o))]
        found = answer(*arguments)
        assert found["kinds"][KINDS.index("experts")]["options"] == {"tile": 64, "scale": 0.5, "plan": "7"}
        message = refused("explain", QWEN, "--experts", "fast", "--options", "experts.fast.tile=wide")
        assert "option experts.fast.tile takes int, got 'wide' (str)" in message
        assert "has no option 'tiles': did you mean 'tile'?" in refused(
            "explain", QWEN, "--experts", "fast", "--options", "experts.fast.tiles=3"
        )


class TestExplainOfAQuantisedCheckpoint:
    @pytest.fixture
    def fp8(self, tmp_path: Path) -> str:
        config = json.loads((CONFIGS / "deepseek_v3.json").read_text())
        config["num_hidden_layers"] = 5
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    def test_its_experts_are_those_that_it_loads_into(self, fp8: str) -> None:
        message = refused("explain", fp8, "--experts", "torch_mm")
        assert "load with quantization_config=FineGrainedFP8Config(dequantize=True)" in message
        found = answer("explain", fp8)
        assert found["kinds"][KINDS.index("experts")]["backend"] is None
        assert found["notes"] == [
            "planned as quantised (fp8); --dequantize plans for the model that is dequantised at load"
        ]

    def test_dequantised_at_load(self, fp8: str) -> None:
        found = answer("explain", fp8, "--experts", "torch_mm", "--dequantize")
        assert found["kinds"][KINDS.index("experts")]["sites"] == 2
        assert found["notes"] == ["planned as dequantised at load; the checkpoint is quantised (fp8)"]

    def test_a_method_that_cannot_be_made_here_is_said(self, fp8: str) -> None:
        path = Path(fp8) / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] = {"quant_method": "of_tomorrow"}
        path.write_text(json.dumps(config))
        (note,) = answer("explain", fp8)["notes"]
        assert "quantised (of_tomorrow), and its modules cannot be made here" in note
        assert "This plan is for the dequantised model" in note


class TestExplainErrors:
    def test_an_unknown_backend(self) -> None:
        message = refused("explain", QWEN, "--experts", "torch_m")
        assert message.startswith("ConfigError: experts='torch_m' is not a known backend: did you mean 'torch_mm'?")

    def test_a_dense_model(self, tmp_path: Path) -> None:
        transformers.LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=2).save_pretrained(tmp_path)
        assert "NoSite: experts='torch_mm' has nothing to replace" in refused(
            "explain", str(tmp_path), "--experts", "torch_mm"
        )
        assert answer("explain", str(tmp_path))["kinds"][KINDS.index("experts")]["note"].startswith("this model has no")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda path: path / "gone.json", "no such file or directory"),
            (lambda path: path / "gone", "no such file or directory"),
            (lambda path: path, "this directory has no config.json"),
            (lambda path: _written(path, "{not json"), "not a readable config"),
            (lambda path: _written(path, '{"model_type": "of_tomorrow"}'), "not a readable config"),
            (lambda path: _written(path, '{"model_type": "qwen3_moe", "hidden_size": "wide"}'), "wide"),
        ],
    )
    def test_what_is_no_model(self, tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
        path = make(tmp_path)
        error = refused("explain", str(path))
        assert error.startswith(f"ModelError: {path}")
        assert message in error

    def test_a_model_that_the_hub_does_not_give(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(*args: Any, **kwargs: Any) -> None:
            raise OSError("We couldn't connect\nand many more lines")

        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
        assert refused("explain", "someone/a-model") == (
            "ModelError: someone/a-model: neither a file here nor a model that the Hub gives: "
            "We couldn't connect and many more lines\n"
        )

    @pytest.mark.parametrize("text", ["tile=3", "experts.fast=3", "experts.fast.tile", "a.b.c.d=1"])
    def test_an_option_of_another_form(self, text: str) -> None:
        message = refused("explain", QWEN, "--experts", "fast", "--options", text)
        assert "must read KIND.BACKEND.NAME=VALUE" in message

    @pytest.mark.parametrize(
        "arguments", [["explain"], ["explain", QWEN, "--device", "tpu"], ["explian"], ["demo", "x"]]
    )
    def test_usage(self, arguments: list[str]) -> None:
        assert run(*arguments).exit_code == 2


def _written(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text)
    return path
