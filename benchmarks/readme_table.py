"""Print the README's table of figures from the result files, so that nobody types a number.

python -m benchmarks.readme_table
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.run_all import RESULTS, SCRIPTS, files_of

_BESIDE = ("plain loop", "accelerate", "torch.save", "torch.load")


def readme_table(results: Path) -> str:
    """Return a Markdown table of the figures that have a target, and of what was measured beside them.

    Args:
        results: Folder of the result files.
    """
    lines = ["| benchmark | figure | measured | to reach |", "|---|---|---|---|"]
    for name in SCRIPTS:
        for file in files_of(name, results):
            shown = [figure for figure in json.loads(file.read_text())["figures"] if _is_shown(name, figure)]
            title = f"`{name}`" if name not in RESULTS else f"`{file.stem}`"
            lines += [f"| {title if n == 0 else ''} | {_row(figure)} |" for n, figure in enumerate(shown)]
    return "\n".join(lines)


def _is_shown(name: str, figure: dict[str, Any]) -> bool:
    beside = figure["what"].startswith(_BESIDE) and "kills, of those" not in figure["what"]
    cost = name == "malloc_threshold" and figure["unit"] == "ratio"
    exactness = name == "oom_recovery" and "bare gradient" in figure["what"] and "others" not in figure["what"]
    origins = name == "provenance" and "all three right" in figure["what"]
    return "to_reach" in figure or beside or cost or exactness or origins


def _row(figure: dict[str, Any]) -> str:
    if figure["unit"] == "count":
        measured = f"{figure['value']:g} of {figure['samples']}"
    elif figure["unit"] == "share" or "p10" not in figure:
        measured = f"{figure['value']:.3f} of {figure['samples']}"
    else:
        unit = {"ratio": "", "us": " µs", "ms": " ms"}.get(figure["unit"], f" {figure['unit']}")
        measured = f"{figure['value']:.3g}{unit} ({figure['p10']:.3g} to {figure['p90']:.3g})"
        if figure["value"] and abs(figure["value"] - 1) < 0.2 and figure["unit"] == "ratio":
            measured = f"{figure['value']:.3f} ({figure['p10']:.3f} to {figure['p90']:.3f})"
    missed = " **missed**" if figure.get("reached") is False else ""
    return f"{figure['what']} | {measured}{missed} | {figure.get('to_reach', '')}"


if __name__ == "__main__":
    print(readme_table(Path(__file__).parent / "results"))
