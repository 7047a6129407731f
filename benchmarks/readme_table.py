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


def faults_table(results: Path) -> str:
    """Return a Markdown table of what faults did to a training in each framework, with and without holdfast.

    Args:
        results: Folder of the result files.
    """
    rows = json.loads((results / "integrations.json").read_text())["samples"]["table"]
    sides = list(dict.fromkeys((row["framework"], row["how"]) for row in rows))
    cells = {(row["fault"], row["framework"], row["how"]): _outcome(row) for row in rows}
    faults = list(dict.fromkeys(row["fault"] for row in rows))
    lines = [f"| | {' | '.join(faults)} |", "|---" * (1 + len(faults)) + "|"]
    for framework, how in sides:
        found = [cells.get((fault, framework, how), "") for fault in faults]
        lines.append(f"| {framework}, {how} | {' | '.join(found)} |")
    return "\n".join(lines)


def _outcome(row: dict[str, Any]) -> str:
    if not row["survived"]:
        return "ends"
    words = {"bit-identical": "same", "equal up to rounding": "same up to rounding", "NaN": "**NaN**"}
    again = f", {row['lost_steps']} again" if row["lost_steps"] else ""
    return words.get(row["result"], "**other weights**") + again


def _is_shown(name: str, figure: dict[str, Any]) -> bool:
    beside = figure["what"].startswith(_BESIDE) and "kills, of those" not in figure["what"]
    cost = name == "malloc_threshold" and figure["unit"] == "ratio"
    exactness = name == "oom_recovery" and "bare gradient" in figure["what"] and "others" not in figure["what"]
    origins = name == "provenance" and "all three right" in figure["what"]
    estimates = name == "forecast_peers" and any(
        word in figure["what"] for word in ("95th percentile", "too low", "time of an estimate")
    )
    return "to_reach" in figure or beside or cost or exactness or origins or estimates


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
    print(faults_table(Path(__file__).parent / "results"))
