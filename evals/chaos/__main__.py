"""Little trainings with one planted loss of exactness, and exact ones.

What `holdfast chaos` says of each.

How: each program of ``programs`` runs with one mistake, or with none, in the campaign of `holdfast
chaos`, with the kinds of faults that stand beside it. *Found* is a mistake if any trial says that
the training is another one, lost work or does not survive; *named* if what differs first is what
was planted. *Invented* is anything said of an exact program. The programs are forked from a process
that has torch loaded; observer and faults are those of the command.

    python -m evals.chaos [--quick] [--only WORD]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.results_file import Result, read_options
from tests.prepared import Prepared

from holdfast.chaos import trials
from holdfast.chaos.campaign import Campaign
from holdfast.chaos.results import CampaignReport
from holdfast.chaos.workplace import Workplace

_PROGRAMS = Path(__file__).parent / "programs"
_SEED = 1
_USUAL = ("kill", "term", "first", "save", "eval")


@dataclass(frozen=True, slots=True)
class Case:
    """A program, its mistake (empty, or after a `+`.

    None), what names it, and the faults that can show it.
    """

    program: str
    what: str
    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("kill",)

    @property
    def planted(self) -> bool:
        """Whether there is a mistake."""
        return bool(self.names)


CASES = (
    Case("classifier", "data order not restored", ("batch",)),
    Case("classifier", "random state not saved", ("random",)),
    Case("classifier", "optimizer state dropped", ("optimizer",)),
    Case("classifier", "momentum reset", ("optimizer",)),
    Case("classifier", "scheduler off by one", ("settings",)),
    Case("classifier", "learning rate from the start", ("settings",)),
    Case("classifier", "BatchNorm buffers dropped", ("buffers",)),
    Case("classifier", "weights rounded to bf16", ("weights",)),
    Case("classifier", "position off by one", ("batch",)),
    Case("classifier", "epoch repeated", ("batch",)),
    Case("classifier", "rest of the epoch dropped", ("batch",)),
    Case("classifier", "last batch dropped", ("batch", "end")),
    Case("classifier", "shuffled anew", ("batch",)),
    Case("classifier", "older checkpoint", ("older",)),
    Case("classifier", "named by the time", ("older",), ("clock",)),
    # Shows where the last is not the best
    Case("classifier", "best instead of last", ("older",), _USUAL),
    Case("classifier", "written in place", ("does not survive",), ("save",)),
    Case("language", "numpy state not saved", ("random", "inputs")),
    Case("language", "python state not saved", ("random", "inputs")),
    Case("language", "EMA not saved", ("saved",)),
    Case("language", "step counter off by one", ("settings", "end", "saved")),
    Case("language", "Adam's step count reset", ("optimizer",)),
    Case("language", "weight decay lost", ("settings",)),
    Case("language", "warm-up restarts", ("settings",)),
    Case("language", "weight of the loss not saved", ("losses",)),
    Case("language", "partial accumulation lost", ("weights",)),
    Case("language", "saved within an accumulation", ("parts", "random", "inputs")),
    Case("augmented", "worker seeds", ("batch",)),
    Case("augmented", "sampler not re-seeded", ("batch",)),
    Case("augmented", "no timeout", ("hangs",), ("worker",)),
    # Taken for safe at first: what chaos said is true
    Case("augmented", "timeout only", ("hangs",), ("worker",)),
    Case("scaled", "GradScaler state dropped", ("scale",)),
    Case("gan", "one of two optimizers dropped", ("optimizer",)),
    Case("gan", "generator of its own not saved", ("inputs", "losses")),
    Case("classifier", "", kinds=_USUAL),
    Case("classifier", "+saves when asked to end", kinds=_USUAL),
    Case(
        "classifier", "+checked", kinds=("kill", "save", "memory", "disk", "io", "clock", "damage")
    ),
    Case("classifier", "+best beside last", kinds=("kill", "eval")),
    Case("language", "", kinds=(*_USUAL, "io", "clock")),
    Case("language", "+no weight decay", kinds=("kill", "term", "memory")),
    Case("language", "+saves in a thread", kinds=("kill", "term", "first")),
    Case("augmented", "", kinds=("kill", "term", "save")),
    Case("augmented", "+timeout and files", kinds=("worker",)),
    Case("scaled", "", kinds=_USUAL),
    Case("gan", "", kinds=("kill", "term", "first", "disk", "io", "clock")),
)


def start(command: list[str], **given: Any) -> Prepared:
    """Start what the bench starts, forked from a process that has torch loaded."""
    # Without Python, -I -S, child_start, our pid, the program, ``python``
    return Prepared(command[7:], **given)


def prepare() -> None:
    """Have the bench of this process start programs so."""
    trials.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=start,
        **{
            name: getattr(subprocess, name)
            for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")
        },
    )


def tried(case: Case, seed: int) -> CampaignReport:
    """Put one program to the test."""
    command = [
        sys.executable,
        str(_PROGRAMS / f"{case.program}.py"),
        *([case.what] if case.what else []),
    ]
    with tempfile.TemporaryDirectory() as folder:
        return Campaign(command, origin=Path(folder), only=case.kinds, seed=seed, restarts=2).run()


def answers(report: CampaignReport) -> list[tuple[str, str]]:
    """Return of each trial that did not pass what differs first, or how it ended, and the
    sentence.
    """
    failed = [row for row in report.rows if row.tried and not row.passed]
    return [
        (
            (
                row.comparison["differences"][0]["what"]
                if row.result in ("another training", "work is lost")
                else row.result
            ),
            row.detail,
        )
        for row in failed
    ]


def watching_costs(result: Result, pairs: int, steps: int) -> None:
    """Measure the CPU time of a training that is watched against the same that is not, each from
    its start.
    """
    ratios = []
    command = [sys.executable, str(_PROGRAMS / "sized.py"), str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder), ())
        place.renew()
        bench = trials.Bench(sys.executable, command, place, time.monotonic() + 1e6)
        for _ in range(pairs):
            before = _cpu_seconds()
            subprocess.run(command, cwd=place.work, check=True)
            between = _cpu_seconds()
            bench.attempt(None)
            ratios.append((_cpu_seconds() - between) / (between - before))
        place.close()
    result.add_samples(
        "CPU time of a training that is watched, against one that is not",
        "ratio",
        ratios,
        at_most=1.1,
    )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    only = sys.argv.pop(sys.argv.index("--only") + 1) if "--only" in sys.argv else ""
    sys.argv = [each for each in sys.argv if each != "--only"]
    options = read_options("chaos", __doc__ or "")
    cases = [each for each in CASES if only in f"{each.program} {each.what}"][
        :: 6 if options.quick else 1
    ]
    result = Result(options=options, parameters={"seed": _SEED, "cases": len(cases)})
    if not only:
        watching_costs(result, 1 if options.quick else 2, 20 if options.quick else 60)
    found = named = invented = met = 0
    shares = []
    prepare()
    with ThreadPoolExecutor(2) as pool:
        for case, report in zip(cases, pool.map(partial(tried, seed=_SEED), cases), strict=True):
            said = answers(report)
            right = any(what in case.names for what, _ in said)
            found += case.planted and bool(said)
            named += right
            invented += not case.planted and bool(said)
            met += sum(row.tried for row in report.rows)
            shares.append((report.seconds - report.seconds_of_runs) / report.seconds_of_runs)
            title = f"{case.program}: {case.what or 'exact'}"
            result.samples[title] = {
                row.fault: f"{row.result}: {row.detail}" for row in report.rows
            }
            print(
                f"{'  ' if right or not (case.planted or said) else '! '}{title}: {said[:1]}",
                flush=True,
            )
    planted = sum(case.planted for case in cases)
    result.add_count("planted losses that were found", found, planted, expected=planted)
    result.add_count("of these, those named by what was planted", named, planted, expected=planted)
    result.add_count(
        "exact programs of which something was said", invented, len(cases) - planted, expected=0
    )
    result.add_count(
        "trials in which the fault happened",
        met,
        sum(len(each) for each in result.samples.values() if isinstance(each, dict)),
    )
    result.add_samples(
        "time of the campaign beside the runs, of a campaign over a tiny program",
        "share",
        shares,
        at_most=0.1,
    )
    result.write()


if __name__ == "__main__":
    main()
