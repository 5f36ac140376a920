"""The table in README.md of which check catches which wrong backend, made from the mutants' declarations."""

from __future__ import annotations

from pathlib import Path

from dispatcher_mutants import DISPATCHER_MUTANTS
from mutants import MUTANTS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- kill matrix: begin -->", "<!-- kill matrix: end -->"


def render() -> str:
    lines = ["| wrong backend | its bug | must fail |", "|---|---|---|"]
    for m in MUTANTS + DISPATCHER_MUTANTS:
        cells = [f"`{cell}`" for cell in m.kills] + [f"`{cell}` (on a GPU)" for cell in m.on_gpu]
        lines.append(f"| `{m.full_name}` | {m.bug} | {', '.join(cells)} |")
    return "\n".join(lines)


def in_readme() -> str:
    text = README.read_text()
    return text.split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    before, after = README.read_text().split(BEGIN)[0], README.read_text().split(END)[1]
    README.write_text(f"{before}{BEGIN}\n{render()}\n{END}{after}")
