"""Count the collectives that the loss and the model start, for example to gather embeddings.

The backends of a process group number their collectives. The increase in these numbers during an
attempt, minus the collectives started by the guard and by the model's wrapper, is the number of
collectives that the user's code has started, on any group and through any API. This approach does
not patch torch, and in a normal step it only reads a few integers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, final

from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.numerics.provenance import NeedsOtherRanksError

# The namespaces of torch operators that need other ranks to take part.
_NAMESPACES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}


@final
class Collectives:
    """Counts the collectives that the loss or the model starts on this rank in an attempt.

    Collectives are counted separately for each process group, and the counts are keyed by the
    group's name. Any thread may read them at any time.
    """

    def __init__(self) -> None:
        self._at_begin: Counter[str] = Counter()
        self._excluded: Counter[str] = Counter()
        self._count_when_frozen: Counter[str] | None = None

    def begin(self) -> None:
        """Start counting from 0, at the beginning of an attempt."""
        self._count_when_frozen = None
        self._excluded = Counter()
        self._at_begin = sequence_numbers()

    def exclude_next(self, group: Any) -> None:
        """Exclude the next collective on a group from the count.

        Call this before the collective starts. Otherwise, a thread that reads the count in between
        would include the collective.
        """
        self._excluded[group.group_name] += 1

    def freeze(self) -> None:
        """Freeze the count that `started` returns.

        After this point, the user's collectives cannot be distinguished from those of torch.
        """
        if self._count_when_frozen is None:
            self._count_when_frozen = self._count()

    def started(self) -> Counter[str]:
        """Return how many collectives the user's code started on each group, up to `freeze`."""
        count = self._count()
        # Read the frozen count last. If another thread has frozen the count in the meantime, the
        # count above may include later collectives.
        when_frozen = self._count_when_frozen
        return count if when_frozen is None else when_frozen

    def started_since_frozen(self) -> Counter[str]:
        """Return how many collectives were started on each group after the count was frozen.

        Collectives announced by `exclude_next` are not counted.
        """
        assert self._count_when_frozen is not None
        return self._count() - self._count_when_frozen

    def _count(self) -> Counter[str]:
        # Return how many collectives this attempt has started on each group, minus excluded ones.
        #
        # The guard calls `exclude_next` before it starts a collective. Because the numbers are read
        # before `_excluded`, all of the guard's collectives in these numbers are in `_excluded` as
        # well.
        total = sequence_numbers()
        return total - self._at_begin - self._excluded


def sequence_numbers() -> Counter[str]:
    """Return how many collectives this process has started on each group, by the group's name."""
    groups = list(distributed_c10d._world.pg_names.items())
    return Counter({name: _number(group) for group, name in groups})


def groups_shared_with(rank: int) -> set[str]:
    """Return the names of the process groups that include both this process and `rank`."""
    groups = list(distributed_c10d._world.pg_names.items())
    return {
        name for group, name in groups if rank in distributed_c10d.get_process_group_ranks(group)
    }


def _number(group: Any) -> int:
    """Return how many collectives were started on a group, summed over its backends."""
    total = 0
    # Some backends do not number their collectives.
    with contextlib.suppress(RuntimeError):
        for backend in {group._get_backend(device) for device in group._device_types}:
            total += backend._get_sequence_number_for_group()
    return total


@final
class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that raises `NeedsOtherRanksError` for an operator that needs other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            raise NeedsOtherRanksError(str(func), tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))
