"""`hf-moe-backends list | explain | demo | new-plugin | bench`.

The commands import what they need when they run: `list` must answer at once, and without torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_moe_backends.config import BackendConfig
from hf_moe_backends.errors import ConfigError, MoeBackendError
from hf_moe_backends.registry import registry
from hf_moe_backends.spec import KINDS

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="Backends for mixture-of-experts models in Transformers: what there is, what a model gets, a demonstration.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an exception that no command expects is a bug, and is shown whole
)

Device = Literal["cuda", "cpu"]
Name = str | None
Attn = Annotated[Name, typer.Option(help="Backend for attention: a name or 'auto'.")]
Linear = Annotated[Name, typer.Option(help="Backend for linear layers: a name or 'auto'.")]
Norm = Annotated[Name, typer.Option(help="Backend for norms: a name or 'auto'.")]
Experts = Annotated[Name, typer.Option(help="Backend for the routed experts: a name or 'auto'.")]
Dispatcher = Annotated[Name, typer.Option(help="Backend for dispatch between ranks: a name or 'auto'.")]
Loss = Annotated[Name, typer.Option(help="Backend for the loss: a name or 'auto'.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--options", metavar="KIND.BACKEND.NAME=VALUE", help="One option of a backend. May be repeated."),
]


@app.command("list")
def list_backends(
    probe: Annotated[bool, typer.Option("--probe", help="Ask the device and run the backends' own probes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; its form is in listing.as_json.")] = False,
) -> None:
    """List every backend, its distribution, whether it can run here, and what would help if not."""
    from hf_moe_backends import listing

    known = registry()
    found = listing.rows(known, probe=probe)
    if as_json:
        typer.echo(json.dumps(listing.as_json(known, found, probe=probe), indent=2))
        return
    console = _console()
    for table in listing.tables(known, found):
        console.print(table)


@app.command()
def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_PATH", help="A Hub id, a checkpoint or a config.json.")],
    attn: Attn = None,
    linear: Linear = None,
    norm: Norm = None,
    experts: Experts = None,
    dispatcher: Dispatcher = None,
    loss: Loss = None,
    options: Options = None,
    device: Annotated[Device | None, typer.Option(help="Plan for this device. Default: cuda if here.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Plan for this dtype. Default: the config's."),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Plan for a quantised checkpoint as dequantised at load.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own code from its checkpoint.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; its form is in Explanation.to_dict.")] = False,
) -> None:
    """Show the plan for a model: what each kind would run on, at how many sites, and why not on something else.

    Only the model's config is read, so that the largest models explain in seconds. Without a backend option every kind
    is 'auto'; with one, the kinds that are not named stay as they are.
    """
    with _errors():
        names = {"attn": attn, "linear": linear, "norm": norm, "experts": experts, "dispatcher": dispatcher}
        config = _config({**names, "loss": loss}, options, default="auto")
        _quiet_transformers()
        from hf_moe_backends.explain import explain as explain_model

        found = explain_model(
            model, config, device=device, dtype=dtype, dequantize=dequantize, trust_remote_code=trust_remote_code
        )
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Fine-tune this checkpoint or Hub id. Default: a small Qwen3-MoE, new.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Train on this file. Default: Python's own documentation.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each side.")] = 40,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 4,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the new model and of the batches.")] = 0,
    device: Annotated[Device | None, typer.Option(help="Train on this device. Default: cuda if here.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "float32",
    attn: Attn = None,
    linear: Linear = None,
    norm: Norm = None,
    experts: Experts = None,
    dispatcher: Dispatcher = None,
    loss: Loss = None,
    options: Options = None,
    output: Annotated[Path | None, typer.Option(help="Keep the trained checkpoint in this new folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Fine-tune on stock code, then on backends, from the same weights and batches, and compare.

    Exits with 1 when the loss curves part in float32, or when the checkpoint that was trained on backends gives other
    logits in a process without this package. The default backend is experts=torch_mm.
    """
    with _errors():
        names = {"attn": attn, "linear": linear, "norm": norm, "experts": experts, "dispatcher": dispatcher}
        config = _config({**names, "loss": loss}, options, default=None)
        _quiet_transformers()
        from hf_moe_backends.demo import Job, run
        from hf_moe_backends.demo.show import Screen

        job = Job(
            model=model,
            text=text,
            steps=steps,
            batch=batch,
            sequence=sequence,
            seed=seed,
            device=device or _device(),
            dtype=dtype,
            backend=config if config != BackendConfig() else BackendConfig(experts="torch_mm"),
            output=output,
        )
        report = run(job, Screen(_console()))
        if json_file is not None:
            json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        for failure in report.failures:
            typer.echo(f"FAILED: {failure}", err=True)
    if report.failures:
        raise typer.Exit(1)


@app.command("new-plugin")
def new_plugin(
    name: Annotated[str, typer.Argument(help="Of the distribution, such as my-kernels.")],
    kind: Annotated[Literal["experts"], typer.Option(help="What its backend replaces.")] = "experts",
    output: Annotated[Path, typer.Option(help="The folder in which the plugin's own is made.")] = Path(),
) -> None:
    """Write a plugin to start from: one working backend in plain torch, its conformance tests, CI and README."""
    with _errors():
        from hf_moe_backends.new_plugin import write

        for file in write(name, output, taken=(backend.spec.name for backend in registry().of_kind(kind))):
            typer.echo(file)
    typer.echo(f"\nNext: cd {output / name} && pip install --editable '.[test]' && pytest -k float32-default")


bench = typer.Typer(help="Measure backends beside each other.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("layer")
def bench_layer(
    geometry: Annotated[
        list[str] | None, typer.Option(help="A model's experts; may be repeated. Default: qwen3-30b-a3b.")
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. Default: 4096 and 16384.")] = None,
    routing: Annotated[
        list[str] | None,
        typer.Option(help="balanced, uniform, zipf or a file of ids (T, K); may be repeated. Default: uniform."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="An experts backend, with +compile behind it for torch.compile; may be repeated. "
            "Default: grouped_mm, grouped_mm+compile, torch_mm."
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed calls of each; the median is shown.")] = 20,
    device: Annotated[Device | None, typer.Option(help="Default: cuda if here.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of weights and tokens.")] = "bfloat16",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw time and memory over tokens (PNG).")] = None,
) -> None:
    """Time and memory of one experts layer on each backend, in turn, after each has been found right.

    "both" is forward and backward in a row of calls, "alone" a call on an idle device (ms); "kept" is what forward
    leaves for backward (MiB); "error" is the largest against float64, in stock eager's own; "replayed" is forward as a
    CUDA graph (ms), of up to 64 tokens. Exits with 1 when a backend other than stock code is off by more than 3 of
    these, or fails.
    """
    with _errors():
        import importlib.util

        if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install matplotlib")
        _quiet_transformers()
        import torch

        from hf_moe_backends.bench import layer

        device = device or _device()
        rows: list[layer.Row] = []
        typer.echo(layer.HEADING)
        for row in layer.layers(
            geometry or ["qwen3-30b-a3b"],
            tokens or [4096, 16384],
            routing or ["uniform"],
            backend or ["grouped_mm", f"grouped_mm{layer.COMPILED}", "torch_mm"],
            device=device,
            dtype=getattr(torch, dtype),
            repetitions=repetitions,
        ):
            rows.append(row)
            typer.echo(row.line())
    if json_file is not None:
        json_file.write_text(json.dumps(layer.as_json(rows, device, " ".join(sys.argv[1:])), indent=1) + "\n")
    if plot_file is not None:
        layer.plot(rows, plot_file)
    if any(row.error for row in rows):
        raise typer.Exit(1)


def _config(names: dict[str, str | None], options: list[str] | None, *, default: str | None) -> BackendConfig:
    """What the options ask for; every kind on `default` when they name none.

    Raises:
        ConfigError: a name that is empty, or an option of another form than KIND.BACKEND.NAME=VALUE.
    """
    if all(name is None for name in names.values()):
        names = dict.fromkeys(KINDS, default)
    values: dict[str, dict[str, Any]] = {}
    for text in options or []:
        path, equals, value = text.partition("=")
        key, _, name = path.rpartition(".")
        if not equals or key.count(".") != 1:
            raise ConfigError(f"--options {text!r} must read KIND.BACKEND.NAME=VALUE: dispatcher.deepep.num_sms=20")
        values.setdefault(key, {})[name] = _value(key, name, value)
    return BackendConfig.from_dict({**names, "options": values})


def _value(key: str, name: str, text: str) -> Any:
    """The text as a JSON number, bool or null, unless the option is declared to be a string or it is none of these."""
    for backend in registry().backends:
        if f"{backend.spec.kind}.{backend.spec.name}" == key:
            for option in backend.spec.options:
                if option.name == name and option.type is str:
                    return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, (dict, list)) else value


def _device() -> Device:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _quiet_transformers() -> None:
    """Its advice about configs and loading is not about what these commands show. Errors are shown."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _console() -> Console:
    """Standard output; as wide as it takes where that is a file or a pipe, so that no reason is cut or wrapped."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, soft_wrap=not sys.stdout.isatty())


@contextmanager
def _errors() -> Iterator[None]:
    """An error that is meant for the user is printed without a traceback."""
    try:
        yield
    except MoeBackendError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
