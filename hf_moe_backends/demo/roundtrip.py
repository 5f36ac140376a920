"""The trained checkpoint in a fresh process, with Transformers and without this package: bit-equal logits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hf_moe_backends.errors import MoeBackendError


class ReloadError(MoeBackendError, RuntimeError):
    """The process that reloads the checkpoint failed."""


@dataclass(frozen=True, kw_only=True)
class Reload:
    """What the fresh process found.

    `equal`: its logits are bit-equal to those of the model that was saved. `imported`: whether hf_moe_backends was
    imported there, which would make the check worthless. `transformers`: its version.
    """

    equal: bool
    greatest_difference: float
    imported: bool
    transformers: str


def save_expected(model: nn.Module, ids: torch.Tensor, work: Path) -> None:
    """Write a batch (B, S) and `model`'s logits for it (B, S, V), in evaluation mode, for `reload` to compare with."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    torch.save({"ids": ids.cpu(), "logits": logits.cpu(), "dtype": logits.dtype}, work / "expected.pt")


_SCRIPT = """
import json, sys
import torch, transformers

checkpoint, expected, device = sys.argv[1:]
expected = torch.load(expected)
model = transformers.AutoModelForCausalLM.from_pretrained(
    checkpoint, dtype=expected["dtype"], experts_implementation="eager"
).to(device)
with torch.no_grad():
    logits = model(input_ids=expected["ids"].to(device), use_cache=False).logits.cpu()
print(json.dumps({
    "equal": torch.equal(logits, expected["logits"]),
    "greatest_difference": (logits.double() - expected["logits"].double()).abs().max().item(),
    "imported": any(name.partition(".")[0] == "hf_moe_backends" for name in sys.modules),
    "transformers": transformers.__version__,
}))
"""


def reload(checkpoint: Path, work: Path, *, device: str) -> Reload:
    """Load `checkpoint` on stock eager in a fresh process and compare with what `save_expected` wrote to `work`.

    Raises:
        ReloadError: that process failed.
    """
    arguments = [str(checkpoint.resolve()), str(work / "expected.pt"), device]
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *arguments], cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise ReloadError(f"the checkpoint does not load without this package:\n{done.stderr.strip()}")
    return Reload(**json.loads(done.stdout.splitlines()[-1]))
