"""Recognize the command line of a launcher, a program such as torchrun that starts ranks.

This module must be quick to import, because every observed process uses it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

_PROGRAMS = frozenset({"torchrun", "accelerate", "accelerate-launch", "deepspeed"})
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed.launcher",
)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*\Z")
# Number of leading words of a command line that are checked for a launcher, which may follow other
# words, as in `uv run torchrun` and `env A=1 torchrun`.
_MAX_PREFIX_WORDS = 4
# Python options whose value is the next word.
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Signals that are meant only for the ranks.
_RANK_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def is_launcher(argv: Sequence[str]) -> bool:
    """Return whether a command line, including the program's name, runs a launcher."""
    for index, word in enumerate(argv[:_MAX_PREFIX_WORDS]):
        name = word.rpartition("/")[2]
        if name in _PROGRAMS:
            return _is_launching(name, argv[index + 1 :])
        if _PYTHON.match(name):
            return _runs_launcher_in_python(argv[index + 1 :])
    return False


def _runs_launcher_in_python(words: Sequence[str]) -> bool:
    """Return whether Python with these arguments runs a launcher."""
    remaining = iter(words)
    for word in remaining:
        if word in _OPTIONS_WITH_VALUE:
            next(remaining, None)
        elif word.startswith("-m"):
            module = word.removeprefix("-m") or next(remaining, "")
            return module.startswith(_MODULES)
        elif word in ("-c", "-"):
            return False
        elif not word.startswith("-"):
            name = word.rpartition("/")[2]
            return name in _PROGRAMS and _is_launching(name, words)
    return False


def _is_launching(program: str, words: Sequence[str]) -> bool:
    """Return whether a program launches ranks; `accelerate` does so only with ``launch``."""
    return program != "accelerate" or "launch" in words


def leave_signals_to_ranks() -> None:
    """In a launcher, ignore the signals that are meant for its ranks, unless it handles them.

    With ``--signal=USR1@60``, Slurm sends SIGUSR1 to every process of a job step. The signal would
    kill torchrun, which would then kill its ranks while they are saving.
    """
    for number in _RANK_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
