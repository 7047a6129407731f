"""`LoopClock`: add up what the training loop spends its time on, and publish it on the board.

`explain.speed` judges from these times why a run is slow. They are counted from the end of the
first step, and published at the end of a step, so what happens after the last step is not included.
All times are in nanoseconds on the monotonic clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.recorder.progress import ProcessPhase

if TYPE_CHECKING:
    from holdfast.recorder.progress import ProgressBoard

# The minimum interval between two writes to the board.
_WRITE_INTERVAL = 20_000_000


class LoopClock:
    """Adds up the times of one process's training loop.

    The tracker adds to the public attributes directly, because a method call at each hook would
    cost time at every step.

    Args:
        now: The time from which the steps are counted.
    """

    def __init__(self, now: int = 0) -> None:
        self._began_at = now
        self.steps = 0
        # When the times are next published.
        self.publish_at = 0
        self.epochs = 0
        self.waited = 0
        self.waited_for_first_batches = 0
        self.backward = 0
        self.optimizer = 0
        self.uses_device = False
        # Whether the loop waits for the first batch of an epoch.
        self.starts_epoch = False
        # When the evaluation in progress began; 0 if there is none.
        self.evaluation_began_at = 0
        # Whether a call of `Module.eval` began it. It then ends with a call of `Module.train`.
        self.evaluation_has_end = False
        self._evaluated = 0
        self._evaluations = 0
        self._saved = 0
        self._saves = 0
        # The value of `_saved` when the evaluation in progress began.
        self._saved_before_evaluation = 0

    def publish(self, board: ProgressBoard, now: int) -> None:
        """Write the times to the board at the end of a step."""
        self.publish_at = now + _WRITE_INTERVAL
        board.write_loop_times(
            self.steps,
            self.epochs,
            self._evaluations,
            self._saves,
            int(self.uses_device),
            now - self._began_at,
            self.waited,
            self.waited_for_first_batches,
            self._evaluated,
            self._saved,
            self.backward,
            self.optimizer,
        )

    def add_interruption(self, phase: ProcessPhase, nanoseconds: int) -> None:
        """Add the time for which training was interrupted, by saving or by starting workers."""
        if phase is ProcessPhase.SAVING:
            self._saved += nanoseconds
            self._saves += 1
        elif phase is ProcessPhase.DATA_WAIT and not self.evaluation_began_at:
            self.waited += nanoseconds
            self.waited_for_first_batches += nanoseconds

    def begin_evaluation(self, now: int, *, has_end: bool) -> None:
        """Note that an evaluation begins, unless one is in progress."""
        if self.evaluation_began_at:
            return
        self.evaluation_began_at = now
        self.evaluation_has_end = has_end
        self._saved_before_evaluation = self._saved

    def end_evaluation(self, now: int) -> None:
        """Note that the evaluation in progress, if any, has ended."""
        if not self.evaluation_began_at:
            return
        saved = self._saved - self._saved_before_evaluation
        self._evaluated += now - self.evaluation_began_at - saved
        self._evaluations += 1
        self.evaluation_began_at = 0
