"""What it costs an unmodified script to be saved by ``holdfast run --resume``.

CPU time of a step, under ``holdfast run --resume`` over ``holdfast run``.

How: the same script runs in both ways, in turns and in random order within each pair, and prints
the median and the mean CPU time of its warm steps. The mean includes the steps in which a
checkpoint is copied, and the thread that writes it. The run is short, so it saves more often than a
long one.

To reach: median ratio of the median steps <= 1.02 at 10 ms.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results_file import Result, read_options

_SCRIPT = Path(__file__).with_name("resume_overhead_script.py")
_TIMED = ((10.0, 1.02), (50.0, None))
_SECONDS = 8.0


def measure(folder: Path, milliseconds: float, *, resume: bool) -> tuple[float, float, int]:
    """Return the median and the mean CPU milliseconds of a step, and the batch size."""
    command = [
        *(sys.executable, "-m", "holdfast", "run", "--quiet", "--run-dir", str(folder)),
        *(["--resume"] if resume else []),
        *("--", sys.executable, str(_SCRIPT)),
        *(str(milliseconds), str(int(1000 * _SECONDS / milliseconds))),
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
    return float(median), float(mean), int(batch_size)


def main() -> None:
    options = read_options("resume_overhead", __doc__ or "")
    pairs = 2 if options.quick else 8
    result = Result(options=options, parameters={"pairs": pairs})
    with tempfile.TemporaryDirectory() as name:
        for milliseconds, at_most in _TIMED[: 1 if options.quick else 2]:
            medians, means, plain = [], [], []
            for number in range(pairs):
                found = {}
                for resume in random.sample((False, True), 2):
                    folder = Path(name) / f"{milliseconds:g}-{number}-{resume}"
                    found[resume] = measure(folder, milliseconds, resume=resume)
                medians.append(found[True][0] / found[False][0])
                means.append(found[True][1] / found[False][1])
                plain.append(found[False][0])
                result.parameters[f"{milliseconds:g} ms"] = {"batch_size": found[False][2]}
            title = f"mlp, {milliseconds:g} ms"
            result.add_samples(
                f"{title}: CPU time of the median step with --resume over without",
                "ratio",
                medians,
                at_most=at_most,
            )
            result.add_samples(
                f"{title}: CPU time of the mean step with --resume over without", "ratio", means
            )
            result.add_samples(f"{title}: step without --resume", "ms", plain)
    result.write()


if __name__ == "__main__":
    main()
