"""Apply a remedy after a failed attempt, so that the next attempt can succeed.

After an out-of-memory error, the memory ladder chooses the remedy and `StepRemedies` applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.core.errors import OutOfMemoryError
from holdfast.core.events import run_events
from holdfast.core.events.data import Promise
from holdfast.core.events.decisions import Decision, Stop
from holdfast.core.events.decisions import Split as SplitDecision
from holdfast.guard.context import RunContext
from holdfast.guard.saving.reserves import Reserves
from holdfast.guard.state.work import Work
from holdfast.guard.step.attempts import Attempts
from holdfast.guard.step.failures import (
    Failure,
    NotMeasurable,
    NotRecomputable,
    OtherRankFailed,
    OutOfMemory,
    PartWithoutItems,
)
from holdfast.memory.ladder import Remedies
from holdfast.memory.onednn import is_onednn_failure, switch_off_if_broken, switch_off_if_unsafe
from holdfast.memory.oom import release_memory
from holdfast.memory.recompute import COMPILED
from holdfast.memory.saved_bytes import NOTHING_SAVES


class StepRemedies:
    """Applies a remedy after each failed attempt, which the engine has already undone.

    Args:
        context: The objects that the parts of the run share.
        attempts: The object that makes the attempts.
        reserves: Host memory that can be freed if the CPU runs out of memory.
    """

    def __init__(self, context: RunContext, attempts: Attempts, reserves: Reserves) -> None:
        self._parts = context.parts
        self._record = context.record
        self._ranks = context.ranks
        self._ladder = context.ladder
        self._attempts = attempts
        self._safety = attempts.safety
        self._reserves = reserves
        self._devices = context.parts.devices()
        # Whether to report that no module is worth recomputing. False after the first report.
        self._reports_no_gain = context.policy.recompute is True
        # The names of the optimizers that have stepped, so that the oneDNN kernels for their whole
        # batches exist already.
        self._stepped: set[str] = set()

    def note_committed(self, names: Sequence[str]) -> None:
        """Record that these optimizers have stepped."""
        self._stepped.update(names)

    def apply(self, work: Work, failure: Failure) -> None:
        """Apply the remedy for a failure before the attempt is repeated.

        Raises:
            OutOfMemoryError: H401 if no remedy is left.
        """
        match failure:
            case OtherRankFailed():
                # This rank repeats the attempt unchanged.
                pass
            case PartWithoutItems():
                self._leave_out_or_stop_splitting(work, failure)
            case NotMeasurable():
                self._reports_no_gain = False
                self._attempts.give_up_measuring(failure.description)
            case NotRecomputable():
                self._stop_recomputing(failure)
            case OutOfMemory():
                self._make_room(work, failure.description)

    def _leave_out_or_stop_splitting(self, work: Work, failure: PartWithoutItems) -> None:
        """Run a trial with a part without items. If it must not be left out, stop splitting."""
        may_split = self._safety.try_leaving_out(work, failure.place)
        if not may_split:
            self._ladder.without_split()

    def _stop_recomputing(self, failure: NotRecomputable) -> None:
        """Stop recomputing the module that cannot be recomputed."""
        self._attempts.give_up_recomputing(self._ladder.plan, failure.block, failure.why)
        self._ladder.without_recompute()
        # The frames of the attempt are in reference cycles, which must be collected.
        release_memory(self._devices)

    # --- out of memory

    def _make_room(self, work: Work, error: str) -> None:
        """Free memory that is not needed, and let the ladder choose a remedy.

        Args:
            work: The input of the step.
            error: The allocator's message.
        """
        if self._parts.device_type() == "cpu":
            self._reserves.free()
        release_memory(self._devices)
        if is_onednn_failure(error) and switch_off_if_broken():
            # The batch may fit, since only oneDNN has failed. Retry with torch's own kernels.
            self._record.emit(run_events.OnednnSwitchedOff())
            return
        work.out_of_memory += 1
        self._decide(work, error)

    def _decide(self, work: Work, error: str) -> None:
        """Let the ladder choose a remedy for an out-of-memory error, and record both.

        Raises:
            OutOfMemoryError: H401 if no remedy is left.
        """
        plan = self._ladder.plan
        size = work.size or 1
        self._record.emit(
            run_events.OutOfMemory(
                error=error,
                attempt=work.attempts,
                micro_batch_size=plan.samples(size),
                recompute=bool(plan.recompute),
            )
        )
        remedies = self._possible_remedies(work)
        if not remedies.recompute:
            self._report_no_gain(work)
        decision = self._ladder.decide_after_oom(
            batch_size=size, failures=work.out_of_memory, remedies=remedies
        )
        decision = self._attempts.with_kept_promise(decision, work)
        if isinstance(decision, Stop):
            self._record.emit(replace(decision, rule="H401"))
            raise self._does_not_fit(work, error, decision.reason)
        self._record.emit(decision)
        self._avoid_unsafe_kernels(work, decision)

    def _report_no_gain(self, work: Work) -> None:
        """Report once why no module is recomputed, although the policy asks for it."""
        if not self._reports_no_gain or not work.prepared or work.out_of_memory < 2:
            return
        self._reports_no_gain = False
        why = COMPILED if self._attempts.compiled else NOTHING_SAVES
        self._record.emit(run_events.RecomputeImpossible(why=why))

    def _avoid_unsafe_kernels(self, work: Work, decision: Decision) -> None:
        """Turn oneDNN off if it would have to create kernels while memory is short.

        oneDNN creates a kernel for each new size. If the memory for it cannot be allocated, oneDNN
        may crash.
        """
        needs_new_kernels = isinstance(decision, SplitDecision) or not self._stepped.issuperset(
            work.names
        )
        if not needs_new_kernels or self._parts.device_type() != "cpu":
            return
        if switch_off_if_unsafe(self._parts.models.values()):
            self._record.emit(run_events.OnednnSwitchedOff())

    def _possible_remedies(self, work: Work) -> Remedies:
        """Return the remedies that are possible for a step that ran out of memory."""
        if not work.prepared:
            return Remedies(
                no_split="the state of the optimizer does not fit, whatever the micro-batch"
            )
        if work.out_of_memory == 1 and not self._ladder.on_trial:
            # The first remedy is to retry without changes, which needs no further information.
            return Remedies()
        if self._ranks.why_only_retry is not None:
            return Remedies(no_split=self._ranks.why_only_retry)
        # On accelerators, kernels may sum in a different order each time.
        exact = self._parts.device_type() == "cpu"
        promise: Promise = "bit-exact" if exact else "equal up to rounding"
        modules = self._attempts.modules_to_recompute(self._ladder.plan)
        if self._ladder.can_recompute_more(modules):
            # The ladder recomputes more modules before it splits, so no split need be tried yet.
            split_promise = self._safety.promise_of_split(work.loss_fn)
            return Remedies(
                recompute=modules, recompute_promise=promise, split_promise=split_promise
            )
        remedies = self._safety.find_remedies(work)
        return replace(remedies, recompute=modules, recompute_promise=promise)

    def _does_not_fit(self, work: Work, error: str, reason: str) -> OutOfMemoryError:
        """Return error H401 for a step that does not fit into memory with any remedy."""
        if work.size is None:
            batch = "the batch"
            fix = (
                "pass split= with the batch dimension of each part, for example split={'frames': 1,"
                " 'mask': None, 'targets': 'items'}, so that the batch can be split; or free"
                " memory, or use a smaller batch or model; "
            )
        else:
            batch = f"a batch of {work.size} samples"
            fix = (
                "free memory, or use a smaller batch or model; or make the batch splittable: return"
                " Loss(mean, items) if samples are independent, TwoPass(outputs, loss) if the loss"
                " compares them, or allow the refused split with Policy(allow_split_with=...); "
            )
        return OutOfMemoryError(
            f"{batch} does not fit into memory, after {work.attempts} attempts ({error})",
            limit=reason,
            fix=fix + "the weights are those of the last committed step.",
            rule="H401",
        )
