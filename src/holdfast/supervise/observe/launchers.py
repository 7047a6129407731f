"""Which command lines are those of a program that starts the ranks of a training.

It imports nothing heavy, since observed processes ask too.
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
_OF_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
_LOOKED_AT = 4  # words: `uv run torchrun`, `env A=1 torchrun`
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def find_launcher_name(argv: Sequence[str]) -> str | None:
    """Return the launcher that a command line (with the program's own word first) runs, or None."""
    for index, word in enumerate(argv[:_LOOKED_AT]):
        name = _base(word)
        if name in _PROGRAMS:
            return None if name == "accelerate" and "launch" not in argv[index + 1 :] else name
        if _PYTHON.match(name):
            return _of_python(argv[index + 1 :])
    return None


def leave_signals_to_ranks() -> None:
    """Ignore in this process, a launcher, the signals that only its ranks can use, unless it
    handles them.

    Slurm sends ``--signal=USR1@60`` to all processes of a step. torchrun would end of it, and take
    the ranks with it while they save.
    """
    for number in _OF_RANKS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def _of_python(words: Sequence[str]) -> str | None:
    """Return the launcher that Python runs with these arguments."""
    rest = iter(words)
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, None)
        elif word.startswith("-m"):
            module = word[2:] or next(rest, "")
            return module if module.startswith(_MODULES) else None
        elif word in ("-c", "-"):
            return None
        elif not word.startswith("-"):
            name = _base(word)
            return (
                name if name in _PROGRAMS and (name != "accelerate" or "launch" in words) else None
            )
    return None


def _base(word: str) -> str:
    return word.rpartition("/")[2]
