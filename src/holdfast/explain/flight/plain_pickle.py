"""Read a pickle that holds only plain values, without the module ``pickle``.

Torch's flight recorder writes its dumps as pickles. A pickle is a program for a small stack
machine, and only a few of its instructions can import or call something. This reader does not know
these instructions: it builds dictionaries, lists, tuples, texts, numbers, booleans and None, and
refuses everything else. Reading a file therefore runs no code that the file brings along.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

# The values that a mark separates from those before it.
_Stack = list[Any]
# Integers in a dump have at most 8 bytes. A longer one would take long to convert to text.
_MAX_INTEGER_BYTES = 16
# Each instruction takes up to 64 bytes of memory. A dump of 20,000 collectives has 5,000,000.
_MAX_INSTRUCTIONS = 8_000_000

_UINT16 = struct.Struct("<H")
_INT32 = struct.Struct("<i")
_UINT32 = struct.Struct("<I")
_FLOAT64 = struct.Struct(">d")


class NotPlainError(ValueError):
    """The data is not a pickle, is damaged, or holds something other than plain values."""


def read_plain_pickle(data: bytes) -> Any:
    """Return the value in a pickle.

    The keys of dictionaries are texts or numbers. Lists may contain themselves, so the caller must
    not follow them to an unlimited depth.

    Raises:
        NotPlainError: If the data is not a pickle of plain values.
    """
    machine = _Machine(data)
    try:
        return machine.run()
    except NotPlainError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise NotPlainError(f"damaged at byte {machine.position}: {error!r}") from error


class _Machine:
    """Executes the instructions of a pickle.

    The names of the instructions are those of the module ``pickletools``.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0
        self._stack: _Stack = []
        # The stacks that were in use when a mark was set, innermost last.
        self._marked: list[_Stack] = []
        self._memo: dict[int, Any] = {}
        self._instructions: dict[int, Callable[[], None]] = {
            ord("N"): lambda: self._stack.append(None),
            0x88: lambda: self._stack.append(True),
            0x89: lambda: self._stack.append(False),
            ord("K"): lambda: self._stack.append(self._byte()),
            ord("M"): lambda: self._stack.append(self._number(_UINT16)),
            ord("J"): lambda: self._stack.append(self._number(_INT32)),
            ord("G"): lambda: self._stack.append(self._number(_FLOAT64)),
            0x8A: self._push_long,
            ord("X"): lambda: self._push_text(self._number(_UINT32)),
            0x8C: lambda: self._push_text(self._byte()),
            ord("}"): lambda: self._stack.append({}),
            ord("]"): lambda: self._stack.append([]),
            ord(")"): lambda: self._stack.append(()),
            ord("("): self._mark,
            ord("t"): lambda: self._stack.append(tuple(self._pop_to_mark())),
            0x85: lambda: self._push_tuple(1),
            0x86: lambda: self._push_tuple(2),
            0x87: lambda: self._push_tuple(3),
            ord("a"): self._append,
            ord("e"): self._append_all,
            ord("s"): self._set_item,
            ord("u"): self._set_items,
            ord("q"): lambda: self._memorize(self._byte()),
            ord("r"): lambda: self._memorize(self._number(_UINT32)),
            0x94: lambda: self._memorize(len(self._memo)),
            ord("h"): lambda: self._stack.append(self._memo[self._byte()]),
            ord("j"): lambda: self._stack.append(self._memo[self._number(_UINT32)]),
            0x80: lambda: self._skip(1),  # PROTO
            0x95: lambda: self._skip(8),  # FRAME
        }

    def run(self) -> Any:
        """Execute all instructions, and return the value that remains on the stack."""
        data = self._data
        instructions = self._instructions
        stop = ord(".")
        for _ in range(_MAX_INSTRUCTIONS):
            instruction = data[self.position]
            self.position += 1
            if instruction == stop:
                return self._result()
            if instruction not in instructions:
                raise NotPlainError(f"instruction {instruction:#x} is not allowed")
            instructions[instruction]()
        raise NotPlainError(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")

    def _result(self) -> Any:
        if len(self._stack) != 1 or self._marked:
            raise NotPlainError("it does not hold exactly one value")
        return self._stack[0]

    # --- arguments ---

    def _take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self.position + count
        if end > len(self._data):
            raise NotPlainError("it is truncated")
        data = self._data[self.position : end]
        self.position = end
        return data

    def _byte(self) -> int:
        value = self._data[self.position]
        self.position += 1
        return value

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _skip(self, count: int) -> None:
        self._take(count)

    # --- values ---

    def _push_long(self) -> None:
        count = self._byte()
        if count > _MAX_INTEGER_BYTES:
            raise NotPlainError(f"it holds an integer of {count} bytes")
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def _push_text(self, count: int) -> None:
        self._stack.append(self._take(count).decode("utf-8", "replace"))

    def _push_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise NotPlainError("a tuple is longer than the stack")
        values = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(values)

    def _memorize(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    # --- containers ---

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_to_mark(self) -> list[Any]:
        """Return the values since the last mark, and continue with the stack before it."""
        values = self._stack
        self._stack = self._marked.pop()
        return values

    def _append(self) -> None:
        value = self._stack.pop()
        _checked(self._stack[-1], list).append(value)

    def _append_all(self) -> None:
        values = self._pop_to_mark()
        _checked(self._stack[-1], list).extend(values)

    def _set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        _checked(self._stack[-1], dict)[_checked_key(key)] = value

    def _set_items(self) -> None:
        values = self._pop_to_mark()
        keys = map(_checked_key, values[::2])
        _checked(self._stack[-1], dict).update(zip(keys, values[1::2], strict=True))


def _checked_key(key: Any) -> Any:
    """Return a key of a dictionary.

    Computing the hash of a deeply nested tuple would overflow the interpreter's own stack.

    Raises:
        NotPlainError: If the key is neither a text nor a number.
    """
    if type(key) not in (str, int):
        raise NotPlainError(f"a {type(key).__name__} is the key of a dictionary")
    return key


def _checked(container: Any, kind: type) -> Any:
    """Return a container.

    Raises:
        NotPlainError: If it is of another type.
    """
    if type(container) is not kind:
        raise NotPlainError(f"a {type(container).__name__} is used as a {kind.__name__}")
    return container
