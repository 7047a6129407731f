"""Find the samples of a batch that cause NaN or Inf, by testing smaller batches.

The search works with lists of sample indices, never with tensors. Its last test confirms the
result: without the samples that it has found, the batch gives no NaN or Inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence


class _TooManyCallsError(Exception):
    """Raised if the search gives up, after too many calls of `is_bad` or only bad answers."""


def find_bad_samples(
    is_bad: Callable[[Sequence[int]], bool],
    size: int,
    hint: Sequence[int] = (),
    most_calls: int = 40,
) -> list[int]:
    """Return the samples to leave out of a bad batch, so that the remaining batch is good.

    If `hint` names a single sample and is correct, one call of `is_bad` is enough. Without a hint,
    finding k bad samples takes about ``2 k log2(size)`` calls. If all smaller batches are bad too,
    the search gives up after ``4 + 2 log2(size)`` calls, because individual samples are then
    unlikely to be the cause.

    Args:
        is_bad: Returns whether a batch of the given samples gives NaN or Inf. It receives at least
            one index, in ascending order.
        size: Number of samples in the batch.
        hint: Indices of the samples that are probably bad.
        most_calls: The search gives up after this many calls of `is_bad`.

    Returns:
        Indices in ascending order. Empty if the search gave up, or if the batch stays bad no matter
        which samples are left out.
    """
    search = _SampleSearch(is_bad, size, most_calls)
    try:
        return search.run(sorted({index for index in hint if 0 <= index < size}))
    except _TooManyCallsError:
        return []


class _SampleSearch:
    """A bisection over the samples of one batch, which remembers all answers of `is_bad`.

    Args:
        is_bad: Returns whether a batch of the given samples gives NaN or Inf.
        size: Number of samples in the batch.
        most_calls: The search gives up after this many calls of `is_bad`.
    """

    def __init__(self, is_bad: Callable[[Sequence[int]], bool], size: int, most_calls: int) -> None:
        self._is_bad = is_bad
        self._all = range(size)
        self._calls_left = most_calls
        self._patience = 4 + 2 * math.ceil(math.log2(max(size, 2)))
        # The answers of `is_bad` so far, keyed by the tested samples. The search is started only
        # for a batch that is bad as a whole, so this answer is known.
        self._answers: dict[tuple[int, ...], bool] = {tuple(self._all): True}

    def run(self, hint: list[int]) -> list[int]:
        """Return the samples to leave out; empty if leaving out samples does not help."""
        if hint and self._is_good_without(hint):
            return self._narrow(hint)
        bad: list[int] = []
        # One round is enough unless some samples are bad only in combination with others.
        while len(bad) < len(self._all):
            more = self._bad_among(self._without(bad), good=[])
            bad = sorted({*bad, *more})
            if self._is_good_without(bad):
                return bad
        return []

    def _narrow(self, hint: list[int]) -> list[int]:
        """Return the bad samples in a hint that contains all of them, but perhaps good ones too."""
        if len(hint) == 1:
            return hint
        bad = sorted(self._bad_among(hint, good=self._without(hint)))
        if self._is_good_without(bad):
            return bad
        return hint

    def _bad_among(self, suspects: list[int], good: list[int]) -> list[int]:
        """Return the bad samples among the suspects.

        Args:
            suspects: Samples that contain at least one bad one.
            good: Samples that together make a good batch. They are added to every tested batch.
        """
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
        """Return whether a batch of these samples is bad. Reuse an earlier answer if there is one.

        Raises:
            _TooManyCallsError: If the search should give up.
        """
        key = tuple(sorted(samples))
        if key not in self._answers:
            every_answer_is_bad = all(self._answers.values())
            is_hopeless = every_answer_is_bad and len(self._answers) > self._patience
            if self._calls_left <= 0 or is_hopeless:
                raise _TooManyCallsError
            self._calls_left -= 1
            self._answers[key] = self._is_bad(list(key))
        return self._answers[key]
