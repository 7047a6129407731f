"""One whole step of a run: the engine makes it, and here it is counted, recorded, judged, or recovered from.

Does not: know batches that come one by one (see ``accumulation``), or when to save (see ``loop``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.errors import OutOfMemoryError
from holdfast.guard.result import Outcome, PartialOptimizerStep, StepResult
from holdfast.guard.run.recovery import Recovery, series_of
from holdfast.guard.run.schedules import advance
from holdfast.guard.run.session import Session
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.step.engine import StepEngine
from holdfast.loader.splitting import Split
from holdfast.recorder.black_box import StepMark


class Steps:
    """Drives the step engine for one run. Its attributes are the seam for others who drive it."""

    def __init__(self, session: Session, engine: StepEngine, recovery: Recovery) -> None:
        self.session = session
        self.engine = engine
        self.recovery = recovery
        self.parts = session.parts
        self._record = session.record
        self._clock = session.clock
        self._opened_at = self._clock.monotonic_seconds()

    def step(
        self, batch: Any, loss_fn: LossFunction, names: Sequence[str], *, split: Split | None, stop_requested: bool
    ) -> StepResult:
        """Make a step; see `Guard.step`."""
        state, diagnosis = self.session.state, self.engine.diagnosis
        started = self._clock.monotonic_seconds()
        series = series_of(names, loss_fn)
        diagnosis.given(batch, again=state.batch_is_used)
        self._record.step(StepMark.BEGUN, self.session.ladder.plan.micro_batch_size, None, None, 0.0)
        try:
            outcome = self.engine.run(
                batch,
                loss_fn,
                names,
                split=split,
                stop_requested=stop_requested,
                judge=lambda attempt: self.recovery.judge(series, attempt),
            )
            if outcome.committed:
                self._committed(outcome, names, series)
        except PartialOptimizerStep as error:
            partial = error
        except BaseException as error:
            state.step_failed()
            if isinstance(error, OutOfMemoryError):
                self.session.saving.save()  # the weights are those of the last step: keep them
            raise
        else:
            self.session.counters.out_of_memory += outcome.out_of_memory
            reason = None
            if not outcome.committed:
                state.skipped()
                reason = self.recovery.after_refused_step(outcome)
            diagnosis.step_ended(outcome, names, reason)
            if outcome.committed:
                self.engine.search_cause(batch, loss_fn, names, split, self._clock, self._opened_at)
            facts, mark = outcome.attempt.facts, StepMark.COMMITTED if outcome.committed else StepMark.SKIPPED
            seconds = self._clock.monotonic_seconds() - started
            self._record.step(mark, outcome.attempt.micro_batch_size, facts.loss, facts.total, seconds)
            return outcome.result(reason)
        return self._undone(partial)

    def _undone(self, partial: PartialOptimizerStep) -> StepResult:
        """Go back after an optimizer ran out of memory half-way; outside of the handler, which keeps its frames."""
        state = self.session.state
        try:
            reason = self.recovery.after_partial_step(partial, rewind_data=state.in_loop)
        except BaseException:
            state.spoil()
            raise
        if state.in_loop:
            state.rewound()
        return partial.outcome.result(reason)

    def _committed(self, outcome: Outcome, names: Sequence[str], series: str) -> None:
        """Do all that belongs to a committed step; before the end of it the state is no boundary's."""
        session, facts = self.session, outcome.attempt.facts
        self._record.global_step += 1
        if session.policy.spike_action != "off":
            session.spikes.accepted(series, facts.loss, facts.total)
        if outcome.attempt.dropped:
            self.recovery.micro_batches_dropped(outcome.attempt.dropped)
        if outcome.dropped and outcome.provenance is not None:
            self.recovery.dropped(outcome.provenance)
        session.counters.note_good_step(self._record.global_step)
        if facts.overflowed:
            self._record.happened("norm_overflowed", total=facts.total)
        if session.policy.scheduler_interval == "step":
            advance(self.parts.schedulers, self.parts.optimizers, names)
        larger = session.ladder.decide_after_step(batch_size=outcome.size or 1, attempts=outcome.attempts)
        if larger is not None:
            self._record.decided(larger)
        self.engine.finished()
