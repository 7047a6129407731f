# ruff: noqa: ARG002 - a single process needs no arguments to answer
"""`OneRank`: the interface through which the guard uses its ranks, for a single process.

`ranks.Ranks` implements it for several ranks. Steps, the loop and saving use only this interface.
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

# The name of the fact that `OneRank.agree` compares first.
PLACE = "epoch and batch"
_T = TypeVar("_T")
_NOTHING = contextlib.nullcontext()


class Saves(Protocol):
    """Decides when the loop saves."""

    def is_due(self) -> bool:
        """Return whether a save is due at this boundary, on all ranks."""
        ...

    def take_refusal(self) -> str | None:
        """Return why a save was refused since the last call, or None."""
        ...


class OneRank:
    """A process that trains alone."""

    rank = 0
    world_size = 1

    # The following attributes are functions that are called in every step. None means that a single
    # process has nothing to do, so that its steps save the call.

    # Returns the loss to run backward from. It is scaled so that the average of the gradients over
    # the ranks is the gradient of the mean over all items.
    weighed: Callable[[Terms], torch.Tensor] = staticmethod(Terms.total)
    # Corrects the gradients by the number of items on all ranks, and returns the rows of all ranks.
    gathered: Callable[[Sequence[torch.Tensor]], Rows] | None = None
    # Starts an attempt, on all ranks together.
    begin: Callable[[], None] | None = None
    # Returns whether the attempt succeeded on all ranks. If not, all of them repeat it.
    accepts: Callable[[StepAttempt], bool] | None = None
    # Returns the plan of the next attempt, given that of this rank. None if each rank uses its own.
    plan: Callable[[StepPlan], StepPlan] | None = None
    # Returns the norms of whole gradients, given those of the shards that this rank holds.
    norms: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None

    # The ranks that write checkpoints; None if another rank writes for this one.
    writers: Writers | None = Writers()
    # Returns this rank's part of the state of all components, for a checkpoint.
    share: Callable[[dict[str, Any]], dict[str, Any]] = staticmethod(lambda trees: trees)
    # Returns a function that takes the component, name and shape of a saved tensor, and returns
    # which of its rows this rank needs. None if every rank needs all of them.
    shares: Callable[[Parts], Callable[[str, str, torch.Size], Share | None]] | None = None
    # Names of the weights and buffers that the wrapper of the model does not broadcast.
    ignored: Sequence[str] = ()

    # Starts reporting an error that ends this process to the other ranks.
    open: Callable[[], None] = staticmethod(lambda: None)
    # Stops that. With ``in_order=True``, waits until no other rank needs this one.
    close: Callable[..., None] = staticmethod(lambda **_: None)
    # Makes optimizers use less memory. It is called on all ranks if one has run out of memory.
    spare_memory: Callable[[], None] = staticmethod(lambda: None)

    # Why an unchanged retry is the only remedy if this rank runs out of memory; None if it may use
    # all remedies.
    why_only_retry: str | None = None

    @property
    def has_parted(self) -> bool:
        """Return whether this rank has left the group, so that the others no longer answer it."""
        return False

    def policy(self, policy: Policy) -> Policy:
        """Return the policy with the features disabled that these ranks do not support.

        Raises:
            PolicyError: H108 for an unsupported feature that was enabled explicitly.
        """
        return policy

    def agreed(
        self, stop: StopRequest, saving: Saving, cursor: Cursor | None
    ) -> tuple[StopRequest, Saves]:
        """Return the stop request that all ranks follow, and the object that decides when to save.

        Args:
            stop: The stop request of this rank.
            saving: Saves the checkpoints of this rank.
            cursor: The position of this rank in its loader.
        """
        return stop, saving

    # --- a step

    def check_terms(self, terms: Terms) -> None:
        """Raise H203 for a loss that cannot be averaged over ranks."""

    def apart(self, *, by_itself: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context for the passes over the parts of a batch; call `shared` after it.

        Args:
            by_itself: Whether only this rank splits its batch, because its memory was short.
        """
        return _NOTHING

    def check_parts(self) -> None:
        """Raise H401 if the parts of a batch contain collectives that other ranks would not match.

        That is so if only this rank splits its batch. Called between two parts.
        """

    def shared(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Reduce the gradients of a batch that was split.

        Args:
            passed: The result of its passes.
            parameters: The parameters with gradients.
            added: Whether all ranks have the same weight, regardless of their items.
        """
        return passed

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank runs the model without the other ranks."""
        return _NOTHING

    def pay(self, found: str, parameters: Sequence[torch.Tensor]) -> None:
        """Complete the collectives that other ranks are waiting for, after an attempt failed here.

        All ranks then attempt the step again.

        Args:
            found: The failure.
            parameters: The parameters of the step.

        Raises:
            OutOfMemoryError: H401 if that is not possible.
        """

    def take_news(self) -> OwnCollectives | None:
        """Return an event to record, if something was noticed since the last call, or None."""
        return None

    def falls_behind(self) -> bool:
        """Note that the optimizer has run out of memory in its step on this rank.

        Returns:
            Whether this rank will receive the state of another rank, which makes up for that.
        """
        return False

    def origin(self, find: Callable[[], Provenance], look: Callable[[], Provenance]) -> Provenance:
        """Find out where NaN or Inf came from, in a step that all ranks have taken back.

        Args:
            find: Replays the step on this rank.
            look: Only checks the batch of this rank.
        """
        return find()

    # --- the loop

    def end_epoch(self) -> RankIsSlow | None:
        """Note that the loader has ended, and return which rank was slow, if one was.

        Raises:
            RankError: H116 if the loader of another rank has not ended.
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
        """Return the state that a checkpoint holds of each rank separately.

        Args:
            own: Returns the state of this rank that is always saved.
            trees: Returns the state that is saved only if it differs between ranks. Only the first
                rank receives that of the others.
            constant: Returns the names of the buffers in `trees` that no step has changed.
            unsaved: Returns the names of the buffers in `trees` that are saved nowhere else. These
                are saved even if they do not differ.

        Returns:
            The state of the ranks, or None with one rank.
        """
        return None

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this rank's own state from a checkpoint, such as its random state."""
        return training

    def keeps_apart(self, name: str) -> bool:
        """Return whether a buffer or a frozen weight may have another value on each rank.

        Args:
            name: Its name in the model, after the name of the model.
        """
        return False

    def chosen(
        self, choose: Callable[[], _T | None], name: Callable[[_T], str], find: Callable[[str], _T]
    ) -> _T | None:
        """Make a choice on the first rank, and return it on all ranks.

        Args:
            choose: Called on the first rank to make the choice.
            name: Returns the name of the choice.
            find: Called on the other ranks to find the object with that name.
        """
        return choose()

    # --- opening and leaving

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Check that facts are the same on all ranks. All ranks must call this.

        Args:
            topic: What is compared, in words.
            facts: Returns the facts of this rank by name.

        Raises:
            RankError: H116 on all ranks if the fact named `PLACE`, the position in the data,
                differs between ranks.
            PolicyError: H115 on all ranks if another fact differs.
        """

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error on one rank is raised on all of them."""
        return _NOTHING

    def in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that the first rank leaves before the others enter it."""
        return _NOTHING

    def leave(self, error: BaseException) -> BaseException | None:
        """Tell the other ranks about an error that leaves the guard.

        Returns:
            The error of another rank that caused this one, or None.
        """
        return None
