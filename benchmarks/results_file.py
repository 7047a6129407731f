"""The result file of a benchmark.

What was measured, on what, with which versions, and how far it spreads.

Each script makes a `Result`, adds figures to it, and writes it as ``results/<name>.json``. A quick
run goes to ``results/quick/<name>.json``, so that it never replaces a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import holdfast

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a script was started with.

    Args:
        name: Of the benchmark.
        quick: Few repetitions, to see that it works; the figures mean little.
        out: Where the result goes.
    """

    name: str
    quick: bool
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure.

    Args:
        what: What it is, in words.
        unit: Such as ``"ratio"``, ``"us"``, ``"count"``.
        value: The median of the samples, or the count.
        samples: How many samples there are.
        p10: 10th percentile of the samples; None for a count, as the others below.
        p90: 90th percentile.
        least: Smallest sample.
        most: Largest sample.
        to_reach: The target in words, if there is one.
        reached: Whether `value` reaches it.
    """

    what: str
    unit: str
    value: float
    samples: int = 1
    p10: float | None = None
    p90: float | None = None
    least: float | None = None
    most: float | None = None
    to_reach: str | None = None
    reached: bool | None = None


@dataclass(slots=True, kw_only=True)
class Result:
    """What a benchmark has found; written by `write`.

    Args:
        options: What it was started with.
        parameters: Sizes and counts that decide the outcome.
    """

    options: Options
    parameters: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add_samples(
        self,
        what: str,
        unit: str,
        samples: Sequence[float],
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        digits: int = 4,
    ) -> Figure | None:
        """Add the median of samples with its spread; nothing where there is no sample.

        Args:
            what: What they are.
            unit: Their unit.
            samples: The samples, also kept raw.
            at_most: Largest median that reaches the target.
            at_least: Smallest one, where more is better; only one of both is given.
            digits: Digits after the point.
        """
        if not samples:
            self.notes.append(f"no sample of: {what}")
            return None
        ordered = sorted(samples)
        median = statistics.median(ordered)
        to_reach, reached = None, None
        if at_most is not None:
            to_reach, reached = f"median <= {at_most:g}", median <= at_most
        if at_least is not None:
            to_reach, reached = f"median >= {at_least:g}", median >= at_least
        figure = Figure(
            what=what,
            unit=unit,
            value=round(median, digits),
            samples=len(ordered),
            p10=round(percentile(ordered, 0.1), digits),
            p90=round(percentile(ordered, 0.9), digits),
            least=round(ordered[0], digits),
            most=round(ordered[-1], digits),
            to_reach=to_reach,
            reached=reached,
        )
        self._add(figure)
        self.samples[what] = [round(sample, digits) for sample in samples]
        return figure

    def add_count(self, what: str, count: int, of: int, *, expected: int | None = None) -> None:
        """Add how many of some cases it was so.

        Args:
            what: What was counted.
            count: Cases in which it was so.
            of: Cases in all.
            expected: Target for the count.
        """
        self._add(
            Figure(
                what=what,
                unit="count",
                value=count,
                samples=of,
                to_reach=None if expected is None else f"{expected} of {of}",
                reached=None if expected is None else count == expected,
            )
        )

    def _add(self, figure: Figure) -> None:
        self.figures.append(figure)
        print(_line(figure), flush=True)

    def write(self) -> None:
        """Write the result file, and say where it lies."""
        body = {
            "benchmark": self.options.name,
            "quick": self.options.quick,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self.started, 1),
            "device": describe_device(),
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "holdfast": holdfast.__version__,
            },
            "commit": describe_commit(),
            "parameters": self.parameters,
            "figures": [_without_none(asdict(figure)) for figure in self.figures],
            "notes": self.notes,
            "samples": self.samples,
        }
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        self.options.out.write_text(_indent_outside_lists(body))
        print(
            f"{self.options.name}: {self.options.out.name} written after {body['seconds']} s",
            flush=True,
        )


def read_options(name: str, what: str) -> Options:
    """Return what the command line asks for.

    Args:
        name: Of the benchmark and of its result file.
        what: The script's docstring.
    """
    parser = argparse.ArgumentParser(
        description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    return options_of(name, parser.parse_args())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `Options` to the command line of a benchmark that has others too."""
    parser.add_argument("--quick", action="store_true", help="few repetitions, under a minute")
    parser.add_argument("--out", type=Path, help="result file")


def options_of(name: str, arguments: argparse.Namespace) -> Options:
    """Return the `Options` in a parsed command line.

    Args:
        name: Of the benchmark and of its result file.
        arguments: Parsed by a parser with the arguments of `add_options`.
    """
    folder = _HERE / "results" / "quick" if arguments.quick else _HERE / "results"
    return Options(name=name, quick=arguments.quick, out=arguments.out or folder / f"{name}.json")


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted samples, interpolated between the two nearest."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def without_paths(text: str, most: int = 120) -> str:
    """Return a message without the paths and addresses in it, so that equal messages are counted
    together.
    """
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", re.sub(r"/[\w./-]+/", "", text))[:most]


def describe_device() -> dict[str, Any]:
    """Return what the benchmark ran on.

    The processor, what of it is usable, the memory, and the GPU if any.
    """
    found: dict[str, Any] = {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name"),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_gib": round(
            int((_first_value(Path("/proc/meminfo"), "MemTotal") or "0").split()[0]) / 2**20, 1
        ),
        "system": (
            f"{platform.system()} {platform.release().split('-')[0]},"
            f" {' '.join(platform.libc_ver())}"
        ),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        found["cuda"] = torch.version.cuda
    return found


def describe_commit() -> dict[str, Any]:
    """Return the git commit of this checkout, and whether anything but results differs from it.

    For a copy without its history the variable ``BENCH_COMMIT`` says it: ``HASH`` or
    ``HASH-dirty``.
    """
    given, _, dirty = os.environ.get("BENCH_COMMIT", "").partition("-")
    if given:
        return {"commit": given, "dirty": bool(dirty)}
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    changed = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    return {"commit": commit, "dirty": bool(changed)}


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=_HERE, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _first_value(file: Path, key: str) -> str | None:
    for line in file.read_text().splitlines() if file.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _line(figure: Figure) -> str:
    verdict = {None: "", True: "  reached", False: "  NOT REACHED"}[figure.reached]
    if figure.unit == "count":
        return f"  {figure.what}: {figure.value:g} of {figure.samples}{verdict}"
    return (
        f"  {figure.what}: {figure.value:g} {figure.unit} (p10 {figure.p10:g}, p90"
        f" {figure.p90:g}){verdict}"
    )


def _indent_outside_lists(body: dict[str, Any]) -> str:
    """Return JSON with a line for each entry of the two upper levels, and samples in one line."""
    lines = []
    for key, value in body.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(
                f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()
            )
            lines.append(f"  {json.dumps(key)}: {{\n{inner}\n  }}")
        elif isinstance(value, list) and value:
            inner = ",\n".join(f"    {json.dumps(entry)}" for entry in value)
            lines.append(f"  {json.dumps(key)}: [\n{inner}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
