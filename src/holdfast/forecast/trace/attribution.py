"""Where an operation belongs: the module that runs it, and the line of the user's that led to it.

In a forward pass both are on the stack. In a backward pass they are those of the forward operation
whose node runs, found by the sequence number that autograd gave that node; a recomputation has a
stack of its own again.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

_SKIPPED, _USERS, _INSTALLED, _ENGINE = range(4)
_OURS = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[2]) + os.sep)
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_MODES = ("__torch_dispatch__", "__torch_function__")  # anybody's, around what is running


@functools.cache
def _kind_of(code: CodeType) -> int:
    file = code.co_filename
    if code.co_name == "_engine_run_backward":
        return _ENGINE
    if file.startswith((*_OURS, "<frozen ", "<eval_with_key>")) or code.co_name in _MODES:
        return _SKIPPED
    if any(part in file for part in _PACKAGES):
        return _INSTALLED
    return _SKIPPED if file.startswith(_STANDARD) else _USERS


def _place(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"


def _line_among(frames: Iterable[tuple[CodeType, int]]) -> str:
    """Return the user's own line among frames, the innermost first, and where in a package it
    led; maybe empty.
    """
    installed = ""
    for code, line in frames:
        kind = _kind_of(code)
        if kind == _INSTALLED:
            installed = installed or _place(code, line)
        elif kind == _USERS:
            return f"{installed}, from {_place(code, line)}" if installed else _place(code, line)
    return installed


def running_line() -> str:
    """Return the user's line that is running, ``"model.py:31 in forward"``, and where in a
    package it led; or "".
    """
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _line_among(frames)


def line_of(error: BaseException) -> str:
    """Return the user's line that led to an error, and where in a package it led.

    Or an empty string.
    """
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _line_among(reversed(frames))


class UserLines:
    """Numbers for lines of the user's.

    Of the innermost frame outside torch, holdfast and the standard library.
    """

    def __init__(self) -> None:
        self.texts = [""]
        self._numbers: dict[tuple[CodeType, int], int] = {}
        self._by_text = {"": 0}

    def find(self, frame: FrameType | None) -> int:
        """Return the number of the line that led here.

        0 if none did on this side of autograd's engine.
        """
        while frame is not None:
            kind = _kind_of(frame.f_code)
            if kind in (_USERS, _INSTALLED):
                place = (frame.f_code, frame.f_lineno)
                number = self._numbers.get(place)
                return self._add(*place) if number is None else number
            if kind == _ENGINE:
                return 0
            frame = frame.f_back
        return 0

    def _add(self, code: CodeType, line: int) -> int:
        text = _place(code, line)
        number = self._by_text.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        self._numbers[code, line] = number
        return number


class Places:
    """The module and the line of each operation."""

    def __init__(self) -> None:
        self.modules = [""]
        self.lines = UserLines()
        self._models: list[nn.Module] = []  # keeps the ids below from being used again
        self._number_of: dict[int, int] = {}
        self._running: list[tuple[int, int]] = []
        self._by_sequence: dict[int, tuple[int, int]] = {}
        self._last = (0, 0)

    @property
    def in_module(self) -> bool:
        """Return whether a module is running."""
        return bool(self._running)

    def name_modules(self, models: Mapping[str, nn.Module]) -> None:
        """Give every module its path; one that is shared keeps the first."""
        for name, model in models.items():
            self._models.append(model)
            for path, module in model.named_modules():
                if id(module) not in self._number_of:
                    self._number_of[id(module)] = len(self.modules)
                    self.modules.append(".".join(part for part in (name, path) if part))

    def number_of(self, module: nn.Module) -> int:
        """Return the number of a module's path; 0 if it has none."""
        return self._number_of.get(id(module), 0)

    def enter(self, module: nn.Module) -> None:
        """Note that a module begins its forward pass; one without a path goes by its caller's."""
        above = self._running[-1][1] if self._running else 0
        self._running.append((id(module), self._number_of.get(id(module), above)))

    def leave(self, module: nn.Module) -> None:
        """Note that it ends, with whatever it called and an exception has ended."""
        if any(number == id(module) for number, _ in self._running):
            while self._running.pop()[0] != id(module):
                pass

    def forget(self) -> None:
        """Begin anew, as between two steps."""
        self._running.clear()
        self._by_sequence.clear()

    def here(self, frame: FrameType | None, *, in_backward: bool, records: bool) -> tuple[int, int]:
        """Return the numbers of the module and the line of the operation that was just dispatched.

        Autograd `records` it: in a backward pass, a recomputation or a graph of gradients.
        """
        line = self.lines.find(frame)
        module = self._running[-1][1] if self._running else 0
        if not in_backward or (records and self._running):
            # The node is made right before its operation is dispatched, so the first to see a
            # number is its own.
            self._by_sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, (module, line))
            return module, line
        node = torch._C._current_autograd_node()
        self._last = (
            self._last if node is None else self._by_sequence.get(node._sequence_nr(), self._last)
        )
        return self._last[0], line or self._last[1]
