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


def is_launcher(argv: Sequence[str]) -> bool:
    """Return whether a command line runs a launcher; its first word is the program."""
    for index, word in enumerate(argv[:_MAX_PREFIX_WORDS]):
        name = _base_name(word)
        if name in _PROGRAMS:
            return _is_launching(name, argv[index + 1 :])
        if _PYTHON.match(name):
            return _runs_launcher_in_python(argv[index + 1 :])
    return False


def _runs_launcher_in_python(words: Sequence[str]) -> bool:
    """Return whether Python runs a launcher with these arguments."""
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
            name = _base_name(word)
            return name in _PROGRAMS and _is_launching(name, words)
    return False


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
