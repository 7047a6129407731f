"""Whether `holdfast explain` names first why a program is slow, and accuses none that is not.

`slow_cases` has 20 small programs with one planted cause each: data that is decoded, distorted,
tokenized or read too slowly, Python code in the loop, a slow rank, and saves and evaluations that
are too frequent. 10 more are not slow. Each runs once under `holdfast run`, and `holdfast explain`
then says why it is slow. A program counts only if both the rule and the cause in words are the
planted ones, and a program that is not slow must have no problem at all.

What to reach: at least 18 of 20, and none of 10. The planted cause takes about three quarters
of the time, measured against the program's own step, so a machine that others use too changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.ports import unused_port

from benchmarks.results_file import Figure, Result, add_options, options_of
from benchmarks.slow_cases import NOT_SLOW, ON_TWO_RANKS, PLANTED, SECONDS, SLOW

_CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()"]
_TIMEOUT_SECONDS = 600.0
_LEAST_RIGHT = 18
_QUICK = 6  # every so many programs

Program = Callable[[Path], None]


def speed_of(program: Program) -> list[dict[str, Any]]:
    """Run a program under `holdfast run`, and return what `holdfast explain` says of its speed."""
    with tempfile.TemporaryDirectory() as folder:
        speed = _speed_in(Path(folder), program)
    for finding in speed or [{"cause": "nothing", "title": "", "evidence": ""}]:
        print(
            f"    {program.__name__}: {finding['cause']}: {finding['title']}; {finding['evidence']}",
            flush=True,
        )
    return speed


def _speed_in(folder: Path, program: Program) -> list[dict[str, Any]]:
    run = folder / "run"
    command = [sys.executable]
    if program in ON_TWO_RANKS:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += [*launcher, f"--master-port={unused_port()}"]
    command += ["-m", "benchmarks.slow_cases", program.__name__, str(folder)]
    ended = subprocess.run(
        [*_CLI, "run", "--run-dir", str(run), "--max-restarts", "0", "--", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if ended.returncode:
        raise RuntimeError(f"{program.__name__} failed: {(ended.stdout + ended.stderr)[-2000:]}")
    explained = subprocess.run(
        [*_CLI, "explain", str(run), "--json"], capture_output=True, text=True, check=True
    )
    speed: list[dict[str, Any]] = json.loads(explained.stdout)["speed"]
    return speed


def main() -> None:
    """Run the programs, and write what they were told."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs run at once")
    arguments = parser.parse_args()
    options = options_of("slow_programs", arguments)
    parameters = {"seconds": SECONDS, "planted": PLANTED, "jobs": arguments.jobs}
    result = Result(options=options, parameters=parameters)
    chosen = [program for program in (*SLOW, *NOT_SLOW) if arguments.only in program.__name__]
    if options.quick and not arguments.only:
        chosen = chosen[::_QUICK]

    told: dict[str, str] = {}
    right = 0
    accused = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        speeds = dict(zip(chosen, pool.map(speed_of, chosen), strict=True))
    for program, speed in speeds.items():
        first = speed[0] if speed else {"rule": "", "cause": "nothing", "share": 0.0, "title": ""}
        told[program.__name__] = f"{first['rule']} {first['cause']} {first['share']:.0%}".strip()
        if program in SLOW:
            right += (first["rule"], first["cause"]) == SLOW[program]
        else:
            accused += any(finding["is_problem"] for finding in speed)

    slow = sum(program in SLOW for program in chosen)
    result.figures.append(
        Figure(
            what="slow programs whose planted cause comes first",
            unit="count",
            value=right,
            samples=slow,
            to_reach=f"at least {_LEAST_RIGHT} of {len(SLOW)}",
            reached=right >= _LEAST_RIGHT,
        )
    )
    result.add_count(
        "programs that are not slow and are told of a problem",
        accused,
        len(chosen) - slow,
        expected=0,
    )
    result.samples = {"told": told}
    print(f"  planted cause first: {right} of {slow}", flush=True)
    result.write()


if __name__ == "__main__":
    main()
