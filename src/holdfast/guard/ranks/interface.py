"""`Ranks`: the interface through which the guard uses its ranks.

Steps, the loop and saving use nothing else of this package. `SingleProcess` implements it for a
process that trains alone, `DdpRanks` for a model in DistributedDataParallel, and `FsdpRanks` for a
model under ``fully_shard``. What a method means for the run is documented here; the docstrings of
the implementations say what they do for it.
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
from holdfast.guard.ranks.differing_state import EntriesByKind
from holdfast.guard.result import PassResult, Provenance, StepAttempt
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest
from holdfast.memory.ladder import StepPlan
from holdfast.numerics.gradients import GradientFacts, Group
from holdfast.numerics.loss import Terms

# The name of the fact that `Ranks.agree` compares first.
PLACE = "epoch and batch"
_T = TypeVar("_T")


class Saves(Protocol):
    """Decides when the loop saves."""

    def is_due(self) -> bool:
        """Return whether a save is due at this boundary, on all ranks."""
        ...

    def take_refusal(self) -> str | None:
        """Return why a save was refused since the last call, or None."""
        ...


class Ranks(Protocol):
    """The ranks of a run, seen from one of them.

    Unless a method says otherwise, all ranks call it at the same point in the program.
    """

    @property
    def rank(self) -> int:
        """Return the number of this rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        ...

    @property
    def has_left_group(self) -> bool:
        """Return whether this rank has left the group, so that the others no longer answer it."""
        ...

    @property
    def why_only_retry(self) -> str | None:
        """Return why an unchanged retry is the only remedy if this rank runs out of memory.

        None if it may use all remedies.
        """
        ...

    @property
    def writers(self) -> Writers | None:
        """Return the ranks that write checkpoints; None if another rank writes for this one."""
        ...

    @property
    def ignored(self) -> Sequence[str]:
        """Return the names of weights and buffers that the model's wrapper does not broadcast."""
        ...

    # --- opening and leaving

    def supported_policy(self, policy: Policy) -> Policy:
        """Return the policy with the features disabled that these ranks do not support.

        Raises:
            PolicyError: H108 for an unsupported feature that was enabled explicitly.
        """
        ...

    def connect(
        self, stop: StopRequest, saving: Saving, cursor: Cursor | None
    ) -> tuple[StopRequest, Saves]:
        """Prepare the exchange of stop requests, saves and positions, before the first step.

        Args:
            stop: The stop request of this rank.
            saving: Saves the checkpoints of this rank.
            cursor: The position of this rank in its loader; None without a loader.

        Returns:
            The stop request that all ranks follow, and the object that decides when to save.
        """
        ...

    def open(self) -> None:
        """Start reporting an error that ends this process to the other ranks."""
        ...

    def close(self, *, in_order: bool) -> None:
        """Stop reporting errors to the other ranks.

        Args:
            in_order: Whether to wait until no other rank needs this one. False if the loop is left
                by ``break`` or by an error.
        """
        ...

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Check that facts are the same on all ranks. This also waits for all of them.

        Args:
            topic: What is compared, in words.
            facts: Returns the facts of this rank by name.

        Raises:
            RankError: H116 on all ranks if the fact named `PLACE`, the position in the data,
                differs between ranks.
            PolicyError: H115 on all ranks if another fact differs.
        """
        ...

    def choose_on_first(
        self,
        choose: Callable[[], _T | None],
        name_of: Callable[[_T], str],
        find: Callable[[str], _T],
    ) -> _T | None:
        """Make a choice on the first rank, and return it on all ranks.

        Args:
            choose: Called on the first rank to make the choice.
            name_of: Returns the name of the choice.
            find: Called on the other ranks to find the object with that name.
        """
        ...

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error on one rank is raised on all of them."""
        ...

    def in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that the first rank leaves before the others enter it."""
        ...

    def announce_failure(self, error: BaseException) -> BaseException | None:
        """Tell the other ranks about an error that leaves the guard. One rank alone calls this.

        Returns:
            The error of another rank that caused this one, or None.
        """
        ...

    # --- a step

    def begin_attempt(self) -> None:
        """Start an attempt at a step, together with the other ranks."""
        ...

    def weighted_loss(self, terms: Terms) -> torch.Tensor:
        """Return the loss to run backward from, shape ``()``.

        It is scaled so that the average of the gradients over the ranks is the gradient of the mean
        over the items of all ranks.
        """
        ...

    def check_terms(self, terms: Terms) -> None:
        """Raise H203 for a loss that cannot be averaged over ranks. One rank alone calls this."""
        ...

    def combine(self, passed: PassResult, parameters: Sequence[torch.Tensor]) -> PassResult:
        """Correct the gradients by the items of all ranks, and return the result over all ranks.

        Args:
            passed: The result of the passes on this rank.
            parameters: The parameters of the step.

        Returns:
            The mean loss over the items of all ranks and the number of these items; everything else
            is that of this rank.
        """
        ...

    def inspect_gradients(
        self, groups: Sequence[Group], loss: torch.Tensor, items: torch.Tensor | None
    ) -> tuple[GradientFacts, torch.Tensor]:
        """Measure the gradients of a step; see `holdfast.numerics.gradients.inspect`.

        If gradients are sharded, the norms are those of the whole gradients.
        """
        ...

    def accepts(self, attempt: StepAttempt) -> bool:
        """Return whether an attempt succeeded on all ranks. If not, all of them repeat it."""
        ...

    def complete_collectives(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """Complete the collectives that other ranks are waiting for, after an attempt failed here.

        All ranks then attempt the step again. Only the ranks that failed call this; the others
        learn about the failure in `accepts`.

        Args:
            failure: The failure, in words.
            parameters: The parameters of the step, whose gradients are cleared.

        Raises:
            OutOfMemoryError: H401 if that is not possible.
        """
        ...

    def plan_of_next_attempt(self, plan: StepPlan) -> StepPlan:
        """Return the plan with which this rank repeats an attempt.

        Args:
            plan: The plan that the memory ladder of this rank has chosen.
        """
        ...

    def take_event(self) -> OwnCollectives | None:
        """Return an event to record, if something was noticed since the last call, or None."""
        ...

    def request_optimizer_state(self) -> bool:
        """Ask for weights and moments of another rank. One rank alone calls this.

        Called if the optimizer of this rank has run out of memory in the middle of its step.

        Returns:
            Whether this rank will receive them, which makes up for that.

        Raises:
            OutOfMemoryError: H402 if no other rank holds the same weights.
        """
        ...

    def find_origin(
        self, replay: Callable[[], Provenance], check_batch: Callable[[], Provenance]
    ) -> Provenance:
        """Find out where NaN or Inf came from, in a step that all ranks have taken back.

        Args:
            replay: Replays the step on this rank.
            check_batch: Only checks the batch of this rank.
        """
        ...

    # --- a batch that is split, or a model that one rank runs alone

    def no_sync(self, *, only_this_rank: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context for the passes over the parts of a batch, in which nothing is reduced.

        Call `reduce_gradients` after it. One rank alone may call both.

        Args:
            only_this_rank: Whether only this rank splits its batch, because its memory was short.
        """
        ...

    def check_parts(self) -> None:
        """Raise H401 if the parts of a batch contain collectives that other ranks would not match.

        That is so if only this rank splits its batch. It calls this between two parts.
        """
        ...

    def reduce_gradients(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Reduce the gradients of a batch that was split, and return the result of its passes.

        Args:
            passed: The result of its passes.
            parameters: The parameters with gradients.
            added: Whether all ranks have the same weight, regardless of their items.
        """
        ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank runs the model without the other ranks."""
        ...

    # --- the loop and saving

    def end_epoch(self) -> RankIsSlow | None:
        """Record that the loader has ended, and return which rank was slow, if one was.

        Raises:
            RankError: H116 if the loader of another rank has not ended.
        """
        ...

    def gather_states(
        self,
        own: Callable[[], Mapping[str, Any]],
        trees: Callable[[], EntriesByKind],
        constant: Callable[[], Iterable[str]],
        unsaved: Callable[[], Iterable[str]],
    ) -> dict[str, Any] | None:
        """Return the state that a checkpoint holds for each rank separately.

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
        ...

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this rank's own state from a checkpoint, such as its random state."""
        ...

    def may_differ(self, name: str) -> bool:
        """Return whether a buffer or a frozen weight may have another value on each rank.

        Args:
            name: Its name in the model, after the name of the model.
        """
        ...

    def part_to_save(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the state of all components, for a checkpoint."""
        ...

    def rows_to_load(self, parts: Parts) -> Callable[[str, str, torch.Size], Share | None]:
        """Return a function that says which rows of a saved tensor this rank needs.

        The function takes the component, the name and the shape of the tensor, and returns None for
        a tensor of which this rank needs all rows.
        """
        ...

    @property
    def shards_state(self) -> bool:
        """Return whether each rank holds a part of the weights and moments that no other has."""
        ...
