"""Recognise the command lines of programs that launch the ranks of a run, such as torchrun.

This module imports nothing heavy, since every observed process uses it.
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
# How many words at the beginning of a command line may name the program: `uv run torchrun`, `env
# A=1 torchrun`.
_MAX_PREFIX_WORDS = 4
# Options of Python that are followed by a value.
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Signals that only the ranks can use.
_RANK_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def find_launcher_name(argv: Sequence[str]) -> str | None:
    """Return the launcher that a command line runs, or None.

    Args:
        argv: The command line, the program first.
    """
    for index, word in enumerate(argv[:_MAX_PREFIX_WORDS]):
        name = _base_name(word)
        if name in _PROGRAMS:
            return name if _is_launching(name, argv[index + 1 :]) else None
        if _PYTHON.match(name):
            return _launcher_in_python(argv[index + 1 :])
    return None


def _launcher_in_python(words: Sequence[str]) -> str | None:
    """Return the launcher that Python runs with these arguments, or None."""
    remaining = iter(words)
    for word in remaining:
        if word in _OPTIONS_WITH_VALUE:
            next(remaining, None)
        elif word.startswith("-m"):
            module = word.removeprefix("-m") or next(remaining, "")
            return module if module.startswith(_MODULES) else None
        elif word in ("-c", "-"):
            return None
        elif not word.startswith("-"):
            name = _base_name(word)
            return name if name in _PROGRAMS and _is_launching(name, words) else None
    return None


def _is_launching(program: str, words: Sequence[str]) -> bool:
    """Return whether a program launches ranks; `accelerate` also has other commands."""
    return program != "accelerate" or "launch" in words


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


def leave_signals_to_ranks() -> None:
    """In a launcher, ignore the signals that only its ranks can use, unless it handles them.

    With ``--signal=USR1@60``, Slurm sends SIGUSR1 to all processes of a job step. torchrun would
    die of it and kill the ranks while they are saving.
    """
    for number in _RANK_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
