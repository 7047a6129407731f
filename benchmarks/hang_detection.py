"""How fast the watchdog notices a hang, and whether it names the kind, the phase and the line.

On real hangs.

Each case trains in a process of its own, observed as `holdfast run` observes, and hangs at a known
line. Two times: that by which the watchdog's own clock is over the limit when it notices, and the
time from the moment at which the process noted that it will now hang to the notice, less the limit.
In the second a worker that runs ahead of its trainer hangs before the trainer waits, so it is an
upper bound; an import and an end that hang have no such moment. That the stacks are taken twice, a
second apart, comes after it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.ports import unused_port

from benchmarks.hang_cases import MECHANISMS, ODD, PHASES, RANKS, marked_lines, names, of_ranks
from benchmarks.results_file import Result, read_options
from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import Hang, HangSuspected
from holdfast.supervise.launch.commands import make_observed_environment
from holdfast.supervise.watch.attempt_watch import AttemptWatch
from holdfast.supervise.watch.limits import HangLimits
from holdfast.supervise.watch.stacks import StackSampler
from holdfast.supervise.watch.watchdog import Watchdog

_ROOT = Path(__file__).parents[1]
_LIMIT_SECONDS = 2.0
_START_SECONDS = 20.0  # importing torch, on a machine that is busy
_PATIENCE_SECONDS = 240.0
_LATE_SECONDS = 0.2
_WRONG_SHARE = 0.05
_QUICK = 30  # every so many cases
_BLIND = 4  # every so many are run again without py-spy


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one case."""

    case: str
    found: bool  # whether a hang was reported at all
    late_seconds: float = 0.0  # between limit and notice, by the watchdog's clock
    # From the hang to the notice, less the limit; None: no such moment
    since_strike_seconds: float | None = None
    examined_seconds: float = 0.0  # between notice and verdict
    kind_right: bool = False
    phase_right: bool = False
    frame_right: bool = False
    rank_right: bool | None = None  # None: there are no ranks
    remedy: str = ""
    words: str = ""

    @property
    def right(self) -> bool:
        """Return whether phase and frame are right, and the kind too."""
        return self.kind_right and self.phase_right and self.frame_right


def limits_of(case: str) -> HangLimits:
    """Return the limits of a case."""
    start = _START_SECONDS if case.endswith("/start") else 10 * _START_SECONDS
    return HangLimits.parse(
        [f"all={_LIMIT_SECONDS}", f"starting={start}", f"first step={10 * _START_SECONDS}"]
    )


@contextmanager
def running(case: str, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a case in sessions of its own, and kill all of it in the end."""
    environment = {
        **make_observed_environment(os.environ, folder / "run", 0),
        "OMP_NUM_THREADS": "1",
    }
    ranks: list[dict[str, str]] = [{}]
    if of_ranks(case)[0] in RANKS:
        size = of_ranks(case)[1]
        known = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(unused_port()),
        }
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **known} for rank in range(size)]
    command = [sys.executable, "-m", "benchmarks.hang_cases", case, str(folder)]
    with (folder / "stderr.txt").open("wb") as errors:
        processes = [
            subprocess.Popen(
                command,
                cwd=_ROOT,
                env=environment | rank,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            for rank in ranks
        ]
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def watch(
    case: str, folder: Path, py_spy: str | None
) -> tuple[list[Hang], list[tuple[float, EventData]]]:
    """Run a case under the watchdog, and return the first hang that it reported, with all
    events.
    """
    (folder / "run").mkdir()
    stop, hangs = threading.Event(), []
    events: list[tuple[float, EventData]] = []

    def emit(data: EventData) -> None:
        events.append((time.monotonic(), data))

    def on_hang(hang: Hang) -> None:
        hangs.append(hang)
        stop.set()

    stacks = StackSampler(folder / "run", pause=stop.wait, py_spy=py_spy)
    watch = AttemptWatch(
        run_path=folder / "run",
        attempt=0,
        limits=limits_of(case),
        emit=emit,
        on_hang=on_hang,
        say=lambda _: None,
    )
    watchdog = Watchdog(watch, stacks=stacks)
    with running(case, folder):
        thread = threading.Thread(target=watchdog.run, args=(stop,))
        thread.start()
        stop.wait(_PATIENCE_SECONDS)
        stop.set()
        thread.join()
    return hangs, events


def expected(case: str) -> tuple[str, str | None, str]:
    """Return kind, phase (None: any) and function of a case."""
    if (name := of_ranks(case)[0]) in RANKS:
        return RANKS[name].kind, None, RANKS[name].frame
    name, _, place = case.partition("/")
    mechanism = MECHANISMS[name]
    return mechanism.kind, PHASES[place], mechanism.frame or mechanism.act.__name__


def row_of(case: str, py_spy: str | None = None) -> Row:
    """Run a case and say what came of it, with py-spy if it is installed, or without (an empty
    text).
    """
    with tempfile.TemporaryDirectory() as folder:
        hangs, events = watch(case, Path(folder), py_spy)
        if not hangs:
            errors = (Path(folder) / "stderr.txt").read_text(errors="replace")[-300:]
            return Row(
                case=case, found=False, words=f"{[data.kind for _, data in events]} {errors}"
            )
        struck = [float(path.read_text()) for path in Path(folder).glob("struck-*")]
    hang = hangs[0]
    kind, phase, function = expected(case)
    noticed_at, noticed = [(at, data) for at, data in events if type(data) is HangSuspected][-1]
    over_limit = noticed.seconds - noticed.limit
    file_line, _, blamed_function = hang.frame.rpartition(" in ")
    file, _, line = file_line.rpartition(":")
    lines = marked_lines().get(function)
    right_place = (
        blamed_function.split(".<locals>")[0] == function
        and file.endswith("hang_cases.py")
        and (lines is None or int(line) in lines)
    )
    reported_at = next(at for at, data in events if type(data) is Hang)
    frame = hang.frame.rpartition("/")[2]
    # Later
    has_moment = struck and not (
        case.endswith(("/start", "/ending")) or case.startswith("rank skips")
    )
    return Row(
        case=case,
        found=True,
        late_seconds=over_limit,
        since_strike_seconds=noticed_at - min(struck) - noticed.limit if has_moment else None,
        examined_seconds=reported_at - noticed_at,
        kind_right=hang.hang_kind == kind,
        phase_right=phase in (None, hang.phase),
        frame_right=right_place,
        remedy=hang.remedy,
        rank_right=(
            hang.odd_one_out == ODD[of_ranks(case)[1]] if of_ranks(case)[0] in RANKS else None
        ),
        words=f"{hang.hang_kind}, {hang.phase}, {frame}, odd {hang.odd_one_out}, {hang.sentence}",
    )


def main() -> None:
    """Run all cases and write the result."""
    options = read_options("hang_detection", __doc__)
    # So that the case that runs is killed too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cases = [*names(), *(f"{name} of {size}" for name in RANKS for size in ODD)]
    cases = cases[::_QUICK] if options.quick else cases
    result = Result(
        options=options,
        parameters={
            "cases": len(cases),
            "limit_seconds": _LIMIT_SECONDS,
            "mechanisms": len(MECHANISMS),
            "of_ranks": len(RANKS),
        },
    )
    result.notes.append(
        "NFS that does not answer is stood in for by the opening of a named pipe and by flock,"
        " without state D"
    )
    rows = []
    for case in cases:
        rows.append(row_of(case))
        print(f"  {'right' if rows[-1].right else 'WRONG'} {case}: {rows[-1].words}", flush=True)
    add(result, rows)
    blind = [row_of(case, py_spy="") for case in cases[::_BLIND]]
    for what, count in (
        ("right kind", sum(row.kind_right for row in blind)),
        ("right phase and frame", sum(row.phase_right and row.frame_right for row in blind)),
    ):
        result.add_count(f"without py-spy, by faulthandler: {what}", count, len(blind))
    result.samples["not right without py-spy"] = [asdict(row) for row in blind if not row.right]
    result.write()


def add(result: Result, rows: list[Row]) -> None:
    """Add the figures."""
    found = [row for row in rows if row.found]
    result.add_samples("time between limit and notice", "s", [row.late_seconds for row in found])
    in_time = sum(row.late_seconds <= _LATE_SECONDS for row in found)
    result.add_count(
        f"noticed within {_LATE_SECONDS} s of the limit", in_time, len(rows), expected=len(rows)
    )
    since = [row.since_strike_seconds for row in found if row.since_strike_seconds is not None]
    result.add_samples("time between hang + limit and notice", "s", since)
    in_time = sum(seconds <= _LATE_SECONDS for seconds in since)
    what = f"noticed within {_LATE_SECONDS} s of hang + limit"
    result.add_count(what, in_time, len(since), expected=len(since))
    result.add_samples(
        "time between notice and verdict", "s", [row.examined_seconds for row in found]
    )
    for what, count in (
        ("told as a hang", len(found)),
        ("right kind", sum(row.kind_right for row in rows)),
        ("right frame", sum(row.frame_right for row in rows)),
    ):
        result.add_count(what, count, len(rows))
    of_phase = [row for row in rows if row.rank_right is None]  # in those any phase counts
    result.add_count("right phase", sum(row.phase_right for row in of_phase), len(of_phase))
    ranks = [row.rank_right for row in rows if row.rank_right is not None]
    result.add_samples(
        "of several ranks: right rank", "%", [100 * sum(ranks) / len(ranks)], at_least=95.0
    )
    wrong = sum(not (row.phase_right and row.frame_right) for row in rows) / len(rows)
    result.add_samples("share with phase or frame wrong", "ratio", [wrong], at_most=_WRONG_SHARE)
    wrong = sum(not row.right for row in rows) / len(rows)
    result.add_samples(
        "share with kind, phase or frame wrong", "ratio", [wrong], at_most=_WRONG_SHARE
    )
    result.samples["kinds"] = dict(Counter(expected(row.case)[0] for row in rows))
    result.samples["not right"] = [asdict(row) for row in rows if not row.right]


if __name__ == "__main__":
    main()
