"""Tables for the docs, made from the result files, so that nobody types a number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_BESIDE = ("plain loop", "accelerate", "torch.save", "torch.load")


def faults_table(results: Path) -> str:
    """Return a Markdown table of what faults did to a training in each framework, with and without
    holdfast.

    Args:
        results: Folder of the result files.
    """
    rows = json.loads((results / "integrations.json").read_text())["samples"]["table"]
    rows = [each for each in rows if each["how"] != "callback"]  # which is no more
    sides = list(dict.fromkeys((each["framework"], each["how"]) for each in rows))
    cells = {(each["fault"], each["framework"], each["how"]): _outcome(each) for each in rows}
    faults = list(dict.fromkeys(each["fault"] for each in rows))
    lines = [f"| | {' | '.join(faults)} |", "|---" * (1 + len(faults)) + "|"]
    for framework, how in sides:
        found = [cells.get((fault, framework, how), "") for fault in faults]
        lines.append(f"| {framework}, {how} | {' | '.join(found)} |")
    return "\n".join(lines)


def _outcome(row: dict[str, Any]) -> str:
    if not row["survived"]:
        return "ends"
    words = {
        "bit-identical": "same",
        "equal up to rounding": "same up to rounding",
        "NaN": "**NaN**",
    }
    again = f", {row['lost_steps']} again" if row["lost_steps"] else ""
    return words.get(row["result"], "**other weights**") + again


def is_shown(name: str, figure: dict[str, Any]) -> bool:
    """Say whether a figure is one to reach, or was measured beside one."""
    beside = figure["what"].startswith(_BESIDE) and "kills, of those" not in figure["what"]
    cost = name == "malloc_threshold" and figure["unit"] == "ratio"
    exactness = (
        name == "oom_recovery"
        and "bare gradient" in figure["what"]
        and "others" not in figure["what"]
    )
    origins = name == "provenance" and "all three right" in figure["what"]
    estimates = name == "forecast_peers" and any(
        word in figure["what"] for word in ("95th percentile", "too low", "time of an estimate")
    )
    return "to_reach" in figure or beside or cost or exactness or origins or estimates


def row(figure: dict[str, Any]) -> str:
    """Return the cells of a figure: what, measured, to reach."""
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
