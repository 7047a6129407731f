"""`RunContext`: the objects that the engine, the session and their parts share during one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from holdfast.core.policy.policy import Policy
from holdfast.guard.cursor import Cursor
from holdfast.guard.diagnosis import Diagnosis
from holdfast.guard.parts import Parts
from holdfast.guard.phase import RunState
from holdfast.guard.ranks.interface import Ranks
from holdfast.guard.record import RunRecord
from holdfast.guard.result import Counters
from holdfast.guard.schedules import Schedules
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.created_state import CreatedState
from holdfast.guard.state.earlier_gradients import EarlierGradients
from holdfast.guard.state.loss_scale import LossScale
from holdfast.guard.state.states import StateKeeper, changeable_states
from holdfast.memory.ladder import MemoryLadder
from holdfast.numerics.spikes import SpikeDetector


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The objects that the engine, the session and their parts share.

    `Guard` creates one context and passes it to the engine and the session, so that the shared
    objects need no references to each other.
    """

    # The models, optimizers and further state of the run.
    parts: Parts
    policy: Policy
    # Where events are recorded.
    record: RunRecord
    ranks: Ranks
    # The phase of the run, and whether its state in memory is sound.
    state: RunState
    # The remedies for out-of-memory errors: those in use, and the next ones to try.
    ladder: MemoryLadder
    # Copies of the buffers and of the `state=` objects that an attempt may change.
    buffers: BufferKeeper
    loss_scale: LossScale
    # Optimizer state that the guard created before the optimizers' first step.
    created_state: CreatedState
    # The gradients of the current step's earlier batches, if a step has several batches.
    earlier_gradients: EarlierGradients
    diagnosis: Diagnosis
    # The position in the loader. None if the guard has no loader.
    cursor: Cursor | None
    schedules: Schedules
    # Detects unusually large losses and gradient norms.
    spikes: SpikeDetector
    counters: Counters

    @classmethod
    def of(
        cls,
        parts: Parts,
        policy: Policy,
        record: RunRecord,
        ranks: Ranks,
        cursor: Cursor | None,
        schedules: Schedules,
    ) -> Self:
        """Create the context of a new run."""
        loss_scale = LossScale(parts.device_type(), enabled=policy.precision == "fp16")
        return cls(
            parts=parts,
            policy=policy,
            record=record,
            ranks=ranks,
            state=RunState(),
            ladder=MemoryLadder.of(policy),
            buffers=BufferKeeper(parts.models, StateKeeper(changeable_states(parts))),
            loss_scale=loss_scale,
            created_state=CreatedState(parts.optimizers),
            earlier_gradients=EarlierGradients(loss_scale),
            diagnosis=Diagnosis(parts, policy, record),
            cursor=cursor,
            schedules=schedules,
            spikes=SpikeDetector(objective=policy.objective),
            counters=Counters(),
        )
