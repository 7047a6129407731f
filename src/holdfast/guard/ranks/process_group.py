"""The common base class of ranks that train one model with the same steps and decisions.

In a normal step, these ranks exchange only a row of numbers, in one small all-gather that runs
during backward. A rank that runs out of memory completes the collectives that the other ranks are
waiting for, by sending NaN, and all ranks attempt the step again. A rank that fails in any other
way tells the others why, and all ranks exit.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch

from holdfast.checkpoint.saver import Writers
from holdfast.checkpoint.tensor_files import Share
from holdfast.core.errors import BatchError, OutOfMemoryError, RankError
from holdfast.core.events.run_events import OwnCollectives, RankIsSlow
from holdfast.core.policy.policy import Policy
from holdfast.guard.cursor import Cursor
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.agreement import check_agreement, unsupported
from holdfast.guard.ranks.decisions import GroupSaves, GroupStopRequest
from holdfast.guard.ranks.differing_state import EntriesByKind
from holdfast.guard.ranks.distributed_model import DistributedModel
from holdfast.guard.ranks.interface import Saves
from holdfast.guard.ranks.item_weights import ItemWeights
from holdfast.guard.ranks.messages import Messages
from holdfast.guard.ranks.origin import OriginReport, origin_among_ranks, report_of
from holdfast.guard.ranks.pace import Pace, peak_bytes
from holdfast.guard.ranks.rank_states import RankStates, state_of_new_rank, state_of_rank
from holdfast.guard.ranks.row import EPOCH_END, Position, Rows, rows_of
from holdfast.guard.ranks.row_exchange import RowExchange
from holdfast.guard.ranks.state_transfer import StateTransfer, without_help
from holdfast.guard.ranks.tape import Tape
from holdfast.guard.result import PassResult, Provenance, StepAttempt
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest
from holdfast.memory.ladder import StepPlan
from holdfast.memory.oom import find_out_of_memory, release_memory
from holdfast.numerics.gradients import GradientFacts, Group
from holdfast.numerics.loss import Terms

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=DistributedModel)
# The policy fields that are restricted in runs with several ranks, with their allowed values.
_ALLOWED_VALUES: dict[str, tuple[object, ...]] = {
    "drop_nonfinite_samples": (False,),
    # If the second pass failed on one rank only, the other ranks would wait for this rank in the
    # collectives of backward.
    "repeat_step_interval": (None,),
}


class _Result(IntEnum):
    """The result of an attempt on one rank."""

    SUCCEEDED = 0
    FAILED = 1
    # There was no attempt, because this rank's optimizer failed in the last step.
    BEHIND = 2


class ProcessGroupRanks(ABC, Generic[_Model]):
    """The ranks of a process group, from the perspective of one rank.

    The methods are documented in `Ranks`.

    Args:
        model: The model that all ranks train.
        messages: The connection to the other ranks.
        tape: Records the collectives of this rank.
        transfer: Copies state from another rank to a rank whose optimizer has failed.
    """

    has_group = True

    def __init__(
        self, model: _Model, messages: Messages, tape: Tape, transfer: StateTransfer
    ) -> None:
        self.rank = messages.rank
        self.world_size = messages.world_size
        self._model = model
        self._messages = messages
        self._tape = tape
        self._transfer = transfer
        self._states = RankStates(messages, transfer)
        self._pace = Pace(self.world_size)
        self._weights = ItemWeights(self.world_size)
        # How many collectives the loss or the model started in the last attempt that succeeded on
        # all ranks.
        self._own_collectives = 0
        # Whether the loss or the model has ever started collectives.
        self._has_own_collectives = False
        # Whether a late attempt has failed on any rank.
        self._has_late_failure = False
        # An event that the guard has not recorded yet.
        self._event: OwnCollectives | None = None
        # This is created by `connect`: it needs the object that saves this rank's checkpoints, and
        # that object in turn needs `writers` and `part_to_save` of these ranks.
        self._row_exchange: RowExchange | None = None

    @property
    def has_left_group(self) -> bool:
        """Return whether this rank has left the group, so that other ranks no longer answer it."""
        return self._messages.has_failed or self._messages.is_closed

    # --- what differs between DistributedDataParallel and ``fully_shard``

    @property
    @abstractmethod
    def why_only_retry(self) -> str | None:
        """Return why an unchanged retry is the only remedy if this rank runs out of memory."""

    @property
    @abstractmethod
    def shards_state(self) -> bool:
        """Return whether each rank holds its own shard of the weights and moments."""

    @property
    @abstractmethod
    def needs_all_gradients(self) -> bool:
        """Return whether backward must compute the gradients of all parameters of the model."""

    @property
    @abstractmethod
    def writers(self) -> Writers | None:
        """Return the ranks that write checkpoints, or None if this rank does not write."""

    @property
    @abstractmethod
    def ignored(self) -> Sequence[str]:
        """Return the names of weights and buffers that the model's wrapper does not broadcast."""

    @property
    @abstractmethod
    def why_decide_now(self) -> str | None:
        """Return why the result of a step must be read before its optimizer runs, or None."""

    @abstractmethod
    def inspect_gradients(
        self, groups: Sequence[Group], loss: torch.Tensor, items: torch.Tensor | None
    ) -> tuple[GradientFacts, torch.Tensor]:
        """Measure the gradients of a step."""

    @abstractmethod
    def plan_of_next_attempt(self, plan: StepPlan) -> StepPlan:
        """Return the plan with which this rank repeats an attempt."""

    @abstractmethod
    def request_optimizer_state(self) -> bool:
        """Request the weights and moments from another rank; return whether they will arrive."""

    @abstractmethod
    def no_sync(self, *, only_this_rank: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which passes over the parts of a batch do not reduce gradients."""

    @abstractmethod
    def check_parts(self) -> None:
        """Raise H401 if the parts of a batch start collectives that other ranks do not join."""

    @abstractmethod
    def reduce_gradients(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Reduce the gradients of a batch that was split, and return the result of its passes."""

    @abstractmethod
    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank runs the model without the other ranks."""

    @abstractmethod
    def part_to_save(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the state of all components, for a checkpoint."""

    @abstractmethod
    def rows_to_load(self, parts: Parts) -> Callable[[str, str, torch.Size], Share | None]:
        """Return a function that determines which rows of a saved tensor this rank needs."""

    @abstractmethod
    def _why_not_completable(self) -> str | None:
        """Return why this rank cannot start the missing collectives of an attempt, or None."""

    @abstractmethod
    def _start_missing_collectives(self) -> str | None:
        """Start the collectives that this attempt still lacks, with NaN as input.

        Returns:
            None, or the reason why they cannot be started.
        """

    @abstractmethod
    def _own_origin(
        self,
        suspects: list[int],
        replay: Callable[[], Provenance],
        check_batch: Callable[[], Provenance],
    ) -> Provenance:
        """Return the origin of NaN or Inf, as far as this rank can find it alone.

        Args:
            suspects: The ranks whose loss is not finite, or all ranks.
            replay: Function that replays the step on this rank, up to its first collective.
            check_batch: Function that only checks this rank's batch.
        """

    @abstractmethod
    def _credible(self, reports: list[OriginReport]) -> list[OriginReport]:
        """Return the reports of all ranks about NaN or Inf, without inconclusive origins."""

    # --- opening and leaving

    def supported_policy(self, policy: Policy) -> Policy:
        """Return the policy without the features that these ranks do not support.

        Raises:
            PolicyError: H108 for an unsupported feature that was enabled explicitly.
        """
        for name, allowed in {**_ALLOWED_VALUES, **self._model.allowed_values}.items():
            if getattr(policy, name) not in allowed:
                raise unsupported(f"{name}={getattr(policy, name)!r}")
        # With these features, a single rank would act without the others.
        return replace(
            policy,
            forecast_micro_batch_size=None,
            snapshot_interval_steps=None,
            **self._model.policy_overrides,
        )

    def connect(
        self, stop: StopRequest, saving: Saving, cursor: Cursor | None
    ) -> tuple[StopRequest, Saves]:
        """Return the common stop request and save decisions, which are exchanged in each step."""
        group_stop = GroupStopRequest(stop, self._messages)
        group_saves = GroupSaves(saving, self._messages, cursor)
        self._row_exchange = RowExchange(
            model=self._model,
            messages=self._messages,
            weights=self._weights,
            stop=group_stop,
            saves=group_saves,
            cursor=cursor,
        )
        return group_stop, group_saves

    def open(self) -> None:
        """From now on, inform the other ranks about any error that ends this process."""
        self._messages.open()

    def close(self, *, in_order: bool) -> None:
        """Stop informing the other ranks about errors; see `Messages.close`."""
        self._messages.close(in_order=in_order)

    def agree(self, topic: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Check that facts are the same on all ranks."""
        check_agreement(self._messages.exchange(topic, facts()))

    def choose_on_first(
        self,
        choose: Callable[[], _T | None],
        name_of: Callable[[_T], str],
        find: Callable[[str], _T],
    ) -> _T | None:
        """Choose an object on the first rank, and return it on all ranks."""
        choice = choose() if self.rank == 0 else None
        own_name = None if choice is None else name_of(choice)
        name = self._messages.exchange("chosen", own_name)[0]
        return choice if choice is not None or name is None else find(name)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Return a context in which an error on one rank is raised on all ranks."""
        try:
            yield
        except BaseException as error:
            cause = self.announce_failure(error)
            if cause is not None:
                raise cause from error
            raise

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Return a context that the first rank leaves before the others enter it."""
        if self.rank == 0:
            yield
        self._messages.exchange("turn", None)
        if self.rank != 0:
            yield

    def announce_failure(self, error: BaseException) -> BaseException | None:
        """Tell the other ranks about an error that the guard raises. Return its cause, or None."""
        if self._messages.has_failed:
            return None
        self._model.end_attempt()
        cause = None if isinstance(error, RankError) else self._messages.cause_of(error)
        writes_together = self.writers is not None and self.writers.are_several
        if cause is None and self._row_exchange is not None and writes_together:
            self._row_exchange.saves.let_finish()
        self._messages.publish(cause or error)
        return cause

    # --- a step

    @property
    def _exchange(self) -> RowExchange:
        """Return the exchange of rows, which exists after `connect`."""
        assert self._row_exchange is not None
        return self._row_exchange

    def begin_attempt(self, optimizers: Sequence[str]) -> None:
        """Start an attempt, together with the other ranks."""
        self._begin_attempt(optimizers)
        while self._transfer.is_behind:
            # The optimizer of this rank failed in the last step. The other ranks have started an
            # attempt, which must fail, so that this rank can receive the state of another rank.
            self._complete_without_attempt()
            self._agree_on_retry(_Result.BEHIND)
            self._begin_attempt(optimizers)

    def begin_late_attempt(self, optimizers: Sequence[str]) -> bool:
        """Start an attempt whose result is read after the next one.

        Returns:
            Whether this rank can make the attempt. If its optimizer failed in the last step, it
            cannot. The attempt has then ended here, so that all ranks refuse it.

        Raises:
            OutOfMemoryError: H402 if the collectives of the attempt cannot be completed.
        """
        self._begin_attempt(optimizers)
        if not self._transfer.is_behind:
            return True
        self._complete_without_attempt()
        self._model.discard_attempt()
        self.end_late_attempt()
        return False

    def _begin_attempt(self, optimizers: Sequence[str]) -> None:
        """Count an attempt, and clear what remains of the last one."""
        self._messages.check_here()
        self._pace.begin_step()
        if self._messages.loop_was_left:
            self._messages.exchange("a step after a loop was left", None)
        self._messages.begin_step()
        self._model.begin_attempt()
        self._pace.begin_attempt()
        self._exchange.begin_attempt(optimizers)

    def _complete_without_attempt(self) -> None:
        """Complete the collectives of an attempt that this rank does not make."""
        obstacle = self._complete_collectives()
        if obstacle is not None:
            raise without_help(obstacle)

    def weighted_loss(self, terms: Terms) -> torch.Tensor:
        """Return the loss weighted by this rank's items, and start sending the row."""
        loss = terms.total()
        self.check_terms(terms)
        weight = self._exchange.send_and_weight(
            loss.detach(), terms.items[0], counted=terms.counted, **self._pace.fields_of_row()
        )
        return loss if isinstance(weight, float) and weight == 1.0 else loss * weight

    def check_terms(self, terms: Terms) -> None:
        """Raise H203 for a loss that sums several means, since each rank has a single weight."""
        if len(terms.means) > 1:
            raise BatchError(
                f"loss_fn returned {len(terms.means)} terms",
                limit="with several ranks, a loss must be a single mean over its items",
                fix="return a single Loss, or the sum of the means as a plain tensor.",
                rule="H203",
            )

    def combine(self, passed: PassResult, parameters: Sequence[torch.Tensor]) -> PassResult:
        """Rescale the gradients for the number of items on all ranks, and combine the results."""
        rows = self._exchange.receive()
        if not rows.failed:
            self._note_own_collectives(self._model.own_collectives())
            self._weights.correct_gradients(rows, parameters)
        return passed._replace(loss=passed.loss.new_tensor(rows.loss), items=rows.items)

    def _note_own_collectives(self, count: int) -> None:
        """Record how many collectives the loss or the model started in an attempt."""
        self._own_collectives = count
        if count and not self._has_own_collectives:
            self._has_own_collectives = True
            self._event = OwnCollectives(count=count)

    def take_event(self) -> OwnCollectives | None:
        """Return an event that has occurred since the last call and must be recorded, or None."""
        event = self._event
        self._event = None
        return event

    # --- an attempt that fails on one rank

    def accepts(self, attempt: StepAttempt) -> bool:
        """Return whether the attempt succeeded on all ranks. If not, all ranks repeat it."""
        rows = self._exchange.rows
        # A failed rank sends NaN, so the ranks need to exchange results only if a value is not
        # finite.
        if (attempt.facts.nonfinite or rows.failed) and self._agree_on_retry(_Result.SUCCEEDED):
            return False
        self._model.end_attempt()
        self._exchange.apply_stops_and_saves(rows, is_counted=False)
        self._pace.add(rows)
        self._pace.end_step()
        return True

    def complete_collectives(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """Complete the collectives that other ranks are waiting for, and agree on another attempt.

        Raises:
            OutOfMemoryError: H401 if the collectives cannot be completed.
        """
        self._complete_or_raise(failure, parameters)
        self._agree_on_retry(_Result.FAILED)

    def _complete_or_raise(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """Complete the collectives of an attempt that has failed on this rank.

        Args:
            failure: A description of the failure.
            parameters: The parameters whose gradients are cleared, which frees memory.

        Raises:
            OutOfMemoryError: H401 if the collectives cannot be completed.
        """
        for parameter in parameters:
            parameter.grad = None
        device = self._model.device
        release_memory([] if device.type == "cpu" else [device])
        obstacle = self._complete_collectives()
        if obstacle is not None:
            raise OutOfMemoryError(
                f"rank {self.rank} ran out of memory ({failure})",
                limit=f"{obstacle}; the weights are those of the last committed step",
                fix="use a smaller batch or model, and start all ranks again.",
                rule="H401",
            )

    def _complete_collectives(self) -> str | None:
        """Start the collectives in which the other ranks are waiting, with NaN as input.

        Returns:
            None, or the reason why they cannot be started.
        """
        if self._exchange.is_received:
            return (
                "all ranks already have the gradients of this step, and the others continue with"
                " them"
            )
        obstacle = self._why_not_completable()
        if obstacle is not None:
            return obstacle
        try:
            return self._start_missing_collectives()
        except RuntimeError as error:
            cause = find_out_of_memory(error)
            if cause is None:
                raise
            return f"there was no memory to complete the collectives of the step ({cause})"

    def _agree_on_retry(self, result: _Result) -> bool:
        """Exchange the results of an attempt, and prepare another attempt if any rank has failed.

        Args:
            result: The result on this rank.

        Returns:
            Whether all ranks must make another attempt.
        """
        self._model.end_attempt()
        results = self._messages.exchange("attempt", int(result))
        if not any(results):
            return False
        self._model.discard_attempt()
        self._weights.discard_attempt()
        self._transfer.catch_up([other == _Result.BEHIND for other in results])
        return True

    # --- a step that is decided late

    def combine_without_reading(
        self, passed: PassResult, parameters: Sequence[torch.Tensor]
    ) -> PassResult:
        """Do the same as `combine`, without reading the rows of the other ranks."""
        rows = self._exchange.on_device()
        items = self._weights.correct_gradients_on_device(rows, parameters)
        self._note_own_collectives(self._model.own_collectives())
        return passed._replace(loss=rows.loss().to(passed.loss.dtype), items=items)

    def end_late_attempt(self) -> None:
        """End an attempt, and start copying the rows of all ranks to the host."""
        self._model.end_attempt()
        self._exchange.end_late_attempt()
        self._pace.end_step()

    def end_failed_late_attempt(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """Complete the collectives of an attempt that has failed here, so that all ranks refuse it.

        Raises:
            OutOfMemoryError: H401 if the collectives cannot be completed.
        """
        self._complete_or_raise(failure, parameters)
        self._model.discard_attempt()
        self.end_late_attempt()

    def loss_of_late_attempt(self) -> torch.Tensor:
        """Return the mean loss over the items of the ranks that have computed their loss."""
        return self._exchange.loss_of_all()

    @property
    def has_late_attempt(self) -> bool:
        """Return whether the rows of a late attempt that has ended have not been read yet."""
        return self._exchange.has_late_attempt

    def receive_stops_and_saves(self, *, is_next_attempted: bool) -> None:
        """Apply the stop requests and save decisions in the rows of the last step."""
        rows = self._exchange.take_late_rows(is_next_attempted=is_next_attempted)
        if rows is not None:
            self._exchange.apply_stops_and_saves(rows, is_counted=True)
            self._pace.add(rows)

    def agree_on_failure(self, *, has_failed: bool) -> bool:
        """Return whether the last step, which all ranks have refused, has failed on any rank."""
        result = _Result.FAILED if has_failed else _Result.SUCCEEDED
        if self._transfer.is_behind:
            result = _Result.BEHIND
        results = self._messages.exchange("the last step", int(result))
        self._exchange.discard_late_attempts()
        has_failed_anywhere = any(results)
        if has_failed_anywhere:
            self._has_late_failure = True
            self._model.discard_attempt()
            self._transfer.catch_up([other == _Result.BEHIND for other in results])
        return has_failed_anywhere

    # --- NaN and Inf

    def find_origin(
        self, replay: Callable[[], Provenance], check_batch: Callable[[], Provenance]
    ) -> Provenance:
        """Return the rank on which NaN or Inf first appeared, and its origin on that rank."""
        suspects = self._exchange.rows.suspects()
        own = self._own_origin(suspects, replay, check_batch)
        report = report_of(own, has_collectives=self._own_collectives > 0)
        reports = [OriginReport(*fields) for fields in self._messages.exchange("origin", [*report])]
        return origin_among_ranks(self.rank, own, suspects, self._credible(reports))

    # --- the loop

    def end_epoch(self) -> RankIsSlow | None:
        """Record that the loader has ended. The first rank returns an event about a slow rank."""
        rows = self._rows_of_epoch_end()
        self._exchange.apply_stops_and_saves(rows, is_counted=True)
        self._transfer.catch_up(rows.which_failed())
        slowest = self._pace.slowest(rows)
        return slowest if self.rank == 0 else None

    def _rows_of_epoch_end(self) -> Rows:
        """Exchange the rows of all ranks at the end of an epoch.

        If steps broadcast buffers or gather shards before they exchange rows, the rows of the epoch
        end are sent through the store instead of a collective. Otherwise, if one rank ran another
        step instead of ending the epoch, its broadcast would be matched with the collective for the
        rows.
        """
        peak = peak_bytes(self._model.device)
        is_behind = self._transfer.is_behind
        if not self._model.sends_before_row:
            self._messages.begin_step()
            self._tape.begin()
            rows = self._exchange.send(0.0, peak, kind=EPOCH_END, failed=is_behind).rows()
            self._tape.end()
            return rows
        action = _action_at_epoch_end(self._exchange.position())
        own = self._exchange.row_of_this_rank(kind=EPOCH_END, failed=is_behind, items=peak)
        numbers = [float(number) for number in own]
        rows = rows_of(self._messages.exchange("the end of an epoch", numbers, action=action))
        self._messages.begin_step()
        rows.check()
        return rows

    # --- saving

    def gather_states(
        self,
        own: Callable[[], Mapping[str, Any]],
        trees: Callable[[], EntriesByKind],
        constant: Callable[[], Iterable[str]],
        unsaved: Callable[[], Iterable[str]],
    ) -> dict[str, Any] | None:
        """Return the per-rank state for a checkpoint, or None if this rank has failed."""
        if self._messages.has_failed:
            return None
        states = self._states.gather(own, trees, constant, unsaved)
        return {
            "reference": self._weights.reference,
            "each": states,
            "order": self._model.gradient_order,
        }

    def own_state(self, training: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this rank's own state from a checkpoint.

        If a different number of ranks wrote the checkpoint, this rank gets a new random state.
        """
        saved = training.get("ranks") or {"reference": None, "each": []}
        self._weights.restore(saved["reference"])
        states = saved["each"]
        if len(states) != self.world_size:
            return state_of_new_rank(training, self.rank)
        self._model.lay_out_gradients(saved.get("order", []))
        return state_of_rank(states, self.rank)

    def may_differ(self, name: str) -> bool:
        """Return whether a buffer or a frozen weight may differ between ranks."""
        return self._model.may_differ(name)


def _action_at_epoch_end(position: Position) -> str:
    """Describe a rank at the end of an epoch, as a verb phrase that follows its name."""
    action = f"is at the end of epoch {position.epoch}"
    if not position.passed:
        return action
    # `passed` counts the batches that were skipped directly before `batch`.
    first = position.batch - position.passed
    skipped = f"batch {first}"
    if position.passed > 1:
        skipped = f"batches {first} to {position.batch - 1}"
    return f"{action}, where it has skipped {skipped} without a step"
