"""Run every benchmark in order, each in a process of its own, and say what was reached.

    python -m benchmarks.run_all [--quick] [--only gpu.]

Timings come first, while nothing else of ours runs. Ends with exit code 1 if a script failed; a
figure that was not reached is no failure, but it is said.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = (
    "step_overhead",
    "run_overhead",
    "resume_overhead",
    "malloc_threshold",
    "recorder",
    "loader_overhead",
    "async_saving",
    "forecast_large",
    "false_alarms",
    "numerics_overhead",
    "clipping",
    "accumulation",
    "provenance",
    "spikes",
    "nan_batches",
    "folklore",
    "evals.not_learning.evaluate",
    "oom_recovery",
    "ranks",
    "rank_peers",
    "integrations",
    "recipes",
    "forecast_live",
    "forecast_extrapolation",
    "forecast_peers",
    "sigkill",
    "loader_faults",
    "save_kills",
    "mirror_kills",
    "bit_flips",
    "hang_detection",
    "leak_lines",
    "slow_programs",
    "supervised_kills",
    "preemptions",
    "evals.verdicts",
    "evals.world",
    "evals.chaos",
    "evals.fixes",
    "gpu.step_overhead",
    "gpu.oom_recovery",
    "gpu.forecast",
)
RESULTS = {
    "evals.not_learning.evaluate": ("not_learning_held_out_2",),
    "evals.verdicts": ("verdicts",),
    "evals.world": ("world",),
    "evals.chaos": ("chaos",),
    "evals.fixes": ("fixes",),
}
"""Names of the result files of a script, where they are not its own name."""
_ROOT = Path(__file__).parent.parent


def files_of(name: str, folder: Path) -> list[Path]:
    """Return the result files of a script that are there.

    Args:
        name: One of `SCRIPTS`.
        folder: Where results lie.
    """
    files = [folder / f"{each.replace('.', '_')}.json" for each in RESULTS.get(name, (name,))]
    return [file for file in files if file.exists()]


def not_reached(name: str, *, quick: bool) -> list[str]:
    """Return the figures of a script that miss their target."""
    files = files_of(name, Path(__file__).parent / "results" / ("quick" if quick else ""))
    figures = [figure for file in files for figure in json.loads(file.read_text())["figures"]]
    return [
        f"{figure['what']}: {figure['value']:g} {figure['unit']}, to reach: {figure['to_reach']}"
        for figure in figures
        if figure.get("reached") is False
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few repetitions, to see that all of them work"
    )
    parser.add_argument("--only", default="", help="those whose name begins so, such as gpu.")
    options = parser.parse_args()
    quick, scripts = options.quick, [name for name in SCRIPTS if name.startswith(options.only)]
    failed, missed = [], []
    started = time.monotonic()
    for name in scripts:
        print(f"{name}", flush=True)
        module = name if name.startswith("evals.") else f"benchmarks.{name}"
        command = [sys.executable, "-m", module, *(["--quick"] if quick else [])]
        if subprocess.run(command, cwd=_ROOT, check=False).returncode:
            failed.append(name)
        else:
            missed += [f"{name}: {figure}" for figure in not_reached(name, quick=quick)]
    print(f"{len(scripts)} benchmarks in {(time.monotonic() - started) / 60:.1f} minutes")
    for line in missed:
        print(f"not reached: {line}")
    for name in failed:
        print(f"failed: {name}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
