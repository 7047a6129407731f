"""`DdpRanks`: the ranks of a model that is wrapped in DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint.loading import all_rows
from holdfast.checkpoint.saver import Writers
from holdfast.checkpoint.tensor_files import Share
from holdfast.core.errors import OutOfMemoryError
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.agreement import unsupported
from holdfast.guard.ranks.arrival import connect_ranks
from holdfast.guard.ranks.messages import Messages
from holdfast.guard.ranks.origin import OriginReport
from holdfast.guard.ranks.process_group import ProcessGroupRanks
from holdfast.guard.ranks.replicated import ReplicatedModel
from holdfast.guard.ranks.state_transfer import StateTransfer, transfer_of, without_help
from holdfast.guard.ranks.tape import Tape
from holdfast.guard.result import PassResult, Provenance
from holdfast.memory.ladder import StepPlan
from holdfast.numerics.gradients import GradientFacts, Group, inspect
from holdfast.numerics.loss import Terms


def ddp_ranks(parts: Parts, name: str, wrapper: DistributedDataParallel) -> DdpRanks:
    """Connect the ranks that train a model wrapped in DistributedDataParallel.

    Args:
        parts: The objects that the guard manages.
        name: The name of the model in `parts`.
        wrapper: The DistributedDataParallel module.
    """
    messages = connect_ranks(wrapper.process_group)
    tape = Tape(messages)
    model = ReplicatedModel(wrapper, name, tape)
    return DdpRanks(model, messages, tape, transfer_of(parts, model, messages))


@final
class DdpRanks(ProcessGroupRanks[ReplicatedModel]):
    """Ranks that each hold a full replica of the model, so that a single rank can run it alone."""

    shards_state = False

    def __init__(
        self, model: ReplicatedModel, messages: Messages, tape: Tape, transfer: StateTransfer
    ) -> None:
        super().__init__(model, messages, tape, transfer)
        # All ranks hold the same state, so the first rank writes all of it.
        self._writers = Writers() if self.rank == 0 else None
        # Whether this rank is running the model without the others.
        self._is_alone = False
        # Whether only this rank splits its batch, because it ran out of memory.
        self._only_this_rank_splits = False

    @property
    def why_only_retry(self) -> str | None:
        """Return why an unchanged retry is the only remedy if this rank runs out of memory."""
        if self._has_own_collectives:
            return (
                "the loss or the model has collectives, so all ranks must run it the same number of"
                " times"
            )
        return None

    @property
    def needs_all_gradients(self) -> bool:
        """Return whether the model's reducer takes part in backward.

        It waits for the gradients of all parameters, unless this rank runs the model alone.
        """
        return not self._is_alone

    @property
    def why_decide_now(self) -> str | None:
        """Return why the result of a step must be read before its optimizer runs, or None."""
        if self._has_late_failure:
            return "a rank has run out of memory, so all ranks agree on each attempt"
        return self._model.why_decide_now

    @property
    def writers(self) -> Writers | None:
        """Return the checkpoint writers on the first rank, and None on the others."""
        return self._writers

    @property
    def ignored(self) -> Sequence[str]:
        """Return the names of weights and buffers that DistributedDataParallel ignores."""
        return self._model.ignored

    # --- a step

    def weighted_loss(self, terms: Terms) -> torch.Tensor:
        """Return the loss, weighted by this rank's items unless this rank runs the model alone."""
        return terms.total() if self._is_alone else super().weighted_loss(terms)

    def inspect_gradients(
        self, groups: Sequence[Group], loss: torch.Tensor, items: torch.Tensor | None
    ) -> tuple[GradientFacts, torch.Tensor]:
        """Measure the gradients, each of which this rank holds in full."""
        return inspect(groups, loss, items)

    def plan_of_next_attempt(self, plan: StepPlan) -> StepPlan:
        """Return `plan` unchanged, since each rank may split or recompute independently."""
        return plan

    def request_optimizer_state(self) -> bool:
        """Request the weights and moments from another rank, which holds the same ones.

        Raises:
            OutOfMemoryError: H402 if the step is decided late, since the other ranks then learn too
                late that this one needs their state.
        """
        if self.has_late_attempt:
            raise without_help("the other ranks have already continued with the next step")
        self._transfer.request()
        return True

    def _why_not_completable(self) -> str | None:
        return self._model.why_not_completable()

    def _start_missing_collectives(self) -> str | None:
        """Start the missing collectives of this attempt, or return why that is impossible."""
        obstacle = self._model.wait_for_others()
        if obstacle is not None:
            return obstacle
        has_failed_before_row = not self._exchange.is_sending
        if has_failed_before_row:
            self._exchange.send_failure()
        if not self._model.reduce_nan() and not has_failed_before_row:
            return "its gradients were already being sent to all ranks"
        self._exchange.wait()
        return None

    # --- NaN and Inf

    def _own_origin(
        self,
        suspects: list[int],
        replay: Callable[[], Provenance],
        check_batch: Callable[[], Provenance],  # noqa: ARG002 - not needed, since a replay includes this check
    ) -> Provenance:
        # Rebuilding the buckets involves all ranks, and all of them make this call now.
        self._model.rebuild()
        # A rank with a finite loss may still be the cause, if a collective called by the loss
        # function has sent NaN from this rank to the others.
        if self.rank not in suspects and not self._own_collectives:
            return Provenance(problem="it appeared on another rank")
        with self.alone():
            return replay()

    def _credible(self, reports: list[OriginReport]) -> list[OriginReport]:
        """Return `reports` unchanged, since each rank has replayed its step."""
        return reports

    # --- a batch that is split, or a model that this rank runs alone

    def no_sync(self, *, only_this_rank: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which passes over the parts of a batch do not reduce gradients.

        Raises:
            PolicyError: H108 if the model does not support splitting a batch.
        """
        self._only_this_rank_splits = only_this_rank
        obstacle = self._model.why_not_split
        if obstacle is not None:
            raise unsupported(obstacle)
        return self._model.no_sync()

    def check_parts(self) -> None:
        """Raise H401 if the parts of a batch start collectives that other ranks do not join."""
        if (
            not self._only_this_rank_splits
            or self._is_alone
            or not self._tape.collectives.started()
        ):
            return
        raise OutOfMemoryError(
            f"rank {self.rank} splits its batch, because it has run out of memory before",
            limit=(
                "each part starts collectives of the loss or the model, which the other ranks start"
                " only once"
            ),
            fix=(
                "use a smaller batch or model, or set micro_batch_size for all ranks, and start all"
                " ranks again."
            ),
            rule="H401",
        )

    def reduce_gradients(
        self, passed: PassResult, parameters: Sequence[torch.Tensor], *, added: bool = False
    ) -> PassResult:
        """Reduce the gradients of a batch that was split, unless this rank runs the model alone."""
        if self._is_alone:
            return passed
        items = 1 if added else passed.items
        weight = self._exchange.send_and_weight(
            passed.loss, items, counted=passed.counted, **self._pace.fields_of_row()
        )
        is_one = isinstance(weight, float) and weight == 1.0
        if not is_one:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], weight)
        # The passes over the parts did not reduce the gradients, so they are reduced once, here.
        self._model.reduce_gradients()
        return passed

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context for a trial in which this rank runs the model without the others."""
        self._is_alone = True
        try:
            with self._model.alone():
                yield
        finally:
            self._is_alone = False

    # --- saving

    def part_to_save(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Return `trees` unchanged, since the first rank writes the state of all components."""
        return trees

    def rows_to_load(
        self,
        parts: Parts,  # noqa: ARG002 - the answer is always the same
    ) -> Callable[[str, str, torch.Size], Share | None]:
        """Return `all_rows`, since each rank needs whole tensors."""
        return all_rows
