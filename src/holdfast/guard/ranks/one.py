# ruff: noqa: ARG002 - nobody has to be asked, so what would be said is not looked at
"""What the guard asks of its ranks, answered for one process: nobody has to be asked.

`ranks.Ranks` answers for several. Steps, the loop and saving know only these methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from holdfast.checkpoint.saver import Writers
from holdfast.checkpoint.tensor_files import Share
from holdfast.core.events.run_events import OwnCollectives, RankIsSlow
from holdfast.core.policy.policy import Policy
from holdfast.guard.cursor import Cursor
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.own_tensors import Kinds
from holdfast.guard.ranks.row import Rows
from holdfast.guard.result import PassResult, Provenance, StepAttempt
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest
from holdfast.memory.ladder import StepPlan
from holdfast.numerics.loss import Terms

PLACE = "epoch and batch"  # the name of the fact, see `OneRank.agree`
_T = TypeVar("_T")
_NOTHING = contextlib.nullcontext()


class Saves(Protocol):
    """When the loop saves."""

    def is_due(self) -> bool:
        """Return whether all save at this boundary."""
        ...

    def take_refusal(self) -> str | None:
        """Return why a save was refused since this was last asked, or None."""
        ...


class OneRank:
    """A process that trains alone."""

    rank = 0
    world_size = 1
    # Chosen once and not asked in each step: what one process does by itself is called as if there
    # were no ranks.
    weighed: Callable[[Terms], torch.Tensor] = staticmethod(Terms.total)
    """Returns the loss to run backward from: all ranks' gradients then add up by their items."""
    gathered: Callable[[Sequence[torch.Tensor]], Rows] | None = None
    """Corrects the gradients by the items of all ranks and returns what they said."""
    begin: Callable[[], None] | None = None
    """Begins an attempt, on all ranks."""
    accepts: Callable[[StepAttempt], bool] | None = None
    """Says whether all ranks have made an attempt; False: one could not, and all begin anew."""
    plan: Callable[[StepPlan], StepPlan] | None = None
    """Returns the plan of the next attempt of a step, given that of this rank; None: each has its
    own."""
    norms: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    """Returns the norms of whole gradients, of those of the shards that each rank holds."""
    writers: Writers | None = Writers()
    """Who writes checkpoints; None: another rank does."""
    share: Callable[[dict[str, Any]], dict[str, Any]] = staticmethod(lambda trees: trees)
    """Returns what this rank saves of the state of all components."""
    shares: Callable[[Parts], Callable[[str, str, torch.Size], Share | None]] | None = None
    """Returns what says which rows of a saved tensor are for this rank, of component, name and
    shape."""
    ignored: Sequence[str] = ()
    """Names of weights and buffers that the wrapper of the model sends to no other rank."""
    open: Callable[[], None] = staticmethod(lambda: None)
    """From now on, tells the others of an error that ends this process."""
    close: Callable[..., None] = staticmethod(lambda **_: None)
    """Tells them no more; in order, waits until nobody needs this rank."""
    spare_memory: Callable[[], None] = staticmethod(lambda: None)
    """Lets optimizers need less memory, called on all ranks where one has run out of it."""

    why_only_retry: str | None = None
    """Why this rank, if its memory is short, may do no more than make the same attempt again; None:
    it may."""

    @property
    def has_parted(self) -> bool:
        """Return whether the others do not wait for this rank any more, and need not answer it."""
        return False

    def policy(self, policy: Policy) -> Policy:
        """Return the policy as far as it can be kept.

        Raise H108 for what was asked for and cannot.
        """
        return policy

    def agreed(
        self, stop: StopRequest, saving: Saving, cursor: Cursor | None
    ) -> tuple[StopRequest, Saves]:
        """Return what all ranks follow, given what this one is asked for and what it would save."""
        return stop, saving

    # --- a step

    def check_terms(self, terms: Terms) -> None:
        """Raise H203 for a loss of which ranks cannot make one mean."""

    def apart(self, *, by_itself: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the parts of a batch are run; `shared` follows.

        `by_itself`: this rank cuts its batch since its memory was short, and not because the policy
        says so.
        """
        return _NOTHING

    def check_parts(self) -> None:
        """Raise H401 between the parts of a batch if they talk to ranks that may make fewer
        parts.
        """

    def shared(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Reduce the gradients of a batch that was run in parts.

        They count by its items, or alike if `added`.
        """
        return passed

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank tries something out by itself."""
        return _NOTHING

    def pay(self, found: str, parameters: Sequence[torch.Tensor]) -> None:
        """Begin what other ranks still wait for, and let all begin anew; H401 if that cannot be."""

    def take_news(self) -> OwnCollectives | None:
        """Return what this rank has noticed in a step since this was last asked, or None."""
        return None

    def falls_behind(self) -> bool:
        """Note that the optimizer has failed half-way.

        Return whether the state of another rank will be taken.
        """
        return False

    def origin(self, find: Callable[[], Provenance], look: Callable[[], Provenance]) -> Provenance:
        """Find out where NaN or Inf of a step that all have taken back came from.

        `find` makes the step again on this rank, and `look` only looks at its batch.
        """
        return find()

    # --- the loop

    def end_epoch(self) -> RankIsSlow | None:
        """Return which rank was slow.

        Raise H116 if the loader of one has ended and that of another has not.
        """
        return None

    # --- saving

    def states(
        self,
        own: Callable[[], Mapping[str, Any]],
        trees: Callable[[], Kinds],
        constant: Callable[[], Iterable[str]],
        unsaved: Callable[[], Iterable[str]],
    ) -> dict[str, Any] | None:
        """Return what a checkpoint holds of each rank, besides what is the same on all.

        None if there is one.

        Args:
            own: Returns what is kept of each rank in any case.
            trees: Returns what is kept where it differs between ranks; only the first rank gets
                that of the others.
            constant: Returns the names of the buffers among these that no step has changed.
            unsaved: Returns the names of buffers that are saved nowhere else; those among these are
                kept in any case.
        """
        return None

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a checkpoint holds of this rank.

        Its random state and what else may differ between ranks.
        """
        return training

    def keeps_apart(self, name: str) -> bool:
        """Return whether a buffer, or a frozen weight, of this name may have a value of its own on
        each rank.

        The name is that in the model, with the name of the model in front.
        """
        return False

    def chosen(
        self, choose: Callable[[], _T | None], name: Callable[[_T], str], find: Callable[[str], _T]
    ) -> _T | None:
        """Return what one rank chooses; the others find it by its name."""
        return choose()

    # --- opening and leaving

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Raise H115 on all ranks if a fact differs between them, H116 if it is their `PLACE` in
        the data.
        """

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error on one rank ends all of them."""
        return _NOTHING

    def in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that the first rank passes before the others enter it."""
        return _NOTHING

    def leave(self, error: BaseException) -> BaseException | None:
        """Tell the others of an error that leaves the guard.

        Return that of another rank, if that is behind it.
        """
        return None
