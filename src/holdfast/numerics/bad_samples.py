"""Find the samples of a batch that make its step non-finite, by testing smaller batches.

The search only handles lists of indices, not tensors. Its last test proves the result: without
these samples, the step is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence


class _TooManyCallsError(Exception):
    """The search gives up."""


def find_bad_samples(
    is_bad: Callable[[Sequence[int]], bool],
    size: int,
    hint: Sequence[int] = (),
    most_calls: int = 40,
) -> list[int]:
    """Return the samples without which a bad batch is good, in ascending order.

    With a correct hint, this takes one call of `is_bad`. Without one, finding k bad samples takes
    about ``2 k log2(size)`` calls. If no smaller batch is good at all, the search gives up after
    ``4 + 2 log2(size)`` calls, because the samples are then hardly to blame.

    Args:
        is_bad: Returns whether a batch of exactly these samples (indices in ascending order, at
            least one) gives NaN or Inf.
        size: Samples in the batch.
        hint: Samples that are probably bad.
        most_calls: Calls of `is_bad` after which the search gives up.

    Returns:
        An empty list if the search gave up, or if the batch stays bad no matter which samples are
        left out.
    """
    search = _SampleSearch(is_bad, size, most_calls)
    try:
        return search.run(sorted({index for index in hint if 0 <= index < size}))
    except _TooManyCallsError:
        return []


class _SampleSearch:
    """One search, with the answers so far."""

    def __init__(self, is_bad: Callable[[Sequence[int]], bool], size: int, most_calls: int) -> None:
        self._is_bad = is_bad
        self._all = range(size)
        self._calls_left = most_calls
        self._patience = 4 + 2 * math.ceil(math.log2(max(size, 2)))
        # The answers so far. The whole batch is known to be bad: that is why the search was
        # started.
        self._answers: dict[tuple[int, ...], bool] = {tuple(self._all): True}

    def run(self, hint: list[int]) -> list[int]:
        """Return the samples to leave out, or an empty list."""
        if hint and self._is_good_without(hint):
            return self._narrow(hint)
        bad: list[int] = []
        # A second round is needed only if samples are bad only in combination.
        while len(bad) < len(self._all):
            more = self._bad_among(self._without(bad), good=[])
            bad = sorted({*bad, *more})
            if self._is_good_without(bad):
                return bad
        return []

    def _narrow(self, hint: list[int]) -> list[int]:
        """Return the bad samples among those of a hint that contains all of them."""
        if len(hint) == 1:
            return hint
        bad = sorted(self._bad_among(hint, good=self._without(hint)))
        if self._is_good_without(bad):
            return bad
        return hint

    def _bad_among(self, suspects: list[int], good: list[int]) -> list[int]:
        """Return the bad samples among suspects that make a batch of good samples bad."""
        if len(suspects) == 1:
            return suspects
        middle = len(suspects) // 2
        first = suspects[:middle]
        second = suspects[middle:]
        if not self._ask(first + good):
            return self._bad_among(second, good + first)
        if not self._ask(second + good):
            return self._bad_among(first, good + second)
        bad = self._bad_among(first, good)
        good_of_first = [index for index in first if index not in bad]
        return bad + self._bad_among(second, good + good_of_first)

    def _without(self, left_out: Iterable[int]) -> list[int]:
        excluded = set(left_out)
        return [index for index in self._all if index not in excluded]

    def _is_good_without(self, left_out: list[int]) -> bool:
        remaining = self._without(left_out)
        return bool(remaining) and not self._ask(remaining)

    def _ask(self, samples: list[int]) -> bool:
        """Return whether a batch of these samples is bad."""
        key = tuple(sorted(samples))
        if key not in self._answers:
            every_answer_is_bad = all(self._answers.values())
            is_hopeless = every_answer_is_bad and len(self._answers) > self._patience
            if self._calls_left <= 0 or is_hopeless:
                raise _TooManyCallsError
            self._calls_left -= 1
            self._answers[key] = self._is_bad(list(key))
        return self._answers[key]
