"""Find the first collective in which ranks differ, from the dumps of their flight recorders.

All ranks of a process group must call the same collectives in the same order, so the collectives
with the same number are compared, beginning with the oldest number that all dumps still contain.
Everything here is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.explain.flight.dumps import Call, Dump

# How ranks differ in a collective:
#   not entered     some ranks have called it, others have not
#   different       ranks have called different collectives, or with different shapes
#   not completed   all ranks have called it, and it has not completed on all of them
Difference = Literal["not entered", "different", "not completed"]

# Collectives for which the inputs of all ranks must have the same shape.
_EQUAL_SHAPES = frozenset(
    {
        "all_reduce",
        "broadcast",
        "reduce",
        "_all_gather_base",
        "_allgather_base",
        "all_gather_single",
        "_reduce_scatter_base",
        "reduce_scatter_single",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A collective in which the ranks of a process group differ."""

    difference: Difference
    # The number of the collective in its group.
    sequence: int
    # The call of each rank that has entered it, by rank.
    calls: Mapping[int, Call]
    # The ranks that have not entered it, according to their dumps.
    missing: tuple[int, ...] = ()
    # The ranks that differ from the majority; empty if there is none.
    differing: tuple[int, ...] = ()
    # The ranks of the group without a dump.
    without_dump: tuple[int, ...] = ()

    @property
    def any_call(self) -> Call:
        """Return the call of the lowest rank that has entered the collective."""
        return self.calls[min(self.calls)]

    @property
    def began_ns(self) -> int:
        """Return when the first rank entered the collective, in nanoseconds since 1970."""
        return min(call.created_ns for call in self.calls.values())


def find_stall(dumps: Sequence[Dump]) -> Stall | None:
    """Return the collective that explains why the others do not complete, or None.

    If ranks differ in several process groups, a rank may be missing in one only because it waits in
    another. The collective with a missing rank that waits nowhere comes first, then the one that
    was called first.
    """
    stalls = []
    for group, calls in _calls_by_group(dumps).items():
        stall = _find_stall_in_group(
            calls, _members(group, dumps, calls), [dump.rank for dump in dumps]
        )
        if stall is not None:
            stalls.append(stall)
    if not stalls:
        return None
    waiting = {rank for stall in stalls for rank in _waiting_ranks(stall, dumps)}

    def order(stall: Stall) -> tuple[bool, int]:
        is_cause = stall.difference == "different" or bool(set(stall.missing) - waiting)
        return not is_cause, stall.began_ns

    return min(stalls, key=order)


def _waiting_ranks(stall: Stall, dumps: Sequence[Dump]) -> list[int]:
    """Return the ranks that have entered a collective and called no other one after it."""
    newest = {dump.rank: dump.calls[-1] for dump in dumps if dump.calls}
    return [rank for rank, call in stall.calls.items() if newest.get(rank) is call]


# The collectives of one process group: of each rank that has called one, by their numbers.
_GroupCalls = Mapping[int, Mapping[int, Call]]


def _calls_by_group(dumps: Sequence[Dump]) -> dict[str, dict[int, dict[int, Call]]]:
    """Return the collectives by the name of their group, then by rank, then by number.

    Several collectives that are coalesced into one share a number. The first stands for all.
    """
    groups: dict[str, dict[int, dict[int, Call]]] = {}
    for dump in dumps:
        for call in dump.calls:
            numbers = groups.setdefault(call.group, {}).setdefault(dump.rank, {})
            numbers.setdefault(call.sequence, call)
    return groups


def _members(group: str, dumps: Sequence[Dump], calls: _GroupCalls) -> tuple[int, ...]:
    """Return the ranks of a process group.

    Gloo does not record the name of a group, so its only recorded group is taken for the first,
    which has the name ``"0"``. If the ranks are not recorded at all, they are those that have
    called a collective of the group.
    """
    known = [dump.members[group] for dump in dumps if group in dump.members]
    if not known and group == "0":
        known = [dump.members[""] for dump in dumps if "" in dump.members]
    return tuple(sorted(set().union(*known))) if known else tuple(sorted(calls))


def _find_stall_in_group(
    calls: _GroupCalls, members: Sequence[int], ranks_with_dump: Sequence[int]
) -> Stall | None:
    """Return the first collective of a process group in which its ranks differ, or None.

    Args:
        calls: The collectives of the group, by rank and then by number.
        members: The ranks of the group.
        ranks_with_dump: All ranks of which there is a dump.
    """
    with_dump = set(ranks_with_dump)
    present = [rank for rank in members if rank in with_dump]
    without_dump = tuple(rank for rank in members if rank not in with_dump)
    calls = {rank: calls.get(rank, {}) for rank in present}
    newest = {rank: max(calls[rank], default=0) for rank in present}
    for number in _comparable_numbers(calls):
        entered = {rank: calls[rank][number] for rank in present if number in calls[rank]}
        missing = [rank for rank in present if newest[rank] < number]
        stall = _compare(number, entered, missing, without_dump)
        if stall is not None:
            return stall
    return None


def _comparable_numbers(calls: _GroupCalls) -> list[int]:
    """Return the numbers of the collectives that are recent enough to be in all dumps, in order.

    A rank that has called no collective of the group does not count.
    """
    used = [numbers for numbers in calls.values() if numbers]
    oldest = max((min(numbers) for numbers in used), default=0)
    return sorted({number for numbers in used for number in numbers if number >= oldest})


def _compare(
    sequence: int,
    entered: Mapping[int, Call],
    missing: Sequence[int],
    without_dump: tuple[int, ...],
) -> Stall | None:
    """Return how ranks differ in one collective that at least one has entered, or None."""
    difference: Difference
    differing: Sequence[int] = ()
    kinds = {rank: _kind(call) for rank, call in entered.items()}
    if len(set(kinds.values())) > 1:
        difference = "different"
        differing = _minority(kinds)
    elif missing:
        difference = "not entered"
        differing = missing
    elif any(_is_pending(call) for call in entered.values()):
        difference = "not completed"
        pending = [rank for rank, call in entered.items() if _is_pending(call)]
        differing = pending if len(pending) < len(entered) else ()
    else:
        return None
    return Stall(
        difference=difference,
        sequence=sequence,
        calls=entered,
        missing=tuple(missing),
        differing=tuple(differing),
        without_dump=without_dump,
    )


def _kind(call: Call) -> tuple[object, ...]:
    """Return what must be equal on all ranks."""
    if call.name in _EQUAL_SHAPES:
        return call.name, call.sizes, call.dtypes
    return (call.name,)


def _minority(kinds: Mapping[int, tuple[object, ...]]) -> tuple[int, ...]:
    """Return the ranks whose call differs from that of the majority; empty without a majority."""
    (most, count), *_ = Counter(kinds.values()).most_common(1)
    if 2 * count <= len(kinds):
        return ()
    return tuple(rank for rank, kind in kinds.items() if kind != most)


def _is_pending(call: Call) -> bool:
    """Return whether the recorder still waits for a collective to complete."""
    return call.state != "completed" and not call.retired
