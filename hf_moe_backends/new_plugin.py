"""`hf-moe-backends new-plugin`: a complete plugin in a folder of its own, from which third parties start.

`plugins/template` in the repository is what this writes for the name `hf-moe-backends-template`.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from string import Template

from hf_moe_backends._version import __version__
from hf_moe_backends.errors import ConfigError
from hf_moe_backends.spec import STOCK_NAMES


def write(name: str, folder: Path, taken: Iterable[str] = ()) -> list[Path]:
    """Write a new plugin with one experts backend into `folder`/`name`.

    Args:
        name: of the distribution, such as `my-kernels`. Its package and its backend are then `my_kernels`.
        folder: where the plugin's folder is made.
        taken: names of experts backends that are there already.

    Returns:
        the files written.

    Raises:
        ConfigError: a name that cannot be a distribution's, a package's and a backend's, or that something has
            already, or a folder that is there. Nothing is written then.
    """
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", name):
        raise ConfigError(f"{name!r} cannot name a plugin: use letters, digits and dashes, such as 'my-kernels'")
    package = name.lower().replace("-", "_")
    if keyword.iskeyword(package):
        raise ConfigError(f"{name!r} cannot name a plugin: {package!r} is a word of Python's own")
    if package in {"auto", *STOCK_NAMES["experts"], *taken}:
        raise ConfigError(f"{name!r} cannot name a plugin: experts={package!r} is there already")
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"{name!r} cannot name a plugin: a module {package!r} can be imported here already")
    target = folder / name
    if target.exists():
        raise ConfigError(f"{target} is there already: remove it, or choose another name or --output")
    values = {"name": name, "package": package, "version": __version__}
    written = [Template(path).substitute(values) for path in _FILES]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for path, text in zip(written, _FILES.values(), strict=True):
            file = Path(made, name, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(text).substitute(values))
        shutil.move(Path(made, name), target)
    return [target / path for path in written]


_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
description = "An experts backend for hf-moe-backends"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["hf-moe-backends>=$version"]

[project.optional-dependencies]
test = ["hf-moe-conformance", "pytest>=8"]

# How hf-moe-backends finds this package: it imports the module and calls its hf_moe_backends_register.
[project.entry-points.hf_moe_backends]
$package = "$package"

[tool.setuptools.packages.find]
include = ["$package*"]

[tool.pytest.ini_options]
testpaths = ["tests"]
filterwarnings = ["error"]
"""

_REGISTER = '''\
"""What this plugin offers. Imported whenever backends are listed, so keep torch and kernel libraries out of it."""

from hf_moe_backends import BackendSpec, Capabilities, hookimpl


@hookimpl
def hf_moe_backends_register():
    # Claim what the conformance suite proves. What is not claimed is refused, by name, before a model is touched:
    # a feature (see hf_moe_backends.spec.FEATURES), a gate, a dtype, a device, torch.compile, ...
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        features=frozenset(),  # the plain layout: weights (experts, out, in), gate and up one after the other, no bias
        gates=None,  # any gate, for the module's own is called. A fused kernel lists its own: frozenset({"swiglu"})
        compile=False,  # torch.compile cannot trace it ...
        host_sync=True,  # ... because the host waits for the number of rows of each expert
    )
    return [
        BackendSpec(
            kind="experts",
            name="$package",
            target="$package.experts:experts_forward",  # imported when a model first uses it
            capabilities=capabilities,
            install="pip install $name",  # what a user is told where it is missing
            # requires=(Requirement(distribution="my-kernel-library", version=">=1.2"),),
            # priority=60,  # above 0, experts="auto" considers it; the highest that can serve a model wins
        )
    ]
'''

_EXPERTS = '''\
"""The routed experts, each on its own rows side by side. Plain torch: replace it by your kernels, piece by piece."""

import torch
import torch.nn.functional as F


def experts_forward(experts, hidden_states, top_k_index, top_k_weights):
    """The contract of Transformers' `ALL_EXPERTS_FUNCTIONS`. T tokens, K experts a token, E experts, H hidden, I inner.

    Args:
        experts: the module, with gate_up_proj (E, 2I, H) and down_proj (E, H, I), which stay its own Parameters.
        hidden_states: (T, H).
        top_k_index: (T, K) int64, ids of experts.
        top_k_weights: (T, K), the router's weights; they need gradients.

    Returns:
        (T, H) in the dtype of `hidden_states`.
    """
    tokens, top_k = top_k_index.shape
    order = top_k_index.flatten().argsort(stable=True)  # permute: the pairs of one expert side by side
    sizes = torch.bincount(top_k_index.flatten(), minlength=experts.num_experts).tolist()
    outputs = []
    for expert, rows in enumerate(hidden_states[order // top_k].split(sizes)):
        activation = experts._apply_gate(F.linear(rows, experts.gate_up_proj[expert]))
        outputs.append(F.linear(activation, experts.down_proj[expert]))
    # Back in the order of pairs, so that each token sums its rows in a fixed order, and in float32 or better.
    rows = torch.cat(outputs)[order.argsort()].view(tokens, top_k, hidden_states.shape[1])
    accumulate = torch.promote_types(hidden_states.dtype, torch.float32)
    combined = (rows.to(accumulate) * top_k_weights.to(accumulate)[:, :, None]).sum(1)
    return combined.to(hidden_states.dtype)
'''

_TEST = '''\
"""Does the backend compute what stock Transformers computes? One test a case; `pytest -k float32-default` is quick."""

from hf_moe_conformance.pytest_plugin import parametrize_with_checks


@parametrize_with_checks("experts", "$package")
def test_conformance(check):
    check()
'''

_CI = """\
name: test
on: [push, pull_request]
jobs:
  conformance:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: pip install '.[test]'
      - run: pytest
"""

_README = """\
# $name

An experts backend for [hf-moe-backends](https://pypi.org/project/hf-moe-backends/): it runs the routed experts of
mixture-of-experts models in Transformers, whose classes, parameter names and checkpoints stay as they are.

    pip install $name
    hf-moe-backends list

```python
from hf_moe_backends import BackendConfig, set_moe_backend

set_moe_backend(model, BackendConfig(experts="$package"))
```

It serves experts with a gate and without biases, in float32, bfloat16 and float16, on CPU and CUDA. Other models are
refused, with what is missing.

## Develop

    pip install --editable '.[test]'
    moe-conformance run experts=$package -k float32-default    # seconds: one layout
    pytest                                                      # everything that it claims
    moe-conformance run experts=$package --device cuda --report h200.json

| file | |
|---|---|
| `$package/__init__.py` | what it claims to serve. Widen a claim, and the suite tests it |
| `$package/experts.py` | the kernel |
| `tests/test_conformance.py` | the suite as tests; `expected_failures=` takes known gaps, with their reasons |
"""

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "$package/__init__.py": _REGISTER,
    "$package/experts.py": _EXPERTS,
    "tests/test_conformance.py": _TEST,
    ".github/workflows/test.yml": _CI,
    "README.md": _README,
}
