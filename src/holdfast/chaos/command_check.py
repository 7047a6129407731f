"""Refuse a command that cannot be tested, and suggest a fix."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.chaos.judgement import describe_status
from holdfast.chaos.trials import ObservedAttempt
from holdfast.chaos.workplace import Workplace
from holdfast.core.errors import PolicyError

# A fault needs some steps before it and some after it.
MIN_STEPS = 4
# The most characters shown of the end of the output.
OUTPUT_CHARACTERS = 400
# The most paths shown.
MAX_PATHS = 3
# The system's own folders, which many libraries write to.
SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
# Parts of paths of temporary folders of multiprocessing, and of Python's caches.
PASSING_PATHS = ("/pymp-", "/__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCase:
    """An undisturbed attempt of the command.

    Args:
        attempt: The observed attempt.
        workplace: Where it ran.
        out_of_time: Whether the time budget of the campaign is spent.
    """

    attempt: ObservedAttempt
    workplace: Workplace
    out_of_time: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a command is refused, as the rest of a sentence that begins with "the command"."""

    reason: str
    fix: str


Rule: TypeAlias = Callable[[CommandCase], Refusal | None]


def check_command(attempt: ObservedAttempt, workplace: Workplace, *, out_of_time: bool) -> None:
    """Refuse a command that cannot be tested.

    Args:
        attempt: An undisturbed attempt.
        workplace: Where it ran.
        out_of_time: Whether the time budget of the campaign is spent.

    Raises:
        PolicyError: H729 with the first reason in `RULES`.
    """
    case = CommandCase(attempt=attempt, workplace=workplace, out_of_time=out_of_time)
    for rule in RULES:
        refusal = rule(case)
        if refusal is not None:
            raise PolicyError(
                f"the command {refusal.reason}",
                limit="it must train without further input, and in the same way each time",
                fix=refusal.fix,
                rule="H729",
            )


def takes_too_long(case: CommandCase) -> Refusal | None:
    """The budget was spent before the command ended."""
    if not (case.attempt.hung and case.out_of_time):
        return None
    fix = "give a larger --budget, or make the command train for fewer steps."
    return Refusal("did not end within the time budget", fix)


def hangs(case: CommandCase) -> Refusal | None:
    """The command made no progress."""
    if not case.attempt.hung:
        return None
    return Refusal("hangs", "run it under `holdfast run`, which reports where it hangs.")


def fails(case: CommandCase) -> Refusal | None:
    """The command ended with an error."""
    if case.attempt.status == 0:
        return None
    status = describe_status(case.attempt.status)
    output = case.attempt.output.strip()[-OUTPUT_CHARACTERS:]
    return Refusal(f"fails even without a fault, with {status}: {output}", "correct that first.")


def makes_no_step(case: CommandCase) -> Refusal | None:
    """No step of a torch optimizer was observed."""
    if case.attempt.most_steps > 0:
        return None
    fix = (
        "name the command that trains. Not observed are `python -I`, `-E` and `-S`, CUDA graphs,"
        " and scripts that update weights without an optimizer. If the working directory holds a"
        " finished run that the command resumes, start without that run."
    )
    return Refusal("did not step any torch optimizer", fix)


def makes_too_few_steps(case: CommandCase) -> Refusal | None:
    """There are too few steps to disturb one and continue after it."""
    if case.attempt.most_steps >= MIN_STEPS:
        return None
    fix = "let it train for more steps, with some saves among them."
    return Refusal(f"made fewer than {MIN_STEPS} steps", fix)


def writes_elsewhere(case: CommandCase) -> Refusal | None:
    """Files written outside of the copy would still exist in the next trial."""
    paths = [
        event.facts["path"]
        for event in case.attempt.events("outside")
        if not _is_ignored(event.facts["path"], case.workplace)
    ]
    if not paths:
        return None
    fix = (
        "name these paths with --writes, so that each trial starts without them, or let the command"
        " write into the working directory."
    )
    reason = f"writes outside of the working directory: {', '.join(paths[:MAX_PATHS])}"
    return Refusal(reason, fix)


RULES: tuple[Rule, ...] = (
    takes_too_long,
    hangs,
    fails,
    makes_no_step,
    makes_too_few_steps,
    writes_elsewhere,
)


def _is_ignored(path: str, workplace: Workplace) -> bool:
    """Return whether a path belongs to the system or a cache rather than to the script."""
    if any(part in path for part in PASSING_PATHS):
        return True
    # Caches in the home directory have names with a dot. `pathlib` raises where there is no home.
    hidden_in_home = os.path.expanduser("~/.")  # noqa: PTH111
    return path.startswith((*SYSTEM_FOLDERS, str(workplace.scratch), hidden_in_home))
