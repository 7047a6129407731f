"""Attribute an operation to the module that runs it and to the line of user code that led to it.

In a forward pass both are on the stack. In a backward pass they are those of the forward operation
whose autograd node runs, found by the sequence number that autograd gave to that node. A
recomputation has its own stack again.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import nn


class _CodeOwner(enum.Enum):
    """The owner of the code that a frame runs."""

    # torch, holdfast and the standard library.
    PLUMBING = enum.auto()
    USER = enum.auto()
    INSTALLED_PACKAGE = enum.auto()
    # torch's Python function that enters autograd's engine.
    AUTOGRAD_ENGINE = enum.auto()


_PLUMBING_FOLDERS = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[2]) + os.sep,
    "<frozen ",
    "<eval_with_key>",
)
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGE_FOLDERS = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# Methods of dispatch modes, from any source: they surround every operation.
_DISPATCH_METHODS = ("__torch_dispatch__", "__torch_function__")


@functools.cache
def _owner_of(code: CodeType) -> _CodeOwner:
    file = code.co_filename
    if code.co_name == "_engine_run_backward":
        return _CodeOwner.AUTOGRAD_ENGINE
    if file.startswith(_PLUMBING_FOLDERS) or code.co_name in _DISPATCH_METHODS:
        return _CodeOwner.PLUMBING
    if any(folder in file for folder in _PACKAGE_FOLDERS):
        return _CodeOwner.INSTALLED_PACKAGE
    if file.startswith(_STANDARD_LIBRARY):
        return _CodeOwner.PLUMBING
    return _CodeOwner.USER


def _describe_line(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"


def running_line() -> str:
    """Return the user's line that is running, such as ``"model.py:31 in forward"``.

    If it called into an installed package, the package's line comes first, and the user's follows
    after "from". Empty if neither user code nor a package is running.
    """
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _user_line(frames)


def line_of(error: BaseException) -> str:
    """Return the user's line that led to an error, in the form of `running_line`."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _user_line(reversed(frames))


def _user_line(frames: Iterable[tuple[CodeType, int]]) -> str:
    """Return the user's line among frames with their lines, the innermost frame first."""
    package_line = ""
    for code, line in frames:
        owner = _owner_of(code)
        if owner is _CodeOwner.INSTALLED_PACKAGE and not package_line:
            package_line = _describe_line(code, line)
        if owner is _CodeOwner.USER:
            user_line = _describe_line(code, line)
            return f"{package_line}, from {user_line}" if package_line else user_line
    return package_line


class UserLines:
    """Numbers of code lines outside torch, holdfast and the standard library."""

    def __init__(self) -> None:
        # The lines by number. Number 0 stands for an unknown line.
        self.texts = [""]
        self._numbers: dict[tuple[CodeType, int], int] = {}
        self._number_of_text = {"": 0}

    def find(self, frame: FrameType | None) -> int:
        """Return the number of the innermost such line; 0 if there is none.

        Frames beyond autograd's engine are ignored: they called backward, and are unrelated to the
        operation that runs in it.
        """
        while frame is not None:
            owner = _owner_of(frame.f_code)
            if owner is _CodeOwner.AUTOGRAD_ENGINE:
                return 0
            if owner is not _CodeOwner.PLUMBING:
                return self._number(frame.f_code, frame.f_lineno)
            frame = frame.f_back
        return 0

    def _number(self, code: CodeType, line: int) -> int:
        number = self._numbers.get((code, line))
        if number is None:
            text = _describe_line(code, line)
            number = self._number_of_text.setdefault(text, len(self.texts))
            if number == len(self.texts):
                self.texts.append(text)
            self._numbers[code, line] = number
        return number


class Location(NamedTuple):
    """Where an operation belongs: numbers of its module and line, 0 if unknown."""

    module: int
    line: int


class Locator:
    """Find the location of each operation."""

    def __init__(self) -> None:
        # The paths of modules by number. Number 0 stands for no module.
        self.modules = [""]
        self.lines = UserLines()
        # Keeps the modules alive, so that their ids in `_number_of` are not used again.
        self._models: list[nn.Module] = []
        self._number_of: dict[int, int] = {}
        # Id and number of each module whose forward pass runs, the outermost first.
        self._running: list[tuple[int, int]] = []
        self._by_sequence: dict[int, Location] = {}
        self._last = Location(0, 0)

    @property
    def in_module(self) -> bool:
        """Whether the forward pass of a module is running."""
        return bool(self._running)

    def name_modules(self, models: Mapping[str, nn.Module]) -> None:
        """Give every module its path. A shared module keeps its first path."""
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
        """Note that the forward pass of a module begins. Without a path it has its caller's."""
        caller = self._running_module()
        self._running.append((id(module), self._number_of.get(id(module), caller)))

    def leave(self, module: nn.Module) -> None:
        """Note the end of a module's forward pass, and of inner ones that an error ended."""
        for position in reversed(range(len(self._running))):
            if self._running[position][0] == id(module):
                del self._running[position:]
                return

    def forget(self) -> None:
        """Forget what runs, as between two steps."""
        self._running.clear()
        self._by_sequence.clear()

    def locate(self, frame: FrameType | None, *, in_backward: bool, records: bool) -> Location:
        """Return the location of the operation that was just dispatched.

        Args:
            frame: The frame that dispatched it.
            in_backward: Whether autograd's engine runs.
            records: Whether autograd records the operation. In a backward pass this is True in a
                recomputation, and if the graph of the gradients is kept.
        """
        line = self.lines.find(frame)
        is_recomputed = records and self.in_module
        if not in_backward or is_recomputed:
            location = Location(self._running_module(), line)
            # The node is created right before its operation is dispatched, so a new sequence number
            # belongs to the operation that is being dispatched.
            sequence = torch._C._autograd._get_sequence_nr() - 1
            self._by_sequence.setdefault(sequence, location)
            return location
        node = torch._C._current_autograd_node()
        if node is not None:
            self._last = self._by_sequence.get(node._sequence_nr(), self._last)
        return Location(self._last.module, line or self._last.line)

    def _running_module(self) -> int:
        return self._running[-1][1] if self._running else 0
