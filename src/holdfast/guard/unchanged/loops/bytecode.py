"""Questions about the ``for`` statement that is running in a frame, answered from its bytecode.

Python offers no other way to find out from inside an iterator whether a ``for`` statement requests
the next value, and what happens when that statement ends.
"""

from __future__ import annotations

import dis
import itertools
import sys
from functools import lru_cache
from types import CodeType, FrameType

_FOR_ITER = dis.opmap["FOR_ITER"]
# The instruction of ``yield from`` that requests the next value.
_SEND = dis.opmap["SEND"]
# The instruction after END_FOR that removes the iterator from the stack. Python 3.12 has none.
_DROPS_AFTER_END_FOR: tuple[str, ...] = ()
if sys.version_info >= (3, 13):
    _DROPS_AFTER_END_FOR = ("POP_TOP", "POP_ITER")
# Instructions without an effect of their own.
_NO_OPERATION = frozenset({"NOP", "CACHE", "EXTENDED_ARG", "PRECALL"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
# Instructions that assign the value of an iterator to the targets of a ``for`` statement.
_STORES = frozenset({"STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF"})
_UNPACKS = frozenset({"UNPACK_SEQUENCE", "UNPACK_EX"})
# Python 3.13 and later combine two instructions into one.
_COMBINED_STORES = frozenset({"STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST"})
# Instructions that add a value to a list, set or dict that is on the stack. In a comprehension, the
# iterator is on the stack too, so the container is at least two entries below the value.
_APPENDS = frozenset({"LIST_APPEND", "SET_ADD", "MAP_ADD"})
_LEAST_DEPTH_IN_COMPREHENSION = 2
# The number of instructions after which two pieces of code are no longer compared.
_MOST_COMPARED = 30


class _Code:
    """The instructions of a code object. `at` contains them by their offset in bytes."""

    def __init__(self, code: CodeType) -> None:
        instructions = list(dis.get_instructions(code))
        self.at = {instruction.offset: instruction for instruction in instructions}
        offsets = [instruction.offset for instruction in instructions]
        self._next = dict(itertools.pairwise(offsets))

    def after(self, offset: int) -> int | None:
        """Return the offset of the instruction after the one at `offset`, or None at the end."""
        return self._next.get(offset)

    def settle(self, offset: int | None) -> int | None:
        """Return the offset of the first instruction with an effect that is reached from `offset`.

        Unconditional jumps are followed. In a loop of jumps, the result is any offset in it.
        """
        visited: set[int] = set()
        while offset is not None and offset in self.at and offset not in visited:
            visited.add(offset)
            instruction = self.at[offset]
            if instruction.opname in _JUMPS:
                offset = int(instruction.argval)
            elif instruction.opname in _NO_OPERATION:
                offset = self.after(offset)
            else:
                return offset
        return offset


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> _Code:
    return _Code(code)


def is_requested_by_for(frame: FrameType) -> bool:
    """Return whether a ``for`` statement or a comprehension in a frame requests a value."""
    offset = frame.f_lasti
    return offset >= 0 and frame.f_code.co_code[offset] == _FOR_ITER


def is_requested_by_yield_from(frame: FrameType) -> bool:
    """Return whether a ``yield from`` in a generator requests a value."""
    offset = frame.f_lasti
    return offset >= 0 and frame.f_code.co_code[offset] == _SEND


def is_comprehension(code: CodeType, offset: int) -> bool:
    """Return whether a ``FOR_ITER`` instruction belongs to a comprehension.

    A comprehension collects its values on the stack, where they can be neither saved nor restored.
    """
    if code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
        return True
    # Since Python 3.12, comprehensions are compiled into the function that contains them. One is
    # recognized by an instruction that adds to its container. Those in the body of an inner loop
    # are skipped, because they belong to that loop.
    instructions = _instructions(code)
    end = int(instructions.at[offset].argval)
    inner_end = offset
    position = instructions.after(offset)
    while position is not None and position < end:
        instruction = instructions.at[position]
        if position >= inner_end:
            if instruction.opname == "FOR_ITER":
                inner_end = int(instruction.argval)
            elif (
                instruction.opname in _APPENDS
                and (instruction.arg or 0) >= _LEAST_DEPTH_IN_COMPREHENSION
            ):
                return True
        position = instructions.after(position)
    return False


def targets_of_loop(code: CodeType, offset: int) -> frozenset[str]:
    """Return the names to which a ``for`` statement assigns its values.

    Args:
        code: The code of the frame.
        offset: The offset of the ``FOR_ITER`` instruction.
    """
    instructions = _instructions(code)
    names: set[str] = set()
    position = instructions.after(offset)
    while position is not None:
        instruction = instructions.at[position]
        if instruction.opname in _STORES:
            names.add(str(instruction.argval))
        elif instruction.opname in _COMBINED_STORES:
            names.add(str(instruction.argval[0]))
            if instruction.opname == "STORE_FAST_STORE_FAST":
                names.add(str(instruction.argval[1]))
            else:
                break
        elif instruction.opname not in _UNPACKS and instruction.opname not in _NO_OPERATION:
            break
        position = instructions.after(position)
    return frozenset(names)


def targets_of_enclosing_loops(code: CodeType, offset: int) -> frozenset[str]:
    """Return the targets of all ``for`` statements that are running at an offset of a function.

    Args:
        code: The code of the function.
        offset: The offset of the current instruction.
    """
    names: set[str] = set()
    for position, instruction in _instructions(code).at.items():
        if instruction.opname == "FOR_ITER" and position < offset < int(instruction.argval):
            names |= targets_of_loop(code, position)
    return frozenset(names)


def leaves_like_an_exhausted_loop(code: CodeType, loop_offset: int, current_offset: int) -> bool:
    """Return whether the code after a loop is the code that follows when its iterator is exhausted.

    This is the case after a plain ``break``, and when a wrapper such as ``itertools.islice`` ends.
    It is not the case if the script leaves the loop by ``return`` with a value or by an exception,
    or by a ``break`` that skips the ``else`` clause of the loop.

    Args:
        code: The code of the frame.
        loop_offset: The offset of the loop's ``FOR_ITER`` instruction.
        current_offset: The offset of the instruction that has freed the iterator.
    """
    if current_offset == loop_offset:
        return True
    instructions = _instructions(code)
    if instructions.at[current_offset].opname not in ("POP_TOP", "POP_ITER"):
        return False
    after_break = instructions.settle(instructions.after(current_offset))
    return _continue_alike(instructions, after_break, _after_exhaustion(instructions, loop_offset))


def _after_exhaustion(instructions: _Code, loop_offset: int) -> int | None:
    """Return the offset at which the code continues after the iterator of a loop is exhausted."""
    offset: int | None = int(instructions.at[loop_offset].argval)
    # Python 3.12 ends a loop with END_FOR, 3.13 with END_FOR and POP_TOP, 3.14 with END_FOR and
    # POP_ITER. Python 3.11 has no such instruction.
    if offset is not None and instructions.at[offset].opname == "END_FOR":
        offset = instructions.after(offset)
        if offset is not None and instructions.at[offset].opname in _DROPS_AFTER_END_FOR:
            offset = instructions.after(offset)
    return instructions.settle(offset)


def _continue_alike(instructions: _Code, first: int | None, second: int | None) -> bool:
    """Return whether two offsets lead to the same code, or to copies of it that end in a return.

    The compiler copies short code at the end of a function to each place that jumps there.
    """
    for _ in range(_MOST_COMPARED):
        if first == second:
            return True
        if first is None or second is None:
            return False
        instruction = instructions.at[first]
        other = instructions.at[second]
        if (instruction.opname, instruction.argval) != (other.opname, other.argval):
            return False
        if instruction.opname in _RETURNS:
            return True
        first = instructions.settle(instructions.after(first))
        second = instructions.settle(instructions.after(second))
    return False
