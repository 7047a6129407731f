"""Compare the steps that a resumed run repeats with the recording of its earlier attempt.

A run that was killed resumes from its newest checkpoint and repeats the steps since then. Their
losses and gradient norms are in the recording, so the resume can be checked: if it is exact, the
repeated steps have the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.reader import StepRecord, read_events, read_steps

# The relative tolerances of `torch.testing.assert_close`, by the precision of the forward pass.
_TOLERANCES = {"fp32": 1.3e-6, "bf16": 1.6e-2, "fp16": 1e-3}
# Where operations are not deterministic, differences grow from step to step, so only the first
# repeated steps must agree within the tolerance.
_COMPARABLE_STEPS = 3
# The kinds of events after which a run no longer repeats its earlier steps.
_DIVERTED = frozenset({"rolled_back", "repeated_step_differs"})


def lost_steps(recording: Path, resumed_step: int) -> dict[int, StepRecord]:
    """Return the recorded steps after the one from which a run resumes, by global step.

    Steps from before the last rollback are left out, because the run has continued with other
    batches since then. So are steps from before an attempt that already differed from them, for
    example because the script was changed.

    Args:
        recording: The folder of the recording.
        resumed_step: The global step of the checkpoint.
    """
    try:
        steps = read_steps(recording)
        events = read_events(recording)
    except (OSError, HoldfastError):
        # The recording is damaged, or does not exist.
        return {}
    diverted_at = max(
        (event.unix_seconds for event in events if event.kind in _DIVERTED), default=0.0
    )
    return {
        step.global_step: step
        for step in steps
        if step.mark is StepMark.COMMITTED
        and step.global_step > resumed_step
        and step.unix_seconds > diverted_at
    }


class RepeatedSteps:
    """Compares repeated steps with the same steps of an earlier attempt.

    Args:
        earlier: The steps of the earlier attempt by global step. It must not be empty.
        is_exact: Whether a repeated step must have the same bits. False on accelerators without
            deterministic algorithms.
        precision: ``Policy.precision``.
    """

    def __init__(
        self, earlier: Mapping[int, StepRecord], *, is_exact: bool, precision: str
    ) -> None:
        self._earlier = earlier
        self._last = max(earlier)
        self._is_exact = is_exact
        self._tolerance = 0.0 if is_exact else _TOLERANCES[precision]
        self._compared = 0
        self._largest_difference = 0.0
        # Whether the comparison has ended.
        self.is_complete = False

    def allow_any_precision(self) -> None:
        """Use the largest tolerance, because a loop of its own may use autocast."""
        if not self._is_exact:
            self._tolerance = max(_TOLERANCES.values())

    def compare(
        self,
        global_step: int,
        micro_batch_size: int,
        loss: float | None,
        grad_norm: float | None,
    ) -> EventData | None:
        """Compare one committed step.

        The comparison ends at the first step whose batch was split differently, since the sums of
        its gradients may be rounded differently.

        Args:
            global_step: The global step that includes the step.
            micro_batch_size: The number of samples per forward pass, or 0 if it is unknown.
            loss: Its loss, or None if it was not read.
            grad_norm: Its gradient norm, or None if it was not read.

        Returns:
            The event to record: that a step differs, or, after the last step, that all are equal.
        """
        step = self._earlier.get(global_step)
        if step is not None:
            if step.micro_batch_size != micro_batch_size:
                return self.finish()
            difference = _largest_difference([(step.loss, loss), (step.grad_norm, grad_norm)])
            must_agree = self._is_exact or self._compared < _COMPARABLE_STEPS
            if must_agree and difference > self._tolerance:
                self.is_complete = True
                return run_events.RepeatedStepDiffers(
                    loss=loss,
                    grad_norm=grad_norm,
                    earlier_loss=step.loss,
                    earlier_grad_norm=step.grad_norm,
                    equal_steps=self._compared,
                )
            self._compared += 1
            self._largest_difference = max(self._largest_difference, difference)
        if global_step < self._last:
            return None
        return self.finish()

    def finish(self) -> EventData | None:
        """End the comparison, and return the event about the steps that were compared, if any."""
        if self.is_complete:
            return None
        self.is_complete = True
        if self._compared == 0:
            return None
        return run_events.StepsRepeated(
            steps=self._compared, largest_difference=self._largest_difference
        )


def _largest_difference(pairs: Iterable[tuple[float | None, float | None]]) -> float:
    """Return the largest relative difference of the pairs of which both values are known."""
    return max(
        (
            _relative_difference(earlier, now)
            for earlier, now in pairs
            if earlier is not None and now is not None
        ),
        default=0.0,
    )


def _relative_difference(earlier: float, now: float) -> float:
    if earlier == now or (math.isnan(earlier) and math.isnan(now)):
        return 0.0
    if not (math.isfinite(earlier) and math.isfinite(now)):
        return math.inf
    return abs(now - earlier) / max(abs(earlier), abs(now))
