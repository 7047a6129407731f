"""`Ranks`: the interface through which the guard works with the ranks of a run.

The code for steps, the loop and saving uses only this interface. `SingleProcess` implements the
interface for a process that trains alone, `DdpRanks` for a model in DistributedDataParallel, and
`FsdpRanks` for a model under ``fully_shard``. The purpose of each method is documented here. The
docstrings in these classes describe how a method fulfills its purpose.
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

# The name of the fact that holds the position in the data. `Ranks.agree` raises H116 if it differs.
PLACE = "epoch and batch"
_T = TypeVar("_T")


class Saves(Protocol):
    """Decides when the loop saves."""

    def is_due(self) -> bool:
        """Return whether all ranks must save at this step boundary."""
        ...

    def take_due(self) -> bool:
        """Return whether all ranks must save now.

        If so, the caller must save, or remember that it has postponed the save: with several ranks,
        further calls at this step boundary return False.
        """
        ...

    def take_refusal(self) -> str | None:
        """Return why a save has been refused since the last call, or None."""
        ...


class Ranks(Protocol):
    """The ranks of a run, from the perspective of one rank.

    All ranks must call a method at the same point in the program, unless its docstring says
    otherwise. A single rank may read any property.

    The guard calls these methods in an attempt at a step: `begin_attempt`, `weighted_loss` before
    backward, `combine` and `inspect_gradients` after it, and then `accepts` or, if the attempt has
    failed on this rank, `complete_collectives`. A step that is decided late uses other methods
    after backward; see the section about it below.
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
    def has_group(self) -> bool:
        """Return whether this process belongs to a process group, which may have only one rank."""
        ...

    @property
    def has_left_group(self) -> bool:
        """Return whether this rank has left the group, so that other ranks no longer answer it."""
        ...

    @property
    def why_only_retry(self) -> str | None:
        """Return why an unchanged retry is the only remedy if this rank runs out of memory.

        Returns None if this rank may use all remedies.
        """
        ...

    @property
    def writers(self) -> Writers | None:
        """Return the ranks that write checkpoints, or None if this rank does not write."""
        ...

    @property
    def ignored(self) -> Sequence[str]:
        """Return the names of weights and buffers that the model's wrapper does not broadcast."""
        ...

    # --- opening and leaving

    def supported_policy(self, policy: Policy) -> Policy:
        """Return the policy without the features that these ranks do not support.

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
            saving: The object that saves this rank's checkpoints.
            cursor: The position of this rank in its loader. None if there is no loader.

        Returns:
            The common stop request of all ranks, and the object that decides when to save.
        """
        ...

    def open(self) -> None:
        """From now on, inform the other ranks about any error that ends this process."""
        ...

    def close(self, *, in_order: bool) -> None:
        """Stop informing the other ranks about errors.

        Args:
            in_order: Whether to wait until no other rank needs this one. False if the loop was left
                with ``break`` or an error.
        """
        ...

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Wait for all ranks, and check that facts are the same on all of them.

        Args:
            topic: A description of the facts that are compared.
            facts: Function that returns the facts of this rank, by name.

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
        """Choose an object on the first rank, and return it on all ranks.

        Args:
            choose: Function that the first rank calls to choose the object.
            name_of: Function that returns the name of the object.
            find: Function that the other ranks call to find the object by its name.

        Returns:
            The object, or None if `choose` returned None.
        """
        ...

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error on one rank is raised on all of them."""
        ...

    def in_turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that the first rank leaves before the others enter it."""
        ...

    def announce_failure(self, error: BaseException) -> BaseException | None:
        """Tell the other ranks about an error that the guard raises. A single rank may call this.

        Returns:
            The error of another rank that caused this one, or None.
        """
        ...

    # --- a step

    @property
    def needs_all_gradients(self) -> bool:
        """Return whether backward must compute the gradients of all parameters of the model.

        This is the case if the gradients are reduced during backward: the reduction waits for the
        gradients of all parameters, including those that no optimizer steps.
        """
        ...

    def begin_attempt(self, optimizers: Sequence[str]) -> None:
        """Start an attempt at a step, together with the other ranks.

        Args:
            optimizers: The names of the optimizers to step. If they differ between the ranks, all
                ranks raise H116.
        """
        ...

    def loss_of_late_attempt(self) -> torch.Tensor:
        """Return the mean loss over the items of the ranks that have computed their loss.

        Call this after `begin_late_attempt` or `end_failed_late_attempt` has ended an attempt that
        failed on this rank.

        Returns:
            The loss on the device, shape ``()``. NaN if no rank has computed its loss.
        """
        ...

    def begin_late_attempt(self, optimizers: Sequence[str]) -> bool:
        """Start an attempt whose result is read after the next one.

        Args:
            optimizers: The names of the optimizers to step, as for `begin_attempt`.

        Returns:
            Whether this rank can make the attempt. If its optimizer failed in the last step, it
            cannot. The attempt has then ended here, so that all ranks refuse it.

        Raises:
            OutOfMemoryError: H402 if the collectives of the attempt cannot be completed.
        """
        ...

    def weighted_loss(self, terms: Terms) -> torch.Tensor:
        """Return the loss on which to call ``backward``, with shape ``()``.

        The loss is scaled so that averaging the gradients over the ranks gives the gradient of the
        mean loss over the items of all ranks.
        """
        ...

    def check_terms(self, terms: Terms) -> None:
        """Raise H203 for a loss that cannot be averaged over ranks. A single rank may call this."""
        ...

    def combine(self, passed: PassResult, parameters: Sequence[torch.Tensor]) -> PassResult:
        """Rescale the gradients for the number of items on all ranks, and combine the results.

        If the attempt has failed on another rank, the gradients are left as they are, since
        `accepts` will return False.

        Args:
            passed: The result of the passes on this rank.
            parameters: The parameters that have gradients.

        Returns:
            A result with the mean loss over the items of all ranks and the number of these items.
            All other fields are those of this rank.

        Raises:
            BatchError: H203 if the number of items is not valid on any of the ranks.
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
        """Return whether an attempt succeeded on all ranks. If not, all ranks repeat it."""
        ...

    def complete_collectives(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """Complete the collectives that other ranks are waiting for, after an attempt failed here.

        All ranks then attempt the step again. Only the ranks that failed call this method. The
        others learn of the failure in `accepts`.

        Args:
            failure: A description of the failure.
            parameters: The parameters whose gradients are cleared.

        Raises:
            OutOfMemoryError: H401 if the collectives cannot be completed.
        """
        ...

    def plan_of_next_attempt(self, plan: StepPlan) -> StepPlan:
        """Return the plan with which this rank repeats an attempt.

        Args:
            plan: The plan that the memory ladder of this rank has chosen.
        """
        ...

    def take_event(self) -> OwnCollectives | None:
        """Return an event that has occurred since the last call and must be recorded, or None."""
        ...

    def request_optimizer_state(self) -> bool:
        """Request the weights and moments from another rank. A single rank may call this.

        Call this if the optimizer of this rank has run out of memory in the middle of its step.

        Returns:
            Whether this rank will receive the weights and moments. Receiving them completes the
            failed step.

        Raises:
            OutOfMemoryError: H402 if no other rank holds the same weights.
        """
        ...

    def find_origin(
        self, replay: Callable[[], Provenance], check_batch: Callable[[], Provenance]
    ) -> Provenance:
        """Find the origin of NaN or Inf in a step that all ranks have rolled back.

        Args:
            replay: Function that replays the step on this rank.
            check_batch: Function that only checks this rank's batch.

        Returns:
            The origin, or a reason why it is unknown.
        """
        ...

    # --- a step that is decided late
    #
    # The optimizers of such a step run before the host has read its result; see
    # `holdfast.guard.decision`. After backward, the guard calls `combine_without_reading`, and then
    # `end_late_attempt` or, if the attempt has failed on this rank, `end_failed_late_attempt`. The
    # devices of all ranks then accept the step, or all refuse it.
    #
    # The ranks return to this step at the next joint point, which all of them reach at the same
    # place in the program; see `holdfast.guard.run.joint_steps`. If the step was accepted, they
    # call `receive_stops_and_saves`. If it was refused, they call `agree_on_failure` and repeat the
    # step with the methods for other steps. By then, a late attempt at the next step may have
    # ended, but never more than one.

    @property
    def why_decide_now(self) -> str | None:
        """Return why the result of a step must be read before its optimizers run, or None.

        The answer is the same on all ranks. It is empty if the reason passes after the first steps.
        """
        ...

    def combine_without_reading(
        self, passed: PassResult, parameters: Sequence[torch.Tensor]
    ) -> PassResult:
        """Do the same as `combine`, without reading the results of the other ranks.

        Returns:
            A result like that of `combine`, whose loss and number of items are tensors of shape
            ``()``. Ranks that have failed before they had a loss are left out of the mean. If a
            rank has failed, if the number of items is not valid on any rank, or if the ranks are
            not at the same step with the same batch, the number of items is NaN.
        """
        ...

    def end_late_attempt(self) -> None:
        """End a late attempt that has succeeded on this rank. Other ranks may have failed in it."""
        ...

    def end_failed_late_attempt(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """End a late attempt that has failed on this rank, so that all ranks refuse it.

        Only the ranks that failed call this method. The others call `end_late_attempt`, and learn
        of the failure in `agree_on_failure`.

        Args:
            failure: A description of the failure.
            parameters: The parameters whose gradients are cleared.

        Raises:
            OutOfMemoryError: H401 if the collectives that the other ranks are waiting for cannot be
                completed.
        """
        ...

    @property
    def has_late_attempt(self) -> bool:
        """Return whether a late attempt has ended, and the ranks have not returned to it since."""
        ...

    def receive_stops_and_saves(self, *, is_next_attempted: bool) -> None:
        """Apply the stop requests and save decisions that the ranks sent with the last step.

        The step must have been accepted and counted. If it was not decided late, this does nothing,
        because `accepts` has already applied them. A second call does nothing either.

        Args:
            is_next_attempted: Whether a late attempt at the next step has ended too. Nothing that
                was sent with it is applied.

        Raises:
            RankError: H116 if the ranks were not at the same step with the same batch.
        """
        ...

    def agree_on_failure(self, *, has_failed: bool) -> bool:
        """Return whether the last step, which all ranks have refused, has failed on any rank.

        This discards the late attempt at the step, and the one at the next step if there is one.

        Args:
            has_failed: Whether the last step has failed on this rank.

        Raises:
            RankError: H116 if the ranks were not at the same step with the same batch.
        """
        ...

    # --- a batch that is split, or a model that one rank runs alone

    def no_sync(self, *, only_this_rank: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which passes over the parts of a batch do not reduce gradients.

        Call `reduce_gradients` afterwards. A single rank may call both methods.

        Args:
            only_this_rank: Whether only this rank splits its batch, because it ran out of memory.
        """
        ...

    def check_parts(self) -> None:
        """Raise H401 if the parts of a batch start collectives that other ranks do not join.

        This can happen if only this rank splits its batch. Call this method between two parts.
        """
        ...

    def reduce_gradients(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Reduce the gradients of a batch that was split, and return the result of its passes.

        Args:
            passed: The result of the passes over the parts of the batch.
            parameters: The parameters that have gradients.
            added: Whether the caller has already weighted the losses, so that they are simply
                added. All ranks then have the same weight, regardless of their number of items.
        """
        ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank runs the model without the other ranks."""
        ...

    # --- the loop and saving

    def end_epoch(self) -> RankIsSlow | None:
        """Record that the loader has ended, and return an event if one rank was slow, or None.

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
            own: Function that returns the state of this rank that is always saved.
            trees: Function that returns the state that is saved only if it differs between ranks.
                Only the first rank receives this state from the others.
            constant: Function that returns the names of buffers in `trees` that no step has
                changed.
            unsaved: Function that returns the names of buffers in `trees` that are not saved
                elsewhere. They are saved even if they do not differ.

        Returns:
            The state of all ranks, or None for a single process.
        """
        ...

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this rank's own state from a checkpoint, such as its random state."""
        ...

    def may_differ(self, name: str) -> bool:
        """Return whether a buffer or a frozen weight may differ between ranks.

        Args:
            name: The name of the model, followed by the name of the tensor in the model.
        """
        ...

    def part_to_save(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the state of all components, for a checkpoint."""
        ...

    def rows_to_load(self, parts: Parts) -> Callable[[str, str, torch.Size], Share | None]:
        """Return a function that determines which rows of a saved tensor this rank needs.

        The function takes the component, the name and the shape of a tensor. It returns None if
        this rank needs all rows of the tensor.
        """
        ...

    @property
    def shards_state(self) -> bool:
        """Return whether each rank holds its own shard of the weights and moments."""
        ...
