"""Hours of training under `holdfast run` with random faults.

Is it the same training still, does anything grow?

How: a piece is campaigns one after the other, each a training of its own (see ``training``) on a
disk of 128 MiB, with random faults every 15 to 45 s. The first takes half of the piece and has what
a training must live through: an allocation refused by a real limit, a worker killed or stopped, a
full disk for a while. The others are of 10 minutes, with SIGKILL of the training, and SIGTERM of
all and a new start, too. Some batches are NaN. Each ends whole, and its state is compared bit for
bit with a bare loop of as many steps. Every 5 s trainer, supervisor and run directory are looked
at. ``--minutes N [--seed S] [--state DIR] [--out FILE]`` adds a piece to the result file. With
``--quick-steps 33000`` so many come without a pause, and the trainer's slope is that after them,
its recording full.

To reach: 12 hours, nothing other than the bare loop, and of each process that lived for 20 minutes,
after 4 of them, the upper end of the 95 % interval of the Theil-Sen slope: 8 MiB of memory, 1
descriptor and 1 thread an hour.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from benchmarks.results_file import Result
from numpy.typing import NDArray
from recipes.demo.small_disk import command_with_small_disk

from evals.pieces import asked_to_end, begin_piece, write_piece
from holdfast.testing import fill_disk

SOFT = ("allocation refused", "worker killed", "worker stopped", "disk full")
HARD = (*SOFT, "training killed", "training killed", "ended and started again")
_CLI = [
    sys.executable,
    "-c",
    "from holdfast.cli.main import main; main()",
    "run",
    "--quiet",
    "--restart-delay",
    "1",
    "--max-restarts",
    "1000000",
    "--max-preemptions",
    "1000000",
    "--max-log-bytes",
    str(1 << 20),
]
_PATIENCE_SECONDS, _BLOCK_SECONDS, _HARD_MINUTES, _LONG_MINUTES, _WARM_MINUTES = (
    400.0,
    60.0,
    10.0,
    20.0,
    4.0,
)
WHAT = ("memory", "private memory", "descriptors", "threads")


def slope_per_hour(
    seconds: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Return the Theil-Sen slope, and the ends of its 95 % interval, of medians of blocks of
    time.
    """
    block = ((seconds - seconds[0]) // _BLOCK_SECONDS).astype(int)
    times, heights = (
        np.array([np.median(each[block == b]) for b in np.unique(block)])
        for each in (seconds, values)
    )
    first, second = np.triu_indices(n := len(times), 1)
    slopes = np.sort((heights[second] - heights[first]) / (times[second] - times[first])) * 3600
    # Sen 1968: from the variance of Kendall's S
    half = 1.96 * np.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = (round((len(slopes) - 1) / 2 + sign * (half + 0.5)) for sign in (-1, 1))
    return (
        float(np.median(slopes)),
        float(slopes[max(low, 0)]),
        float(slopes[min(high, len(slopes) - 1)]),
    )


class Campaign:
    """One training from its start to its end.

    `side` is for what it tells, `disk` is the small one.
    """

    def __init__(self, side: Path, disk: Path, seed: int) -> None:
        self.side, self.disk, self.run, self.looked = side, disk, disk / "run", 0.0
        self.train = [
            sys.executable,
            "-m",
            "evals.soak.training",
            str(side),
            str(self.run),
            str(seed),
        ]
        # S, `WHAT`, step
        self.lives: dict[tuple[str, int], list[list[float]]] = collections.defaultdict(list)
        self.quick_steps = int(os.environ.get("QUICK_STEPS", "0"))
        self.sizes: list[tuple[int, int]] = []  # bytes, files
        self.start()

    def start(self) -> None:
        """Start the supervisor, which starts the training."""
        command = [*_CLI, "--run-dir", str(self.run), "--", *self.train]
        self.supervisor = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    def status(self) -> tuple[int, int]:
        """Return step and process of the training, 0 and 0 before its first step."""
        with suppress(OSError, ValueError):
            step, process = (self.side / "status").read_text().split()
            return int(step), int(process)
        return 0, 0

    def wait(self, done: Callable[[], bool], seconds: float = _PATIENCE_SECONDS) -> bool:
        """Wait and look meanwhile; return whether it is done in time."""
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            time.sleep(0.2)
            if time.monotonic() - self.looked > 5:
                self.look()
        return done()

    def look(self) -> None:
        """Take a sample of both processes and of the run directory."""
        self.looked = time.monotonic()
        for role, process in (("supervisor", self.supervisor.pid), ("trainer", self.status()[1])):
            with suppress(OSError, LookupError):
                place = Path("/proc", str(process))
                lines = dict(
                    line.split(":", 1) for line in (place / "status").read_text().splitlines()
                )
                mib = [float(lines[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon")]
                files = len(list((place / "fd").iterdir()))
                row = [self.looked, *mib, files, float(lines["Threads"]), self.status()[0]]
                self.lives[role, process].append(row)
        held = []
        with suppress(OSError):  # of folders that are removed meanwhile
            held += [each.lstat().st_blocks * 512 for each in self.run.rglob("*")]
        self.sizes.append((sum(held), len(held)))

    def hurt(self, what: str, chance: Random) -> bool:
        """Let something happen, and return whether training goes on: 30 steps further."""
        step, process = self.status()
        if what == "allocation refused":
            (self.side / "refuse").touch()
        elif what == "disk full":
            fill_disk(self.disk / "filler", leave_bytes=64 << 10)
            self.wait(lambda: False, chance.uniform(5, 20))
            (self.disk / "filler").unlink()
            step = self.status()[0]
        elif what == "ended and started again":
            self.supervisor.terminate()
            if not self.wait(lambda: self.supervisor.poll() is not None):
                return False
            self.start()
        elif what:
            if what != "training killed":  # else one of its workers, which are its only children
                children = Path(f"/proc/{process}/task/{process}/children")
                self.wait(lambda: bool(children.read_text()))
                process = int(chance.choice(children.read_text().split()))
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP if what == "worker stopped" else signal.SIGKILL)
        return self.wait(lambda: self.status()[0] >= step + 30)

    def end(self) -> dict[str, Any]:
        """Have the training end whole, and return what came of it."""
        (self.side / "stop").touch()
        self.wait(lambda: self.supervisor.poll() is not None)
        self.supervisor.terminate()
        self.supervisor.wait()
        final = self.side / "final.json"
        found = (
            json.loads(final.read_text())
            if final.exists()
            else {"steps": self.status()[0], "digest": None}
        )
        bare = subprocess.run(
            [*self.train, str(found["steps"])], capture_output=True, text=True, check=True
        )
        most = {
            "most_mib": round(max(self.sizes)[0] / 2**20, 2),
            "most_files": max(each[1] for each in self.sizes),
        }
        exact = found["digest"] == bare.stdout.strip()
        return {
            "events": {},
            **found,
            **most,
            "ended": final.exists(),
            "exact": exact,
            "lives": self.slopes(),
        }

    def slopes(self) -> list[dict[str, Any]]:
        """Return of each process that lived long.

        Least, most, slope and its interval of each of `WHAT`.
        """
        found = []
        for (role, _), rows in self.lives.items():
            table = np.array(rows) - [rows[0][0], 0, 0, 0, 0, 0]
            table = table[table[:, -1] >= self.quick_steps * (role == "trainer")]
            table[:, 0] -= table[:1, 0]
            if len(table) and table[-1, 0] >= 60 * _LONG_MINUTES:
                minutes, table = table[-1, 0] / 60, table[table[:, 0] > 60 * _WARM_MINUTES]
                grown = (
                    (min(each), max(each), *slope_per_hour(table[:, 0], each))
                    for each in table.T[1:-1]
                )
                of = {
                    what: np.round(each, 3).tolist() for what, each in zip(WHAT, grown, strict=True)
                }
                if role == "trainer" and table[0, -1] > 32_768:
                    role += " beyond its newest 32,768 steps"
                found.append({"role": role, "minutes": round(minutes, 1), **of})
        return found


def campaign(
    side: Path,
    disk: Path,
    seed: int,
    kinds: Sequence[str],
    minutes: float,
    ends: Callable[[], bool],
) -> dict[str, Any]:
    """Train for some minutes with such faults, and return what came of it."""
    began, chance, faults, what = time.monotonic(), Random(seed), [], ""
    side.mkdir()
    training = Campaign(side, disk, seed)
    while (
        (goes_on := training.hurt(what, chance))
        and not ends()
        and time.monotonic() - began < 60 * minutes
    ):
        training.wait(ends, chance.uniform(15, 45))
        faults.append(what := chance.choice(kinds))
    minutes = round((time.monotonic() - began) / 60, 1)  # without the bare loop
    stuck = [] if goes_on else [f"{what or 'start'}, at step {training.status()[0]}"]
    found = {"seed": seed, **training.end(), "faults": collections.Counter(faults), "stuck": stuck}
    return found | {"hard": kinds == HARD, "minutes": minutes}


def count_pieces(result: Result, pieces: list[dict[str, Any]]) -> None:
    """Add the figures of all pieces."""
    done = [each for piece in pieces for each in piece["campaigns"]]
    faults = collections.Counter(
        {"NaN batch": sum(each["events"].get("skip_step", 0) for each in done)}
    )
    for each in done:
        faults.update(each["faults"])
    hours = round(sum(each["minutes"] for each in done) / 60, 2)
    result.add_samples("hours of training with faults, all pieces", "hours", [hours], at_least=12)
    stuck = sum(bool(each["stuck"]) or not each["ended"] for each in done)
    result.add_count("trainings that did not go on after a fault", stuck, len(done), expected=0)
    other = sum(not each["exact"] for each in done)
    result.add_count(
        "trainings whose state is not that of the bare loop", other, len(done), expected=0
    )
    for what, count in sorted(faults.items()):
        result.add_count(f"faults: {what}", count, faults.total())
    for role in ("trainer", "trainer beyond its newest 32,768 steps", "supervisor"):
        lives = [life for each in done for life in each["lives"] if life["role"] == role]
        for what in WHAT if lives else ():
            unit, most = ("MiB/h", 8) if "memory" in what else ("1/h", 1)
            title = (
                f"{role}: upper end of the slope of {what}, the largest of {len(lives)} that lived"
                " long"
            )
            result.add_samples(title, unit, [max(life[what][4] for life in lives)], at_most=most)
    result.add_samples(
        "largest run directory", "MiB", [max(each["most_mib"] for each in done)], at_most=64
    )
    result.add_samples("files in it, at most", "files", [max(each["most_files"] for each in done)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--state", type=Path, help="new folder where the trainings lie meanwhile; kept"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.json"))
    parser.add_argument("--quick-steps", default="0")
    given = parser.parse_args()
    os.environ["QUICK_STEPS"] = given.quick_steps
    place = given.state or Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    disk = place / "disk"
    if not disk.is_mount():
        disk.mkdir(parents=True, exist_ok=True)
        again = [sys.executable, "-m", "evals.soak", *sys.argv[1:], "--state", str(place)]
        command = command_with_small_disk(disk, again, "128m")
        if command is None:
            raise SystemExit("no tmpfs may be mounted here: a full disk cannot be made")
        os.execvp(command[0], command)
    ends, began, piece = (
        asked_to_end(),
        time.monotonic(),
        begin_piece(seed=given.seed, campaigns=[]),
    )
    number, minutes, kinds = 1000 * given.seed, given.minutes / 2, SOFT
    while not ends() and (left := given.minutes - (time.monotonic() - began) / 60) > 2:
        piece["campaigns"].append(
            campaign(place / str(number), disk, number, kinds, min(minutes, left), ends)
        )
        piece["seconds"] = round(time.monotonic() - began, 1)
        write_piece(given.out, piece, count_pieces)
        subprocess.run(["rm", "-rf", str(disk / "run"), str(disk / "filler")], check=True)
        number, minutes, kinds = number + 1, _HARD_MINUTES, HARD


if __name__ == "__main__":
    main()
