"""`FsdpRanks`: the ranks of a model under ``fully_shard``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, final

import torch
from torch import distributed, nn

from holdfast.checkpoint.saver import Writers
from holdfast.checkpoint.tensor_files import Share
from holdfast.core.policy.policy import Policy
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.agreement import unsupported
from holdfast.guard.ranks.arrival import connect_ranks
from holdfast.guard.ranks.messages import Messages
from holdfast.guard.ranks.origin import OriginReport
from holdfast.guard.ranks.process_group import ProcessGroupRanks
from holdfast.guard.ranks.sharded import ShardedModel
from holdfast.guard.ranks.shared_writers import SharedWriters
from holdfast.guard.ranks.state_transfer import StateTransfer, transfer_of, without_help
from holdfast.guard.ranks.tape import Tape
from holdfast.guard.result import PassResult, Provenance
from holdfast.memory.ladder import StepPlan
from holdfast.numerics.gradients import GradientFacts, Group, inspect

_WHY_NOT_TRACED = (
    "its origin cannot be traced, because one rank cannot run a sharded model without the others"
)


def fsdp_ranks(parts: Parts, module: nn.Module) -> FsdpRanks:
    """Connect the ranks that train a model under ``fully_shard``.

    Args:
        parts: The objects that the guard manages.
        module: The model.
    """
    messages = connect_ranks(distributed.group.WORLD)
    tape = Tape(messages)
    model = ShardedModel(module, tape)
    return FsdpRanks(model, messages, tape, transfer_of(parts, model, messages))


@final
class FsdpRanks(ProcessGroupRanks[ShardedModel]):
    """Ranks that each hold a shard of the model, so that no rank can run it alone.

    These ranks do not split batches, since they must all run the same number of passes. They all
    recompute the same modules.
    """

    shards_state = True
    # The graph ends at the unsharded weights, so it does not even contain the parameters that the
    # optimizers hold.
    needs_all_gradients = True
    # A rank that runs out of memory may recompute modules: all ranks recompute the same ones, and
    # therefore repeat the collectives in these modules together.
    why_only_retry = None
    why_decide_now = "the norms of sharded gradients are combined in a collective"
    ignored: Sequence[str] = ()

    def __init__(
        self, model: ShardedModel, messages: Messages, tape: Tape, transfer: StateTransfer
    ) -> None:
        super().__init__(model, messages, tape, transfer)
        self._writers = SharedWriters(messages)
        # Whether the last attempt failed on this rank.
        self._has_failed = False
        # Whether losses are scaled, for fp16.
        self._scales_loss = False

    @property
    def writers(self) -> Writers:
        """Return the checkpoint writers: all ranks, since each rank writes its own shards."""
        return self._writers

    def supported_policy(self, policy: Policy) -> Policy:
        """Return the policy without the features that a sharded model does not support.

        Raises:
            PolicyError: H108 for an unsupported feature that was enabled explicitly.
        """
        self._scales_loss = policy.precision == "fp16"
        return super().supported_policy(policy)

    # --- a step

    def inspect_gradients(
        self, groups: Sequence[Group], loss: torch.Tensor, items: torch.Tensor | None
    ) -> tuple[GradientFacts, torch.Tensor]:
        """Measure the gradients. The norms are those of the whole gradients, not of the shards."""
        return inspect(groups, loss, items, share=self._model.norms)

    def complete_collectives(self, failure: str, parameters: Sequence[torch.Tensor]) -> None:
        """Complete the collectives that other ranks are waiting for, after an attempt failed here.

        With fp16, this is impossible, since the gradient scaler starts collectives as well.

        Raises:
            OutOfMemoryError: H401 if the collectives cannot be completed.
        """
        super().complete_collectives(failure, parameters)
        self._has_failed = True

    def _why_not_completable(self) -> str | None:
        if self._scales_loss:
            return "the fp16 gradient scaler starts collectives as well"
        return self._model.why_not_completable()

    def _start_missing_collectives(self) -> str | None:
        """Start the missing collectives of this attempt, or return why that is impossible."""
        return self._model.follow(self._exchange_failure)

    def _exchange_failure(self) -> None:
        """Send a row that reports this rank's failure, and wait for the other ranks' rows."""
        self._exchange.send_failure()
        self._exchange.wait()

    def plan_of_next_attempt(self, plan: StepPlan) -> StepPlan:
        """Return the plan for the next attempt, which combines the plans of all failed ranks."""
        plans = self._messages.exchange("plan", [self._has_failed, list(plan.recompute)])
        self._has_failed = False
        names = dict.fromkeys(name for failed, recompute in plans if failed for name in recompute)
        return replace(plan, recompute=tuple(names))

    def request_optimizer_state(self) -> NoReturn:
        """Raise H402, since no other rank holds the same weights."""
        raise without_help("each rank has weights that no other rank has")

    # --- NaN and Inf

    def _own_origin(
        self,
        suspects: list[int],  # noqa: ARG002 - unused: each rank checks its own batch
        replay: Callable[[], Provenance],  # noqa: ARG002 - unused: a replay would need all ranks
        check_batch: Callable[[], Provenance],
    ) -> Provenance:
        # Only the batch can be checked, since one rank cannot replay a step of a sharded model.
        in_batch = check_batch()
        if in_batch.origin is not None:
            return in_batch
        return Provenance(problem=_WHY_NOT_TRACED)

    def _credible(self, reports: list[OriginReport]) -> list[OriginReport]:
        """Return the reports, and remove their origins if every rank has found one.

        Only the batches were checked. If every batch contains NaN, for example as missing labels,
        this NaN is not the cause.
        """
        if not all(report.has_origin for report in reports):
            return reports
        return [report._replace(has_origin=False, text=_WHY_NOT_TRACED) for report in reports]

    # --- a batch that is split, or a model that one rank runs alone

    def no_sync(self, *, only_this_rank: bool = False) -> NoReturn:  # noqa: ARG002
        """Raise H108, since batches of a sharded model are not split."""
        raise unsupported("a step over several batches of a sharded model")

    def check_parts(self) -> None:
        """Do nothing, since these ranks do not split batches."""

    def reduce_gradients(
        self,
        passed: PassResult,  # noqa: ARG002
        parameters: Sequence[torch.Tensor],  # noqa: ARG002
        *,
        added: bool = False,  # noqa: ARG002
    ) -> NoReturn:
        """Raise an error. This is never called, since `no_sync` always raises an error first."""
        raise AssertionError("a sharded model reduces its gradients in backward")

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Raise an error. This is never called, since the features that need it are disabled."""
        raise AssertionError("one rank cannot run a sharded model without the others")

    # --- saving

    def part_to_save(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's rows of sharded tensors and, on the first rank, everything else."""
        return self._model.part_to_save(trees, is_first=self.rank == 0)

    def rows_to_load(self, parts: Parts) -> Callable[[str, str, torch.Size], Share | None]:
        """Return a function that determines which rows of a saved tensor this rank needs."""
        return self._model.rows_to_load(parts)
