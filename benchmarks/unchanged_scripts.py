"""Unchanged training programs by other people, killed and resumed by ``holdfast run --resume``.

Do they end with the results of a run that nobody disturbed?

How: the programs are given as a folder, which is not part of this repository (see
``unchanged_programs``): the examples of PyTorch, language models, GANs, segmentation, speech,
recommendation, with and without a ``DataLoader``, some with checkpoints of their own. Each is run
once without holdfast. Then ``holdfast run --resume --max-restarts 0`` runs it with a checkpoint every 5
steps. The training process is killed by SIGKILL up to 5 times, after a random number of steps and a
random part of a second, and the same command is started again each time, until it ends.

The verdict on each kill:

- exact: the run has ended, and its results equal those of the plain run. Compared are the digests
  of the weights and images that it wrote and the result lines that it printed.
- refused: holdfast ended the script with exit code 2 because it could not save it or resume it
  exactly. Nothing is lost, but nothing is gained either. The reason is counted.
- not proven: the run ended with other results, and holdfast had said that it could not prove the
  resume.
- failed: the command failed otherwise, although the plain run did not.
- WRONG: the run has ended with other results and without a warning. A second plain run has equal
  results; a program for which it has not is left out.

A program that never calls ``optimizer.step()`` is not saved: it starts from the beginning, and is
exact because of that.

To reach: no kill is WRONG or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import holdfast
from benchmarks.results_file import Result, add_options, describe_commit, options_of, without_paths
from benchmarks.unchanged_programs import (
    Program,
    Results,
    read_programs,
    results_of,
    run_plainly,
)
from holdfast.recorder.progress import read_samples
from holdfast.recorder.run_files import PROCESSES_FOLDER, SAMPLES_FILE

EXACT = "exact"
REFUSED = "refused"
NOT_PROVEN = "not proven"
FAILED = "failed"
WRONG = "WRONG"
VERDICTS = (EXACT, REFUSED, NOT_PROVEN, FAILED, WRONG)

_CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()"]
_SOURCES = str(Path(holdfast.__file__).parents[1])
_REFUSED_EXIT_CODE = 2
_KILLS = 5
_QUICK_KILLS = 1
_SAVE_INTERVAL_STEPS = 5
_LONGEST_DELAY_SECONDS = 0.5
# A program without optimizer steps is killed at a random moment of this time.
_STEPLESS_SECONDS = 5.0
_LONGEST_ATTEMPT_SECONDS = 600.0
_POLL_SECONDS = 0.1
_OUTCOME_FILE = "outcome.json"
# What holdfast prints if it resumes a script without being able to prove that this is exact.
_NOT_PROVEN = re.compile(r"resumed, not proven")
_REASON = re.compile(r"holdfast: (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How one start of the command has ended.

    Args:
        exit_code: Exit code of ``holdfast run``.
        killed_after: The steps of this attempt when it was killed; None if it ended by itself.
        output: What the program printed to stdout.
        errors: What it and holdfast printed to stderr.
    """

    exit_code: int
    killed_after: int | None
    output: str
    errors: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of the kills of one program.

    Args:
        name: Name of the program.
        verdict: One of `VERDICTS`, which holds for each of the kills.
        reason: Why it is not exact.
        kills: The steps that each killed attempt had made.
        plain_seconds: Duration of the plain run.
        commit: The commit of this repository. An interrupted benchmark may be continued on another
            one.
    """

    name: str
    verdict: str = EXACT
    reason: str = ""
    kills: list[int] = field(default_factory=list)
    plain_seconds: float = 0.0
    commit: str | None = field(default_factory=lambda: describe_commit()["commit"])


def start(
    program: Program, working_directory: Path, run_dir: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start a program under ``holdfast run --resume``; its streams go to two files of `log`."""
    environment = program.environment(extra_path=_SOURCES)
    environment["HOLDFAST_SAVE_INTERVAL_STEPS"] = str(_SAVE_INTERVAL_STEPS)
    command = [*_CLI, "run", "--resume", "--max-restarts", "0", "--run-dir", str(run_dir), "--"]
    with log.with_suffix(".out").open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(
            [*command, *program.command()],
            cwd=working_directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )


def find_trainer(supervisor: int, program: Program) -> int | None:
    """Return the PID of the training process that a supervisor has started, or None."""
    wanted = [argument.encode() for argument in program.command()]
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().split(b"\0")
            # The interpreter may be given by another path; the script and its arguments are equal.
            if parent == supervisor and words[1 : len(wanted)] == wanted[1:]:
                return int(folder.name)
    return None


def count_steps(run_dir: Path, trainer: int) -> int:
    """Return how many optimizer steps an observed process has made."""
    for path in (run_dir / PROCESSES_FOLDER).glob(f"{trainer}-*/{SAMPLES_FILE}"):
        with suppress(OSError, holdfast.HoldfastError):
            return len(read_samples(path))
    return 0


def run_attempt(
    program: Program,
    working_directory: Path,
    run_dir: Path,
    log: Path,
    *,
    kill: tuple[int, float] | None,
) -> Attempt:
    """Start the command once, and kill the training process or wait for the end.

    Args:
        program: The program.
        working_directory: Where it runs.
        run_dir: Run directory of holdfast.
        log: Path of the log without its suffix.
        kill: After how many steps, and seconds more, the training process is killed. A program
            without optimizer steps is killed after the seconds alone.
    """
    supervisor = start(program, working_directory, run_dir, log)
    started = time.monotonic()
    killed_after = None
    trainer = None
    while supervisor.poll() is None:
        time.sleep(_POLL_SECONDS)
        if trainer is None:
            trainer = find_trainer(supervisor.pid, program)
        if time.monotonic() - started > _LONGEST_ATTEMPT_SECONDS:
            if trainer is not None:
                os.kill(trainer, signal.SIGKILL)
            supervisor.kill()
        if kill is None or killed_after is not None or trainer is None:
            continue
        steps, delay = kill
        made = count_steps(run_dir, trainer)
        if made >= steps:
            time.sleep(delay)
            with suppress(ProcessLookupError):
                os.kill(trainer, signal.SIGKILL)
                killed_after = made
    return Attempt(
        exit_code=supervisor.wait(),
        killed_after=killed_after,
        output=log.with_suffix(".out").read_text(errors="replace"),
        errors=log.with_suffix(".err").read_text(errors="replace"),
    )


def judge(program: Program, attempts: list[Attempt], results: Results, plain: Results) -> Outcome:
    """Return the verdict on a program's kills.

    Args:
        program: The program.
        attempts: All attempts of the run. The last one ended by itself.
        results: The results after it.
        plain: Those of the undisturbed run.
    """
    last = attempts[-1]
    outcome = Outcome(name=program.name)
    outcome.kills = [one.killed_after for one in attempts if one.killed_after is not None]
    reasons = _REASON.findall(last.errors)
    if last.exit_code == _REFUSED_EXIT_CODE:
        outcome.verdict = REFUSED
        outcome.reason = reasons[0] if reasons else last.errors[-300:]
        return outcome
    if last.exit_code != 0:
        outcome.verdict = FAILED
        outcome.reason = f"exit code {last.exit_code}: {last.errors.strip()[-300:]}"
        return outcome
    difference = results.difference_from(plain)
    if difference is None:
        return outcome
    warned = [attempt for attempt in attempts if _NOT_PROVEN.search(attempt.errors)]
    outcome.verdict = NOT_PROVEN if warned else WRONG
    outcome.reason = difference
    return outcome


def is_reproducible(program: Program, folder: Path, plain: Results) -> bool:
    """Return whether a second plain run has the same results as the first one."""
    again, _ = run_plainly(program, folder / "again")
    return again.difference_from(plain) is None and len(again.lines) == len(plain.lines)


def run_program(program: Program, folder: Path, kills: int, chance: random.Random) -> Outcome:
    """Run a program plainly, then under holdfast with kills, and compare.

    Args:
        program: The program.
        folder: An empty folder for its copies.
        kills: How often it is killed.
        chance: Chooses the moments.

    Raises:
        RuntimeError: If a plain run fails, or two of them differ.
    """
    working_directory = program.copy_to(folder / "resumed")
    attempts = run_with_kills(program, working_directory, folder, kills, chance)
    results = results_of(program, working_directory, attempts[-1].output)
    if attempts[-1].exit_code == _REFUSED_EXIT_CODE:
        # Nothing is compared.
        return judge(program, attempts, results, results)
    plain, plain_seconds = run_plainly(program, folder / "plain")
    outcome = judge(program, attempts, results, plain)
    if outcome.verdict == WRONG and not is_reproducible(program, folder, plain):
        raise RuntimeError(f"{program.name}: two plain runs differ")
    outcome.plain_seconds = plain_seconds
    return outcome


def run_with_kills(
    program: Program, working_directory: Path, folder: Path, kills: int, chance: random.Random
) -> list[Attempt]:
    """Start a program under holdfast until it ends by itself, and return its attempts.

    Args:
        program: The program.
        working_directory: Where it runs.
        folder: Gets the run directory and the logs.
        kills: How often it is killed.
        chance: Chooses the moments.
    """
    # On average, the last kill comes before the end of the run.
    most_steps = 2 * program.steps // (kills + 1)
    longest_delay = _LONGEST_DELAY_SECONDS if program.steps else _STEPLESS_SECONDS
    attempts: list[Attempt] = []
    while True:
        kill = None
        if len(attempts) < kills:
            kill = (chance.randint(0, most_steps), chance.random() * longest_delay)
        log = folder / f"attempt{len(attempts)}"
        attempt = run_attempt(program, working_directory, folder / "run", log, kill=kill)
        attempts.append(attempt)
        ended_by_itself = attempt.exit_code in (0, _REFUSED_EXIT_CODE)
        if attempt.killed_after is None or ended_by_itself:
            return attempts


@contextmanager
def working_folder(program: Program, parent: Path | None) -> Iterator[Path]:
    """Create the folder for the copies and logs of a program.

    Args:
        program: The program.
        parent: The folder is kept in this one. None for a folder that is deleted in the end.
    """
    if parent is None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder = parent / program.name
    if not (folder / _OUTCOME_FILE).exists():
        # The last benchmark was interrupted in the middle of this program.
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def read_outcome(folder: Path) -> Outcome | None:
    """Return the outcome that an interrupted benchmark has left in a kept folder, or None."""
    path = folder / _OUTCOME_FILE
    if not path.exists():
        return None
    return Outcome(**json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", type=Path, help="folder of the programs")
    parser.add_argument("--only", nargs="+", default=[], help="names of programs")
    parser.add_argument("--kills", type=int, default=_KILLS, help="kills of each program")
    parser.add_argument(
        "--keep",
        type=Path,
        help="keep the runs in this folder, and continue an interrupted benchmark from it",
    )
    add_options(parser)
    arguments = parser.parse_args()
    options = options_of("unchanged_scripts", arguments)
    kills = _QUICK_KILLS if options.quick else arguments.kills
    programs = read_programs(arguments.programs, arguments.only)
    parameters = {
        "programs": {program.name: program.source for program in programs},
        "changes": {program.name: list(program.changes) for program in programs},
        "kills_each": kills,
        "save_interval_steps": _SAVE_INTERVAL_STEPS,
        "longest_delay_seconds": _LONGEST_DELAY_SECONDS,
        "seed": "the name of the program",
    }
    result = Result(options=options, parameters=parameters)
    outcomes = []
    for program in programs:
        with working_folder(program, arguments.keep) as folder:
            try:
                outcome = read_outcome(folder) or run_program(
                    program, folder, kills, random.Random(program.name)
                )
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                result.notes.append(f"left out: {without_paths(str(error))}")
                print(result.notes[-1], flush=True)
                continue
            except KeyboardInterrupt:
                result.notes.append(f"interrupted before {program.name}")
                break
            (folder / _OUTCOME_FILE).write_text(json.dumps(asdict(outcome)))
        outcomes.append(outcome)
        print(
            f"{outcome.name}: {outcome.verdict} after {len(outcome.kills)} kills"
            f" at {outcome.kills} {outcome.reason}",
            flush=True,
        )
    add_figures(result, outcomes)
    result.write()


def add_figures(result: Result, outcomes: list[Outcome]) -> None:
    """Add the counts of all verdicts, by kill and by program, and the reasons."""
    kill_verdicts: Counter[str] = Counter()
    for outcome in outcomes:
        kill_verdicts[outcome.verdict] += len(outcome.kills)
    # A program that is refused at its first step has not been killed.
    program_verdicts = Counter(outcome.verdict for outcome in outcomes)
    for verdict in VERDICTS:
        expected = 0 if verdict in (FAILED, WRONG) else None
        result.add_count(
            f"kills: {verdict}", kill_verdicts[verdict], kill_verdicts.total(), expected=expected
        )
    for verdict in VERDICTS:
        expected = 0 if verdict in (FAILED, WRONG) else None
        result.add_count(
            f"programs: {verdict}", program_verdicts[verdict], len(outcomes), expected=expected
        )
    for outcome in outcomes:
        result.samples[outcome.name] = {
            "verdict": outcome.verdict,
            "reason": without_paths(outcome.reason, 300),
            "steps_of_killed_attempts": outcome.kills,
            "plain_seconds": round(outcome.plain_seconds, 1),
            "commit": outcome.commit,
        }


if __name__ == "__main__":
    main()
