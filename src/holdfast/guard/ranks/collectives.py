"""Collectives that a loss or a model begins by itself, such as the gather of a contrastive loss.

Every backend of a process group numbers its collectives. Whatever a number grows by during an attempt, less what the
guard and the wrapper of the model begin there, was begun by the user's code: in whatever way it was called, on any
group, in any step. Nothing is patched for that, and an undisturbed step reads a few integers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.numerics.provenance import NeedsOtherRanksError

# Operators of torch that other ranks have to take part in.
_NAMESPACES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}


class Collectives:
    """Counts the collectives of one rank's attempt that the loss or the model has begun, for each process group."""

    def __init__(self) -> None:
        self._at_begin: Counter[str] = Counter()
        self._foreseen: Counter[str] = Counter()
        self._settled: Counter[str] | None = None

    def begin(self) -> None:
        """Begin to count, with an attempt."""
        self._settled = None
        self._foreseen = Counter()
        self._at_begin = numbers()

    def foresee(self, group: Any) -> None:
        """Leave one collective on a group out of the count.

        Call this before it is begun, since a thread may count at any time.
        """
        self._foreseen[group.group_name] += 1

    def settle(self) -> None:
        """Let the count stay as it is now: what follows cannot be told apart from what torch begins."""
        if self._settled is None:
            self._settled = self._count()

    def begun(self) -> Counter[str]:
        """Return how many were begun until the count was settled, by the name of the group. For any thread."""
        live = self._count()
        # Asked for afterwards: if it was settled while the numbers were read, they may hold what came later.
        settled = self._settled
        return live if settled is None else settled

    def begun_since_settled(self) -> Counter[str]:
        """Return how many were begun on each group after the count was settled, besides what was foreseen."""
        assert self._settled is not None
        return self._count() - self._settled

    def _count(self) -> Counter[str]:
        # In this order: what is begun between the two was foreseen before.
        now = numbers()
        return now - self._at_begin - self._foreseen


def numbers() -> Counter[str]:
    """Return how many collectives this process has begun on each of its groups, by the name of the group."""
    groups = list(distributed_c10d._world.pg_names.items())
    return Counter({name: _number(group) for group, name in groups})


def shared_with(rank: int) -> set[str]:
    """Return the names of the groups of this process that another rank is in as well."""
    groups = list(distributed_c10d._world.pg_names.items())
    return {name for group, name in groups if rank in distributed_c10d.get_process_group_ranks(group)}


def _number(group: Any) -> int:
    """Return how many collectives were begun on a group, which may have another backend for each kind of device."""
    total = 0
    with contextlib.suppress(RuntimeError):  # a backend that does not count
        for backend in {group._get_backend(device) for device in group._device_types}:
            total += backend._get_sequence_number_for_group()
    return total


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `NeedsOtherRanksError` for what other ranks would have to take part in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            raise NeedsOtherRanksError(str(func), tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))
