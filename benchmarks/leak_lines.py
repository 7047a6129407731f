"""Whether the line that keeps memory is named.

On leaks that are really planted into trainings, one script each.

Each script trains in a process of its own, observed as `holdfast run` observes. After a few steps a
trace is requested, as the supervisor does when memory grows; that it grows is not waited for. Right
is only the marked line. All are loops of one file, without workers, and the trace was adjusted to
each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.leak_cases import CASES, HELD_OUT, write
from benchmarks.results_file import Result, read_options
from holdfast.core.events.event import Event
from holdfast.recorder.progress import read_board, request_trace
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import BOARD_FILE, read_processes
from holdfast.supervise.launch.commands import make_observed_environment

_STEPS_BEFORE = 5
_PATIENCE_SECONDS = 40.0
_WRONG_SHARE = 0.1
_QUICK = 10  # every so many cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one case."""

    case: str
    line_right: bool  # whether the largest leak is kept by the marked line
    kind_right: bool
    others: int  # further leaks, none of which was planted
    trace_seconds: float  # in the looks
    words: str


@contextmanager
def running(script: Path, run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script, observed, and kill it in the end."""
    with (script.parent / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**make_observed_environment(os.environ, run, 0), "OMP_NUM_THREADS": "1"},
            cwd=script.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def trace(process: subprocess.Popen[bytes], run: Path) -> list[Event]:
    """Request a trace once it trains, and return the events when it has ended."""
    requested = False
    until = time.monotonic() + _PATIENCE_SECONDS
    while (
        time.monotonic() < until
        and process.poll() is None
        and not list(run.glob("processes/failed-*"))
    ):
        for folder, _ in read_processes(run):
            standing = read_board(folder / BOARD_FILE)
            if standing is not None and standing.step >= _STEPS_BEFORE and not requested:
                request_trace(folder / BOARD_FILE, 1)
                requested = True
            events = read_events(folder) if requested else []
            if any(event.kind == "leak_trace" for event in events):
                return events
        time.sleep(0.05)
    return []


def row_of(case: str) -> Row:
    """Run a case and say what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        script, lines = write(case, Path(folder))
        run = Path(folder) / "run"
        run.mkdir()
        with running(script, run) as process:
            events = trace(process, run)
        errors = (Path(folder) / "stderr.txt").read_text(errors="replace")[-500:]
        failed = [path.read_text()[-1500:] for path in run.glob("processes/failed-*")]
        leaks = [event.data for event in events if event.kind == "leak"]
        if not leaks:
            return Row(
                case=case,
                line_right=False,
                kind_right=False,
                others=0,
                trace_seconds=_seconds(events),
                words=f"nothing {[event.kind for event in events]} {errors} {failed}",
            )
        *others, leak = leaks
        places = [f"{script}:{number} " for number in lines]
        return Row(
            case=case,
            line_right=any(leak["retained_at"].startswith(place) for place in places),
            kind_right=leak["form"] == {**CASES, **HELD_OUT}[case].kind,
            others=sum(not other["retained_at"].startswith(tuple(places)) for other in others),
            trace_seconds=_seconds(events),
            words=" | ".join(
                f"{each['form']}: {each['what']}, {each['bytes_per_step']} B, by {each['held_by']},"
                f" at {each['retained_at'].removeprefix(folder)}"
                for each in reversed(leaks)
            ),
        )


def _seconds(events: list[Event]) -> float:
    return next(
        (float(event.data["seconds"]) for event in events if event.kind == "leak_trace"), 0.0
    )


def main() -> None:
    """Run all cases and write the result."""
    options = read_options("leak_lines", __doc__)
    every = {**CASES, **HELD_OUT}
    cases = list(every)[:: _QUICK if options.quick else 1]
    result = Result(
        options=options, parameters={"cases": len(cases), "steps_before": _STEPS_BEFORE}
    )
    result.notes.append(
        "held out: written when the trace was done; those that were wrong at first were fixed then"
    )
    rows = []
    for case in cases:
        rows.append(row_of(case))
        print(
            f"  {'right' if rows[-1].line_right else 'WRONG'} {case}: {rows[-1].words}", flush=True
        )
    for what, group in (
        ("all", every),
        ("of these: cases held out until they were mended", HELD_OUT),
    ):
        of_group = [row for row in rows if row.case in group]
        right = sum(row.line_right for row in of_group)
        result.add_count(f"retaining line named, {what}", right, len(of_group))
        if of_group:
            share = [1 - right / len(of_group)]
            result.add_samples(
                f"share with the line wrong, {what}", "ratio", share, at_most=_WRONG_SHARE
            )
    result.add_count("right kind", sum(row.kind_right for row in rows), len(rows))
    result.add_count(
        "another line told besides", sum(row.others > 0 for row in rows), len(rows), expected=0
    )
    result.add_samples(
        "time in the looks of one trace", "s", [row.trace_seconds for row in rows], digits=2
    )
    result.samples["kinds"] = dict(Counter(every[row.case].kind for row in rows))
    result.samples["not right"] = [
        asdict(row) for row in rows if not (row.line_right and row.kind_right)
    ]
    result.write()


if __name__ == "__main__":
    main()
