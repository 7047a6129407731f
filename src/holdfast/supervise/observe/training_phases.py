"""`TrainingPhases`: the phases of training, and the phases to return to after an interruption.

The board shows the current phase. Saving, evaluation and compilation interrupt training, from
whichever phase it is in.
"""

from __future__ import annotations

from holdfast.recorder.progress import ProcessPhase
from holdfast.supervise.observe.observed_process import ObservedProcess, noted


class TrainingPhases:
    """Shows the phases of a process that do not depend on its steps."""

    def __init__(self, observer: ObservedProcess) -> None:
        self.observer = observer
        # The phase that forward and backward belong to: the first step is a phase of its own.
        self.training = ProcessPhase.FIRST_STEP
        # The phases to return to afterwards.
        self._before_interruption = ProcessPhase.STARTING
        self._before_compiling = ProcessPhase.STARTING

    @noted
    def interruption_begins(self, phase: ProcessPhase) -> None:
        """Show `phase`: something that interrupts training begins, such as a save."""
        self._before_interruption = self.observer.board.phase
        self.observer.board.enter(phase)

    @noted
    def interruption_ends(self) -> None:
        """Return to the phase before `interruption_begins`; it may have ended in an exception."""
        self.observer.board.enter(self._before_interruption)

    @noted
    def evaluation_begins(self) -> None:
        """A module was switched to eval mode, which may be the only sign of an evaluation."""
        board = self.observer.board
        trains = board.phase in (ProcessPhase.FORWARD_BACKWARD, ProcessPhase.END_OF_EPOCH)
        if board.steps_made > 0 and trains:
            board.enter(ProcessPhase.EVALUATION)

    @noted
    def compile_begins(self) -> None:
        """A part of the model is about to be compiled by torch."""
        self.training = ProcessPhase.FIRST_STEP
        board = self.observer.board
        if board.phase not in (ProcessPhase.DATA_WAIT, ProcessPhase.SAVING, ProcessPhase.ENDING):
            self._before_compiling = board.phase
            board.enter(ProcessPhase.FIRST_STEP)

    @noted
    def compile_ends(self) -> None:
        """The compilation has finished."""
        board = self.observer.board
        if board.steps_made > 0:
            self.training = ProcessPhase.FORWARD_BACKWARD
        if board.phase is not ProcessPhase.FIRST_STEP:
            return
        if self._before_compiling is ProcessPhase.STARTING:
            board.enter(ProcessPhase.FIRST_STEP)
        else:
            board.enter(self._before_compiling)
