"""`TrainingPhases`: the phases of training, and the phases to return to after an interruption.

The board shows the current phase. Saving, evaluation and compilation interrupt training, from
whichever phase it is in.
"""

from __future__ import annotations

from holdfast.recorder.progress import Phase
from holdfast.supervise.observe.observed_process import ObservedProcess, noted


class TrainingPhases:
    """Shows the phases of a process that do not depend on its steps."""

    def __init__(self, observer: ObservedProcess) -> None:
        self.observer = observer
        # The phase that forward and backward belong to: the first step is a phase of its own.
        self.training = Phase.FIRST_STEP
        # The phases to return to afterwards.
        self._before_aside = Phase.STARTING
        self._before_compiling = Phase.STARTING

    @noted
    def aside_begins(self, phase: Phase) -> None:
        """Something other than training begins, such as saving."""
        self._before_aside = self.observer.board.phase
        self.observer.board.enter(phase)

    @noted
    def aside_ends(self) -> None:
        """Whatever `aside_begins` announced has ended, perhaps with an exception."""
        self.observer.board.enter(self._before_aside)

    @noted
    def evaluation_begins(self) -> None:
        """A module was switched to eval mode, which may be the only sign of an evaluation."""
        board = self.observer.board
        trains = board.phase in (Phase.FORWARD_BACKWARD, Phase.END_OF_EPOCH)
        if board.made > 0 and trains:
            board.enter(Phase.EVALUATION)

    @noted
    def compile_begins(self) -> None:
        """A part of the model is about to be compiled by torch."""
        self.training = Phase.FIRST_STEP
        board = self.observer.board
        if board.phase not in (Phase.DATA_WAIT, Phase.SAVING, Phase.ENDING):
            self._before_compiling = board.phase
            board.enter(Phase.FIRST_STEP)

    @noted
    def compile_ends(self) -> None:
        """The compilation has finished."""
        board = self.observer.board
        if board.made > 0:
            self.training = Phase.FORWARD_BACKWARD
        if board.phase is not Phase.FIRST_STEP:
            return
        if self._before_compiling is Phase.STARTING:
            board.enter(Phase.FIRST_STEP)
        else:
            board.enter(self._before_compiling)
