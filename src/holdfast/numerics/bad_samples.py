"""Which samples of a batch make its step non-finite: a search over smaller batches.

Pure: it asks a question about index lists and knows nothing of tensors. What it returns is proved
by its last question: without these samples the step is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


class _TooManyCallsError(Exception):
    """The search gives up."""


def find_bad_samples(
    is_bad: Callable[[Sequence[int]], bool],
    size: int,
    hint: Sequence[int] = (),
    most_calls: int = 40,
) -> list[int]:
    """Return the samples without which a bad batch is good, in rising order.

    None if it is bad whatever is left out.

    `is_bad` says whether a batch of exactly these samples (indices in rising order, never none)
    gives NaN or Inf. A right hint costs one call of it; without one, k bad samples cost about ``2 k
    log2(size)``. If no smaller batch is good at all, the search gives up after ``4 + 2 log2(size)``
    calls, since then samples are hardly to blame.
    """
    search = _Search(is_bad, size, most_calls)
    try:
        return search.run(sorted({index for index in hint if 0 <= index < size}))
    except _TooManyCallsError:
        return []


class _Search:
    def __init__(self, is_bad: Callable[[Sequence[int]], bool], size: int, most_calls: int) -> None:
        self._is_bad = is_bad
        self._size = size
        self._left = most_calls
        self._patience = 4 + 2 * math.ceil(math.log2(max(size, 2)))
        self._known: dict[tuple[int, ...], bool] = {tuple(range(size)): True}

    def run(self, hint: list[int]) -> list[int]:
        everything = list(range(self._size))
        if hint and self._good_without(hint):
            if len(hint) == 1:
                return hint
            found = sorted(
                self._bad_among(hint, [index for index in everything if index not in hint])
            )
            return found if self._good_without(found) else hint
        found = []
        while len(found) < self._size:  # a second round only if samples are bad in company alone
            found = sorted(
                {*found, *self._bad_among([i for i in everything if i not in found], [])}
            )
            if self._good_without(found):
                return found
        return []

    def _bad_among(self, suspects: list[int], good: list[int]) -> list[int]:
        """Return bad samples of a set that is bad together with samples that are good."""
        if len(suspects) == 1:
            return suspects
        first, second = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        if not self._bad(first + good):
            return self._bad_among(second, good + first)
        if not self._bad(second + good):
            return self._bad_among(first, good + second)
        found = self._bad_among(first, good)
        return found + self._bad_among(
            second, good + [index for index in first if index not in found]
        )

    def _good_without(self, left_out: list[int]) -> bool:
        kept = [index for index in range(self._size) if index not in left_out]
        return bool(kept) and not self._bad(kept)

    def _bad(self, chosen: list[int]) -> bool:
        key = tuple(sorted(chosen))
        if key not in self._known:
            hopeless = all(self._known.values()) and len(self._known) > self._patience
            if self._left <= 0 or hopeless:
                raise _TooManyCallsError
            self._left -= 1
            self._known[key] = self._is_bad(list(key))
        return self._known[key]
