# ruff: noqa: ARG002 - nobody has to be asked, so what would be said is not looked at
"""What the guard asks of its ranks, answered for one process: nobody has to be asked.

`ranks.Ranks` answers for several. Steps, the loop and saving know only these methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from holdfast.core.policy.policy import Policy
from holdfast.guard.ranks.row import Rows
from holdfast.guard.result import Provenance
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest
from holdfast.numerics.loss import Terms

_T = TypeVar("_T")
_NOTHING = contextlib.nullcontext()


class OneRank:
    """A process that trains alone."""

    rank = 0
    world_size = 1

    @property
    def has_left(self) -> bool:
        """Return whether an error has ended the work with the other ranks."""
        return False

    def policy(self, policy: Policy) -> Policy:
        """Return the policy as far as it can be kept; raise H108 for what was asked for and cannot."""
        return policy

    def serve(self, stop: StopRequest, saving: Saving) -> None:
        """Take note of what this rank speaks for in each step."""

    # --- a step ---------------------------------------------------------------------------------------------

    def weighed(self, terms: Terms) -> torch.Tensor:
        """Return the loss to run backward from: all ranks' gradients then add up by their items."""
        return terms.total()

    def gathered(self, parameters: Sequence[torch.Tensor]) -> Rows | None:
        """Correct the gradients by the items of all ranks and return what they said; None if there is one."""
        return None

    def check_undivided(self) -> None:
        """Raise H108 if a batch may not be run in parts."""

    def check_retry(self, found: str) -> None:
        """Raise H401 if an attempt that ran out of memory may not be made again."""

    def origin(self, find: Callable[[], Provenance]) -> Provenance:
        """Find out where NaN or Inf of a step that all have taken back came from."""
        return find()

    # --- the loop -------------------------------------------------------------------------------------------

    def stop_reason(self, stop: StopRequest) -> str | None:
        """Return why all end at this boundary, or None."""
        return stop.reason

    def is_signalled(self, stop: StopRequest) -> bool:
        """Return whether all end at this boundary because of a signal."""
        return stop.by_signal

    def interruptible(self, stop: StopRequest) -> contextlib.AbstractContextManager[None]:
        """Return the context of a wait that a signal may interrupt."""
        return stop

    def end_epoch(self) -> None:
        """Raise H116 on all ranks if the loader of one has ended and that of another has not."""

    # --- saving ---------------------------------------------------------------------------------------------

    def is_save_due(self, saving: Saving) -> bool:
        """Return whether all save at this boundary."""
        return saving.is_due

    def refusal(self, saving: Saving) -> str | None:
        """Return why a save was refused, once and to all, or None."""
        return saving.take_refusal()

    def states(self, own: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return what a checkpoint holds of each rank, besides what is the same on all; None if there is one."""
        return None

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a checkpoint holds of this rank: its random state and, where that differs, its position."""
        return training

    def chosen(
        self, choose: Callable[[], _T | None], name: Callable[[_T], str], find: Callable[[str], _T]
    ) -> _T | None:
        """Return what one rank chooses; the others find it by its name."""
        return choose()

    # --- opening and leaving --------------------------------------------------------------------------------

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Raise H115 on all ranks if a fact differs between them."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error on one rank ends all of them."""
        return _NOTHING

    def in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that the first rank passes before the others enter it."""
        return _NOTHING

    def leave(self, error: BaseException) -> BaseException | None:
        """Tell the others of an error that leaves the guard; return that of another rank, if that is behind it."""
        return None

    def close(self) -> None:
        """Wait until nobody needs this rank any more."""
