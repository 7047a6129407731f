"""Hours of training under `holdfast run` with random faults: is it still the same training, and does anything grow?

How: a piece is campaigns one after the other, each a training of its own (see ``training``) on a disk of 128 MiB, with
random faults every 15 to 45 s. A *recoverable* campaign is of half of the piece and has faults that the training must
live through: an allocation refused by a real limit, a worker killed or stopped, a full disk for a while. A *hard* one
is of 10 minutes and has SIGKILL of the training, and SIGTERM of the whole and a new start, too. All have one NaN batch
in 240. Each ends whole, and its weights, moments and schedule are compared bit for bit with a bare loop of as many
steps. Every 5 s memory, descriptors and threads of trainer and supervisor are looked at, and the run directory.

    python -m evals.soak --minutes 60 [--seed 1] [--state DIR] [--out FILE]

The result file is written after each campaign and adds up over pieces; a run that is asked to end closes its campaign.

To reach: 12 hours; nothing other than the bare loop; and, of each process that lived 20 minutes or longer, the upper
end of the slope's 95 % interval: 8 MiB of memory and 1 descriptor an hour.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from benchmarks.results_file import Result
from recipes.demo.small_disk import command_with_small_disk

from evals.pieces import asked_to_end, begin_piece, write_piece
from evals.soak.slopes import slope_per_hour
from holdfast.testing import fill_disk

OUT = Path("benchmarks/results/soak.json")
RECOVERABLE = ("allocation refused", "worker killed", "worker stopped", "disk full")
HARD = (*RECOVERABLE, "training killed", "training killed", "ended and started again")
_CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run", "--quiet", "--restart-delay", "1",
        "--max-restarts", "1000000", "--max-preemptions", "1000000", "--max-log-bytes", str(1 << 20)]  # fmt: skip
_PATIENCE_SECONDS, _HARD_MINUTES, _LONG_MINUTES, _WARM_MINUTES = 400.0, 10.0, 20.0, 4.0
_MIB_AN_HOUR, _COUNT_AN_HOUR, _MOST_MIB = 8.0, 1.0, 64.0
WHAT = ("memory", "private memory", "descriptors", "threads")


class Campaign:
    """One training from its start to its end, with faults.

    Args:
        side: Folder for what the training tells.
        disk: The small disk.
        seed: Of the data and of the faults.
    """

    def __init__(self, side: Path, disk: Path, seed: int) -> None:
        self.side, self.disk, self.run, self.seed = side, disk, disk / "run", seed
        self._train = [sys.executable, "-m", "evals.soak.training", str(side), str(self.run), str(seed)]
        self._looked = 0.0
        self.lives: dict[tuple[str, int], list[list[float]]] = collections.defaultdict(list)  # of `WHAT`, after s
        self.sizes: list[tuple[float, int, int]] = []  # s, bytes, files
        self.start()

    def start(self) -> None:
        """Start the supervisor, which starts the training."""
        self.supervisor = subprocess.Popen([*_CLI, "--run-dir", str(self.run), "--", *self._train],
                                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # fmt: skip

    def status(self) -> tuple[int, int]:
        """Return step and process of the training, 0 and 0 before its first step."""
        with suppress(OSError, ValueError):
            step, process = (self.side / "status").read_text().split()
            return int(step), int(process)
        return 0, 0

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait and look meanwhile; return whether it is done in time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not done():
            time.sleep(0.2)
            if time.monotonic() - self._looked > 5:
                self._looked = time.monotonic()
                self._look()
        return done()

    def _look(self) -> None:
        for role, process in (("supervisor", self.supervisor.pid), ("trainer", self.status()[1])):
            with suppress(OSError, LookupError, ValueError):
                place = Path("/proc", str(process))
                status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
                kib = [float(status[name].split()[0]) for name in ("VmRSS", "RssAnon")]
                row = [self._looked, *(each / 1024 for each in kib), len(os.listdir(place / "fd")),
                       float(status["Threads"])]  # fmt: skip
                self.lives[role, process].append(row)
        held = 0
        files = list(self.run.rglob("*"))
        for each in files:
            with suppress(OSError):
                held += each.lstat().st_blocks * 512
        self.sizes.append((self._looked, held, len(files)))

    def goes_on(self, after: int) -> bool:
        """Wait until the training has made 30 steps after this one."""
        return self.wait(lambda: self.status()[0] >= after + 30, _PATIENCE_SECONDS)

    def hurt(self, what: str, chance: Random) -> bool:
        """Let something happen, and return whether training goes on."""
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
            if not self.wait(lambda: self.supervisor.poll() is not None, _PATIENCE_SECONDS):
                return False
            self.start()
        else:
            worker = self.side / f"worker{chance.randrange(2)}"
            number = signal.SIGSTOP if what == "worker stopped" else signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(process if what == "training killed" else int(worker.read_text()), number)
        return self.goes_on(step)

    def end(self) -> dict[str, Any]:
        """Have the training end whole, and return what came of it."""
        (self.side / "stop").touch()
        self.wait(lambda: self.supervisor.poll() is not None, _PATIENCE_SECONDS)
        final = self.side / "final.json"
        found = json.loads(final.read_text()) if final.exists() else {"step": self.status()[0], "digest": None}
        self.supervisor.terminate()
        self.supervisor.wait()
        command = [*self._train, "--steps", str(found["step"])]
        bare = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return {
            "steps": found["step"], "ended": found["digest"] is not None, "exact": found["digest"] == bare,
            "events": found.get("events", {}), "most_mib": round(max(each[1] for each in self.sizes) / 2**20, 2),
            "most_files": max(each[2] for each in self.sizes), "lives": self.slopes(),
        }  # fmt: skip

    def slopes(self) -> list[dict[str, Any]]:
        """Return of each process that lived long: minutes, and of each quantity its least, most, slope and interval."""
        found = []
        for (role, _), rows in self.lives.items():
            table = np.array(rows)
            minutes = (table[-1, 0] - table[0, 0]) / 60
            if minutes >= _LONG_MINUTES:
                table = table[table[:, 0] > table[0, 0] + 60 * _WARM_MINUTES]
                grown = {
                    what: [round(float(x), 3) for x in (*np.percentile(table[:, column], (0, 100)),
                                                        *slope_per_hour(table[:, 0], table[:, column]))]
                    for column, what in enumerate(WHAT, 1)
                }  # fmt: skip
                found.append({"role": role, "minutes": round(minutes, 1), **grown})
        return found


def campaign(
    side: Path, disk: Path, seed: int, kinds: tuple[str, ...], minutes: float, ends: Callable[[], bool]
) -> Any:
    """Train for some minutes with such faults, and return what came of it."""
    began, chance = time.monotonic(), Random(seed)
    faults: collections.Counter[str] = collections.Counter()
    stuck: list[str] = []
    side.mkdir()
    training = Campaign(side, disk, seed)
    goes_on = training.goes_on(0)
    while goes_on and not ends() and time.monotonic() - began < 60 * minutes:
        training.wait(ends, chance.uniform(15, 45))
        what = chance.choice(kinds)
        faults[what] += 1
        goes_on = training.hurt(what, chance)
        if not goes_on:
            stuck.append(f"{what} at step {training.status()[0]}")
    found = {"kind": "hard" if kinds == HARD else "recoverable", "seed": seed, **training.end()}
    return found | {"minutes": round((time.monotonic() - began) / 60, 1), "faults": dict(faults), "stuck": stuck}


def count_pieces(result: Result, pieces: list[dict[str, Any]]) -> None:
    """Add the figures of all pieces."""
    done = [each for piece in pieces for each in piece["campaigns"]]
    faults = sum((collections.Counter(each["faults"]) for each in done), collections.Counter())
    faults["NaN batch"] = sum(each["events"].get("skip_step", 0) for each in done)
    hours = round(sum(each["minutes"] for each in done) / 60, 2)
    result.add_samples("hours of training with faults, all pieces", "hours", [hours], at_least=12)
    stuck = sum(len(each["stuck"]) + (not each["ended"]) for each in done)
    result.add_count("faults after which training did not go on", stuck, faults.total(), expected=0)
    result.add_count("trainings whose state is not that of the bare loop", sum(not each["exact"] for each in done),
                     len(done), expected=0)  # fmt: skip
    for what, count in sorted(faults.items()):
        result.add_count(f"faults: {what}", count, faults.total())
    lives = [life for each in done for life in each["lives"]]
    for role in ("trainer", "supervisor"):
        ours = [each for each in lives if each["role"] == role]
        for what in WHAT if ours else ():
            unit, most = ("MiB/h", _MIB_AN_HOUR) if "memory" in what else ("1/h", _COUNT_AN_HOUR)
            result.add_samples(f"{role}: largest upper end of the slope of {what}, of {len(ours)} that lived long",
                               unit, [max(each[what][4] for each in ours)], at_most=most)  # fmt: skip
    largest = max((each["most_mib"] for each in done), default=0.0)
    result.add_samples("largest run directory", "MiB", [largest], at_most=_MOST_MIB)
    result.add_samples("files in it, at most", "files", [max((each["most_files"] for each in done), default=0)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="where the trainings lie meanwhile; kept")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--disk", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    place = given.state or Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    if given.disk is None:
        (place / "disk").mkdir(parents=True, exist_ok=True)
        again = [
            sys.executable,
            "-m",
            "evals.soak",
            *sys.argv[1:],
            "--state",
            str(place),
            "--disk",
            str(place / "disk"),
        ]
        command = command_with_small_disk(place / "disk", again, "128m")
        if command is None:
            raise SystemExit("no tmpfs may be mounted here: a full disk cannot be made")
        os.execvp(command[0], command)
    ends, began = asked_to_end(), time.monotonic()
    piece = begin_piece(seed=given.seed, campaigns=[])
    number, minutes, kinds = 1000 * given.seed, given.minutes / 2, RECOVERABLE
    while not ends() and (left := given.minutes - (time.monotonic() - began) / 60) > 2:
        subprocess.run(["rm", "-rf", str(given.disk / "run"), str(given.disk / "filler")], check=True)
        found = campaign(place / str(number), given.disk, number, kinds, min(minutes, left), ends)
        piece["campaigns"].append(found)
        piece["seconds"] = round(time.monotonic() - began, 1)
        write_piece(given.out, piece, count_pieces)
        number, minutes, kinds = number + 1, _HARD_MINUTES, HARD


if __name__ == "__main__":
    main()
