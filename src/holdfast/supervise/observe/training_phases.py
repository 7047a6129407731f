"""`TrainingPhases`: show saving, evaluation and compilation on the progress board.

These activities can interrupt any phase of training. After saving and compilation, the board
returns to the phase that was interrupted.
"""

from __future__ import annotations

from time import monotonic_ns

from holdfast.recorder.progress import ProcessPhase
from holdfast.supervise.observe.loop_clock import LoopClock
from holdfast.supervise.observe.observed_process import ObservedProcess, noted


class TrainingPhases:
    """Updates the phase on the progress board when training is interrupted."""

    def __init__(self, observer: ObservedProcess) -> None:
        self.observer = observer
        # The phase to show during forward and backward. The first step has a phase of its own.
        self.training = ProcessPhase.FIRST_STEP
        # The phases to return to after an interruption.
        self._before_interruption = ProcessPhase.STARTING
        self._interrupted_at = 0
        # What the loop spends its time on. It is replaced when the first step has ended.
        self.clock = LoopClock()
        self._before_compiling = ProcessPhase.STARTING

    @noted
    def interruption_begins(self, phase: ProcessPhase) -> None:
        """Show `phase` on the board, because an interruption such as a save begins."""
        self._before_interruption = self.observer.board.phase
        self._interrupted_at = self.observer.board.enter(phase)

    @noted
    def interruption_ends(self) -> None:
        """Show the phase that was interrupted again. Also called after an exception."""
        board = self.observer.board
        phase = board.phase
        now = board.enter(self._before_interruption)
        self.clock.add_interruption(phase, now - self._interrupted_at)

    @noted
    def evaluation_begins(self) -> None:
        """Called when a module is switched to eval mode, often the only sign of an evaluation.

        The board shows the evaluation only if training was in progress.
        """
        board = self.observer.board
        trains = board.phase in (ProcessPhase.FORWARD_BACKWARD, ProcessPhase.END_OF_EPOCH)
        if board.steps_made > 0 and trains:
            self.clock.begin_evaluation(board.enter(ProcessPhase.EVALUATION), has_end=True)

    @noted
    def loader_without_gradients_begins(self) -> None:
        """Called when a loader is started while gradients are disabled, as in an evaluation."""
        self.clock.begin_evaluation(monotonic_ns(), has_end=False)

    @noted
    def evaluation_ends(self) -> None:
        """Called when a module is switched to train mode.

        The board keeps its phase, because nothing shows whether training continues at once.
        """
        self.clock.end_evaluation(monotonic_ns())

    @noted
    def compile_begins(self) -> None:
        """Called when torch is about to compile a part of the model."""
        self.training = ProcessPhase.FIRST_STEP
        board = self.observer.board
        if board.phase not in (ProcessPhase.DATA_WAIT, ProcessPhase.SAVING, ProcessPhase.ENDING):
            self._before_compiling = board.phase
            board.enter(ProcessPhase.FIRST_STEP)

    @noted
    def compile_ends(self) -> None:
        """Called when the compilation has finished."""
        board = self.observer.board
        if board.steps_made > 0:
            self.training = ProcessPhase.FORWARD_BACKWARD
        if board.phase is not ProcessPhase.FIRST_STEP:
            return
        if self._before_compiling is ProcessPhase.STARTING:
            board.enter(ProcessPhase.FIRST_STEP)
        else:
            board.enter(self._before_compiling)
