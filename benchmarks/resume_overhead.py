"""What it costs an unmodified script to be saved by ``holdfast run --resume``.

CPU time of a step, under ``holdfast run --resume`` over ``holdfast run``.

How: the same script runs in both ways, in turns and in random order within each pair, and prints
the median and the mean CPU time of its warm steps. The mean includes the steps in which a
checkpoint is copied, and the thread that writes it. The runs are short and many, because the speed
of a shared machine changes from minute to minute. A short run saves more often than a long one.

To reach: median ratio of the median steps <= 1.02 at 10 ms.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results_file import Result, read_options

_SCRIPT = Path(__file__).with_name("resume_overhead_script.py")


@dataclass(frozen=True)
class Setting:
    """A step time, and how often and how long it is measured."""

    milliseconds: float
    pairs: int
    steps: int
    # The target for the ratio of the median steps.
    at_most: float | None


@dataclass(frozen=True)
class StepTime:
    """The CPU time of a step in one run."""

    median_ms: float
    mean_ms: float
    batch_size: int


_SETTINGS = (
    Setting(milliseconds=10.0, pairs=24, steps=240, at_most=1.02),
    Setting(milliseconds=50.0, pairs=10, steps=80, at_most=None),
)


def measure(folder: Path, setting: Setting, *, resume: bool) -> StepTime:
    """Run the script once, and return the CPU time of its steps."""
    command = [
        *(sys.executable, "-m", "holdfast", "run", "--quiet", "--run-dir", str(folder)),
        *(["--resume"] if resume else []),
        *("--", sys.executable, str(_SCRIPT)),
        *(str(setting.milliseconds), str(setting.steps)),
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    line = next(line for line in ended.stdout.splitlines() if line.startswith("STEP"))
    _, median, mean, batch_size = line.split()
    return StepTime(median_ms=float(median), mean_ms=float(mean), batch_size=int(batch_size))


def main() -> None:
    options = read_options("resume_overhead", __doc__ or "")
    result = Result(options=options, parameters={})
    with tempfile.TemporaryDirectory() as name:
        for setting in _SETTINGS[: 1 if options.quick else 2]:
            pairs = 2 if options.quick else setting.pairs
            _measure_pairs(setting, pairs, Path(name), result)
    result.write()


def _measure_pairs(setting: Setting, pairs: int, folder: Path, result: Result) -> None:
    median_ratios = []
    mean_ratios = []
    plain_ms = []
    title = f"mlp, {setting.milliseconds:g} ms"
    for number in range(pairs):
        times = {}
        for resume in random.sample((False, True), 2):
            run_dir = folder / f"{setting.milliseconds:g}-{number}-{resume}"
            times[resume] = measure(run_dir, setting, resume=resume)
        saved = times[True]
        plain = times[False]
        median_ratios.append(saved.median_ms / plain.median_ms)
        mean_ratios.append(saved.mean_ms / plain.mean_ms)
        plain_ms.append(plain.median_ms)
        result.parameters[title] = {"pairs": pairs, "batch_size": plain.batch_size}
    result.add_samples(
        f"{title}: CPU time of the median step with --resume over without",
        "ratio",
        median_ratios,
        at_most=setting.at_most,
    )
    result.add_samples(
        f"{title}: CPU time of the mean step with --resume over without", "ratio", mean_ratios
    )
    result.add_samples(f"{title}: step without --resume", "ms", plain_ms)


if __name__ == "__main__":
    main()
