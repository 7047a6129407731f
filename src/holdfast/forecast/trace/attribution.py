"""Attribute each operation to the module that runs it and to the line of user code that called it.

In a forward pass, the module and the line are found on the call stack. An operation in a backward
pass is run by an autograd node, and is attributed to the module and line of the forward operation
that created the node. The node's sequence number identifies that forward operation. Recomputed
operations have user code on their own call stack, so they are treated like those of a forward pass.
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
    """Where the code that runs in a stack frame comes from."""

    # The code of torch, holdfast and the standard library.
    PLUMBING = enum.auto()
    USER = enum.auto()
    INSTALLED_PACKAGE = enum.auto()
    # The Python function in torch that enters autograd's engine.
    AUTOGRAD_ENGINE = enum.auto()


_PLUMBING_FOLDERS = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[2]) + os.sep,
    "<frozen ",
    "<eval_with_key>",
)
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGE_FOLDERS = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# Methods of dispatch modes, in any package. They are on the call stack of every operation.
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
    """Return the line of user code that is running, such as ``"model.py:31 in forward"``.

    If user code has called an installed package, the result is the line in that package, followed
    by "from" and the line of user code. The result is empty if no code of either kind is on the
    call stack.
    """
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _user_line(frames)


def line_of(error: BaseException) -> str:
    """Return the line of user code that led to an error, in the format of `running_line`."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _user_line(reversed(frames))


def _user_line(frames: Iterable[tuple[CodeType, int]]) -> str:
    """Return the innermost line of user code, in the format of `running_line`.

    Args:
        frames: The code and line number of each frame, innermost first.
    """
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
    """Assigns numbers to the lines of user code and installed packages that run operations."""

    def __init__(self) -> None:
        # The description of each line, indexed by the line's number. 0 means an unknown line.
        self.texts = [""]
        self._numbers: dict[tuple[CodeType, int], int] = {}
        self._number_of_text = {"": 0}

    def find(self, frame: FrameType | None) -> int:
        """Return the number of the innermost line outside torch, holdfast and the standard library.

        The search ends at the frame that entered autograd's engine: the frames outside it called
        ``backward`` and are unrelated to the operation that the engine runs.

        Returns:
            The line's number, or 0 if there is no such line.
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
    """The module and line that run an operation, as numbers of a `Locator`; 0 means unknown."""

    module: int
    line: int


class Locator:
    """Finds the module and the line of user code that run each operation in a step."""

    def __init__(self) -> None:
        # The path of each module, indexed by the module's number. 0 means no module.
        self.modules = [""]
        self.lines = UserLines()
        # References that keep the modules alive, so that no other object gets an id that is in
        # `_number_of`.
        self._models: list[nn.Module] = []
        # The number of each module, keyed by the module's id.
        self._number_of: dict[int, int] = {}
        # The id and number of each module whose forward pass is running, outermost first.
        self._running: list[tuple[int, int]] = []
        # The location of each forward operation, keyed by the sequence number of its autograd node.
        self._by_sequence: dict[int, Location] = {}
        # The location of the last autograd node whose sequence number was found in `_by_sequence`.
        self._last = Location(0, 0)

    @property
    def in_module(self) -> bool:
        """Whether the forward pass of a module is running."""
        return bool(self._running)

    def name_modules(self, models: Mapping[str, nn.Module]) -> None:
        """Assign a number to each module of the models. A shared module keeps its first path."""
        for name, model in models.items():
            self._models.append(model)
            for path, module in model.named_modules():
                if id(module) not in self._number_of:
                    self._number_of[id(module)] = len(self.modules)
                    self.modules.append(".".join(part for part in (name, path) if part))

    def number_of(self, module: nn.Module) -> int:
        """Return a module's number, or 0 if `name_modules` has not assigned one."""
        return self._number_of.get(id(module), 0)

    def enter(self, module: nn.Module) -> None:
        """Record that a module's forward pass begins.

        A module without a number is treated as part of the module that called it.
        """
        caller = self._running_module()
        self._running.append((id(module), self._number_of.get(id(module), caller)))

    def leave(self, module: nn.Module) -> None:
        """Record that the forward passes of a module and of all modules it called have ended."""
        for position in reversed(range(len(self._running))):
            if self._running[position][0] == id(module):
                del self._running[position:]
                return

    def forget(self) -> None:
        """Forget running modules and recorded locations before a new step."""
        self._running.clear()
        self._by_sequence.clear()

    def locate(self, frame: FrameType | None, *, in_backward: bool, records: bool) -> Location:
        """Return the location of the operation that is being dispatched.

        Args:
            frame: The frame that dispatches the operation.
            in_backward: Whether autograd's engine is running.
            records: Whether autograd records the operation. In a backward pass, autograd records
                operations only during recomputation and under ``create_graph=True``.
        """
        line = self.lines.find(frame)
        is_recomputed = records and self.in_module
        if not in_backward or is_recomputed:
            location = Location(self._running_module(), line)
            # Autograd creates the node right before it dispatches the operation. The newest
            # sequence number therefore belongs to this operation.
            sequence = torch._C._autograd._get_sequence_nr() - 1
            self._by_sequence.setdefault(sequence, location)
            return location
        node = torch._C._current_autograd_node()
        if node is not None:
            self._last = self._by_sequence.get(node._sequence_nr(), self._last)
        return Location(self._last.module, line or self._last.line)

    def _running_module(self) -> int:
        return self._running[-1][1] if self._running else 0
