"""A run as data: what was tested on what, and every result with every measured number. JSON on disk."""

from __future__ import annotations

import gzip
import json
import platform
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_moe_backends
from hf_moe_backends.spec import CONTRACT
from hf_moe_conformance import __version__, measures
from hf_moe_conformance.result import BAD, Result
from hf_moe_conformance.subject import Subject

FORMAT = 1
"""Of the JSON. A report of another format is refused, not guessed at."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of one subject.

    Attributes:
        subject: kind, name, distribution, options and contract of what was tested.
        versions: of Python, torch, Transformers and this project's distributions.
        device: its type and name.
        seed: repeats the run.
        limits: the measures' limits that were applied.
        results: one a cell. Their messages name files by their place in a package, as `torch/nn/functional.py`.
    """

    subject: dict[str, Any]
    versions: dict[str, str]
    device: dict[str, str]
    seed: int
    tiers: tuple[str, ...]
    limits: dict[str, float]
    results: tuple[Result, ...]

    @classmethod
    def of(cls, subject: Subject, tiers: Sequence[str], results: Sequence[Result]) -> Report:
        """The report of a run that just ended, on this machine.

        Raises:
            ValueError: no results.
        """
        if not results:
            raise ValueError("a report of no results would say nothing")
        name = torch.cuda.get_device_name() if subject.device == "cuda" else platform.machine()
        return cls(
            subject={
                "kind": subject.kind,
                "name": subject.name,
                "distribution": subject.label,
                "options": dict(subject.options),
                "contract": subject.spec.contract,
            },
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "hf-moe-backends": hf_moe_backends.__version__,
                "hf-moe-conformance": __version__,
                "contract": str(CONTRACT),
            },
            device={"type": subject.device, "name": name},
            seed=subject.seed,
            tiers=tuple(tiers),
            limits={
                "error": measures.ERROR,
                "worst_row": measures.WORST_ROW,
                "float32_slack": measures.FLOAT32_SLACK,
                "gain_eps": measures.GAIN_EPS,
                "gain_least": measures.GAIN_LEAST,
                "gain_sigmas": measures.GAIN_SIGMAS,
            },
            results=tuple(replace(r, message=without_folders(r.message)) for r in results),
        )

    @property
    def title(self) -> str:
        """What was tested on what, in one line."""
        kind, name = self.subject["kind"], self.subject["name"]
        options = "".join(f" {key}={value}" for key, value in self.subject["options"].items())
        versions = f"transformers {self.versions['transformers']}, torch {self.versions['torch']}"
        where = f"{self.device['type']} ({self.device['name']})"
        return f"{kind}={name}{options} ({self.subject['distribution']}) on {where}, {versions}, seed {self.seed}"

    @property
    def counts(self) -> Counter[str]:
        return Counter(result.status for result in self.results)

    @property
    def empty(self) -> bool:
        """Whether nothing was tested: not one cell passed or failed. A backend that refuses all cells is not right."""
        return all(result.status in ("unsupported", "unavailable") for result in self.results)

    @property
    def failed(self) -> bool:
        """Whether a cell has a bad status. A run that is `empty` does not pass either."""
        return any(result.status in BAD for result in self.results)

    def save(self, path: Path) -> None:
        """Write JSON, gzipped where the name ends in `.gz`."""
        values = asdict(self) | {"format": FORMAT, "results": [r.to_dict() for r in self.results]}
        # JSON has no infinity or NaN, and a wrong backend gives both
        text = json.dumps(_named(values), indent=1, allow_nan=False) + "\n"
        # no time stamp, so that the same report is the same file
        path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what `save` wrote.

        Raises:
            ValueError: it is none, or one of another format.
        """
        try:
            data = path.read_bytes()
            values = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{path} is no report: {error}") from error
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            raise ValueError(f"{path} is no report of format {FORMAT}, which this version reads")
        found = _numbers({name: value for name, value in values.items() if name != "format"})
        found["results"] = tuple(Result.from_dict(r) for r in found["results"])
        return cls(**{**found, "tiers": tuple(found["tiers"])})


# in quotes a folder's name may have spaces
_PATH = re.compile(r"""(?<=")/[^"\n]+(?=")|(?<![\w.:/])/(?:[^\s/"'<>()\[\],:]+/)+[^\s/"'<>()\[\],:]*""")


def without_folders(text: str) -> str:
    """The text with each absolute path cut to what is inside its package, or to its last part.

    Reports are shown to others, whom the folders of the machine tell nothing.
    """
    if "/" not in text:
        return text
    libraries = [sysconfig.get_path("stdlib"), *sys.path]
    # Editable installs need not be on `sys.path`. `vars`, since modules that load lazily import at a mere `getattr`.
    paths = [vars(module).get("__path__") for name, module in list(sys.modules.items()) if "." not in name]
    packages = [str(Path(path[0]).parent) for path in paths if isinstance(path, list) and path]
    roots = {root.rstrip("/") for root in libraries + packages if root.startswith("/") and root.strip("/")}
    for root in sorted(roots, key=len, reverse=True):  # the innermost first
        text = re.sub(rf"(?<![\w.:/-]){re.escape(root)}/", "", text)
    return _PATH.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)


_NAMES = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def _named(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"number": str(value)}
    if isinstance(value, dict):
        return {k: _named(v) for k, v in value.items()}
    return [_named(v) for v in value] if isinstance(value, (list, tuple)) else value


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"number"}:
            return _NAMES[value["number"]]
        return {k: _numbers(v) for k, v in value.items()}
    return [_numbers(v) for v in value] if isinstance(value, list) else value
