"""`StepTracker`: recognize training steps in the script's calls to torch.

A step ends when an optimizer has stepped. If several optimizers step after the same backward call,
they count as one step. Without an optimizer, every backward call counts as a step. If a guard owns
the optimizer, steps have the guard's numbers; otherwise numbering continues from the step count in
the optimizer's state, if there is one. Only one thread is tracked: the main thread at first, then
the thread that calls backward. Other threads may load, save and evaluate at the same time.

No error may reach the script. Methods that run at every step catch errors inline and avoid calling
small functions, because each call costs up to a microsecond, which matters for small steps. Other
methods use the decorator `noted`.

``hooks`` calls this class, and ``step_writer`` records the steps.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns as _now
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast.recorder.progress import ProcessPhase
from holdfast.recorder.run_files import guarded
from holdfast.supervise.observe.loop_clock import LoopClock
from holdfast.supervise.observe.observed_process import ObservedProcess, noted
from holdfast.supervise.observe.optimizer_facts import only_creates_state, steps_before_this
from holdfast.supervise.observe.step_writer import Step, StepWriter
from holdfast.supervise.observe.training_phases import TrainingPhases
from holdfast.supervise.observe.values import NOT_READ, MemoryReader, PendingValue, ValueReader

if TYPE_CHECKING:
    from holdfast.recorder.progress import ProgressBoard

# If an optimizer exists but never reports a step, its step is compiled, so hooks do not run. After
# this many backward calls, each further call counts as a step. Gradient accumulation over more
# micro-batches is rare.
_MAX_BACKWARDS_WITHOUT_STEP = 256
# The loss and the gradient norm are read at each of the first steps, and then only once per
# interval. A NaN that matters will still be there at the next reading.
_STEPS_ALL_READ = 1000
_READ_PAUSE_NANOSECONDS = 2_000_000
# The board stores the number of steps in 32 bits.
_MADE_MASK = 0xFFFFFFFF
# Looking up an enum member is slow, so these are module constants.
_DATA_WAIT = ProcessPhase.DATA_WAIT
_EVALUATION = ProcessPhase.EVALUATION
_OPTIMIZER = ProcessPhase.OPTIMIZER


class TrainingThread:
    """State of the thread that trains: which of the wrapped calls it is currently in.

    ``hooks`` uses it to report only the outermost of nested calls.
    """

    def __init__(self, identifier: int) -> None:
        self.identifier = identifier
        # Whether the thread is waiting for a loader.
        self.is_waiting = False
        # Whether the thread is doing something other than training, such as saving.
        self.is_interrupted = False
        self.in_backward = False


class StepTracker:
    """Counts and records the training steps of this process.

    Args:
        observer: Provides the progress board and records events.
        torch: The torch module, as the script imported it.
        has_optimizer: Returns whether any optimizer has been created.
    """

    def __init__(
        self, observer: ObservedProcess, torch: ModuleType, has_optimizer: Callable[[], bool]
    ) -> None:
        self.observer = observer
        self._has_optimizer = has_optimizer
        # `torch.compiler.is_compiling` would cost a second function call.
        self.is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        self._values = ValueReader(torch)
        self._read = self._values.read
        self._memory = MemoryReader(torch)
        main_thread = sys.modules["threading"].main_thread().ident
        self._reset(main_thread if main_thread is not None else get_ident())

    def reset_after_fork(self) -> None:
        """Discard all state in a forked process."""
        self._values.reset_after_fork([self._step, self._writer.late_values])
        self._memory.reset()
        self._reset(get_ident())

    @noted
    def finish(self) -> None:
        """Complete the samples whose values have arrived, without waiting for the other values."""
        self._writer.complete()

    def _reset(self, thread: int) -> None:
        self.thread = TrainingThread(thread)
        self.phases = TrainingPhases(self.observer)
        self._writer = StepWriter(self.observer, self._values)
        # The step in progress.
        self._step = Step()
        # Monotonic time in nanoseconds at which loss and norm are read again.
        self._next_read = 0
        # The loss that a gradient scaler scaled most recently, and a weak reference to the scaled
        # loss.
        self._scaled_loss: tuple[Any, Any] | None = None
        # The duration of the newest wait for a loader.
        self._newest_wait = 0
        # When the backward call and the optimizer step in progress began, and what the loop's clock
        # had added up for backward calls when the optimizer step began.
        self._backward_began_at = 0
        self._optimizer_began_at = 0
        self._backward_before_optimizer = 0
        # Whether an optimizer is stepping, and the phase before its step.
        self._in_optimizer = False
        self._phase_before_optimizer = ProcessPhase.STARTING
        # `id` of the optimizer that ended the last step; 0 if none has stepped yet.
        self._last_optimizer_id = 0
        # `id` of every optimizer that has ended a step.
        self._optimizer_ids: set[int] = set()
        # As long as no optimizer has stepped, every backward call after this many counts as a step.
        # None before the first backward call.
        self._max_backwards_without_step: int | None = None
        # None until the supervisor has requested a leak trace.
        self._leak_tracer: Any = None

    # --- loader ---

    def wait_begins(self, *, grad_enabled: bool = True) -> None:
        """Called when the training loop requests a batch from a loader.

        Args:
            grad_enabled: Whether gradients are enabled. If not, the batch is for an evaluation.
        """
        try:
            now = self.observer.board.enter(_DATA_WAIT)
            clock = self.phases.clock
            if not grad_enabled:
                clock.begin_evaluation(now, has_end=False)
            elif clock.evaluation_began_at and not clock.evaluation_has_end:
                clock.end_evaluation(now)
            step = self._step
            step.wait_began_at = now
            step.began_at = step.began_at or now
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.observer.note_error(error)

    def wait_ends(self, phase: ProcessPhase | None) -> None:
        """Called when the loader has returned a batch or is exhausted.

        Args:
            phase: The phase to show next; None for training.
        """
        try:
            board = self.observer.board
            clock = self.phases.clock
            evaluates = clock.evaluation_began_at != 0
            if phase is None:
                phase = _EVALUATION if evaluates else self.phases.training
            now = board.enter(phase)
            step = self._step
            waited = now - step.wait_began_at
            self._newest_wait = waited
            if evaluates:
                board.count_wait_as_evaluation(waited)
            else:
                step.waited += waited
                clock.waited += waited
                if clock.starts_epoch:
                    clock.waited_for_first_batches += waited
            clock.starts_epoch = False
            if phase is ProcessPhase.END_OF_EPOCH and not clock.evaluation_has_end:
                # The loader of an evaluation without gradients is exhausted.
                clock.end_evaluation(now)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.observer.note_error(error)

    @noted
    def loader_begins(self, loader: Any) -> None:
        """Called when the training loop starts to iterate over a loader."""
        self._writer.note_loader(loader)
        clock = self.phases.clock
        if not clock.evaluation_began_at:
            clock.epochs += 1
            clock.starts_epoch = True

    # --- backward ---

    @noted
    def loss_scaled(self, loss: Any, scaled: Any) -> None:
        """Called when a gradient scaler has scaled a loss.

        Args:
            loss: The loss before scaling.
            scaled: Weak reference to the scaled loss, on which the script will call backward.
        """
        self._scaled_loss = (loss, scaled)

    def backward_begins(self, root: Any) -> None:
        """Called when backward starts.

        Args:
            root: The tensor on which backward is called; None if there are several.
        """
        try:
            self.thread.identifier = get_ident()
            # The gradients now change, so a norm that is computed from now on does not belong to
            # the newest sample.
            self._writer.newest_sample = 0
            board = self.observer.board
            step = self._step
            if board.phase is not self.phases.training:
                now = board.enter(self.phases.training)
                step.began_at = step.began_at or now
            self._backward_began_at = now = _now()
            if self.phases.clock.evaluation_began_at:
                self._end_evaluation(now)
            if self._scaled_loss is not None:
                root = self._take_unscaled_loss(root)
            if root is not None and step.reads_values:
                if step.loss is not None:
                    self._keep_earlier_loss(step.loss)
                step.loss = self._read(root)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.observer.note_error(error)

    def _end_evaluation(self, now: int) -> None:
        """End the evaluation in progress, because a backward call shows that training continues.

        If the script has not called `Module.train`, the newest wait was for a training batch.
        """
        clock = self.phases.clock
        step = self._step
        if step.wait_began_at <= clock.evaluation_began_at:
            clock.end_evaluation(now)
            return
        clock.end_evaluation(step.wait_began_at)
        step.waited += self._newest_wait
        clock.waited += self._newest_wait

    def _take_unscaled_loss(self, root: Any) -> Any:
        """Return the loss before scaling, or None if backward was called on a different tensor.

        For example, a sum of scaled losses cannot be unscaled.
        """
        assert self._scaled_loss is not None
        loss, scaled = self._scaled_loss
        self._scaled_loss = None
        return loss if scaled() is root else None

    def _keep_earlier_loss(self, loss: float | PendingValue) -> None:
        """Keep the loss of an earlier backward call in this step, to add it to the step's loss."""
        step = self._step
        if not isinstance(loss, PendingValue):
            step.earlier_loss += loss
        elif loss.has_arrived():
            step.earlier_loss += loss.value()
            self._values.release(loss)
        else:
            step.earlier_parts = (*step.earlier_parts, loss)

    def backward_ends(self) -> None:
        """Called when backward has returned."""
        try:
            board = self.observer.board
            board.micro_step += 1
            self.phases.clock.backward += _now() - self._backward_began_at
            if self._max_backwards_without_step is None:
                self.observer.set_role("trainer")
                self._max_backwards_without_step = (
                    _MAX_BACKWARDS_WITHOUT_STEP if self._has_optimizer() else 0
                )
            no_optimizer_steps = self._last_optimizer_id == 0
            if no_optimizer_steps and board.micro_step > self._max_backwards_without_step:
                # No optimizer has stepped, so every backward call counts as a step.
                self._end_step(board, None)
            elif self._in_optimizer and board.steps_made > 0:
                # The closure of an optimizer called backward, and the optimizer's step continues.
                board.enter(_OPTIMIZER)
            else:
                # Entering the same phase again counts as progress.
                board.enter(board.phase)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.observer.note_error(error)

    def norm_computed(self, norm: Any, *_: Any) -> None:
        """Called when the script has computed the gradient norm."""
        try:
            step = self._step
            if not step.reads_values:
                return
            value = self._read(norm)
            if self._writer.newest_sample:
                # The step to which these gradients belong has already ended.
                self._writer.amend_norm(value)
                return
            if isinstance(step.norm, PendingValue):
                self._values.release(step.norm)
            step.norm = value
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.observer.note_error(error)

    # --- optimizer ---

    def optimizer_begins(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Called when an optimizer is about to step. Its closure may call backward."""
        if self.is_compiling():
            return
        try:
            self.thread.identifier = get_ident()
            self._in_optimizer = True
            board = self.observer.board
            self._phase_before_optimizer = board.phase
            self._optimizer_began_at = _now()
            self._backward_before_optimizer = self.phases.clock.backward
            if board.steps_made > 0:
                board.enter(_OPTIMIZER)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.observer.note_error(error)

    def optimizer_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Called when an optimizer has stepped."""
        if self.is_compiling():
            return
        try:
            self._in_optimizer = False
            board = self.observer.board
            step = self._step
            clock = self.phases.clock
            # The closure of an optimizer calls backward, which has already been counted.
            backward = clock.backward - self._backward_before_optimizer
            clock.optimizer += _now() - self._optimizer_began_at - backward
            had_backward = board.micro_step != step.first_micro_step
            if not had_backward and self._skips_step_without_backward(board, optimizer):
                return
            self._last_optimizer_id = id(optimizer)
            rate = optimizer.param_groups[0].get("lr")
            # If the learning rate is a tensor on a GPU, reading it could wait for the GPU.
            if isinstance(rate, (int, float)):
                step.learning_rate = rate
            self._end_step(board, optimizer)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.observer.note_error(error)

    def _skips_step_without_backward(self, board: ProgressBoard, optimizer: Any) -> bool:
        """Return whether an optimizer step without a backward call is not a step of its own.

        This is true of two kinds of optimizer steps: those that only create the optimizer's state,
        and those of another optimizer after the same backward call. For these, this method also
        restores the phase. All others count as steps, because the script has computed the gradients
        without calling backward.
        """
        is_before_training = board.steps_made == 0 and board.micro_step == 0
        if only_creates_state(optimizer, self._values, is_before_training=is_before_training):
            board.enter(self._phase_before_optimizer)
            return True
        if board.micro_step and id(optimizer) != self._last_optimizer_id:
            # If backward calls have been counted so far, switch to counting this optimizer's steps.
            self._last_optimizer_id = self._last_optimizer_id or id(optimizer)
            board.enter(self.phases.training)
            return True
        if self._max_backwards_without_step is None:
            self._max_backwards_without_step = _MAX_BACKWARDS_WITHOUT_STEP
            self.observer.set_role("trainer")
        return False

    # --- the end of a step ---

    def _end_step(self, board: ProgressBoard, optimizer: Any) -> None:
        """Count and record the step in progress, and start the next one.

        Args:
            board: The progress board of this process.
            optimizer: The optimizer that has stepped; None if backward calls count as steps.
        """
        ended = self._step
        step = self._step = Step()
        board.steps_made = (board.steps_made + 1) & _MADE_MASK
        board.step += 1
        if id(optimizer) in guarded or id(optimizer) not in self._optimizer_ids:
            self._correct_number(board, optimizer)
        if board.steps_made == 1:
            self.phases.training = ProcessPhase.FORWARD_BACKWARD
        now = board.enter(self.phases.training)
        clock = self.phases.clock
        clock.steps += 1
        if board.steps_made == 1:
            self.phases.clock = LoopClock(now)
        elif now >= clock.publish_at:
            clock.publish(board, now)
        step.began_at = now
        step.first_micro_step = board.micro_step
        ended.number = board.step
        ended.micro_steps = board.micro_step - ended.first_micro_step
        if ended.began_at:
            ended.seconds = (now - ended.began_at) / 1e9
        if now >= self._memory.next_read:
            ended.memory = self._memory.read(now)
            if ended.memory.reserved:
                self.phases.clock.uses_device = True
        self._writer.record(ended, optimizer)
        step.reads_values = board.steps_made < _STEPS_ALL_READ or now >= self._next_read
        if step.reads_values:
            self._next_read = now + _READ_PAUSE_NANOSECONDS
        # The supervisor bases its requests for leak traces on these memory readings, so it is
        # enough to check for a request after each reading.
        if ended.memory is not NOT_READ or self._leak_tracer is not None:
            self._trace_if_requested(board)

    def _correct_number(self, board: ProgressBoard, optimizer: Any) -> None:
        """Correct the number of the step that has just ended.

        The number comes from the optimizer's guard or, if the optimizer was resumed, from its
        state.
        """
        guard_entry = guarded.get(id(optimizer))
        guard = None if guard_entry is None else guard_entry[1]()
        is_new = id(optimizer) not in self._optimizer_ids
        if guard is not None:
            # The guard increments its count after this hook has run.
            board.step = guard.global_step + 1
        elif is_new and board.steps_made == len(self._optimizer_ids) + 1:
            # All optimizers seen so far have made exactly one step. An optimizer that first steps
            # later was created during training, so it was not resumed.
            board.step += steps_before_this(optimizer, self._read)
        if optimizer is not None:
            self._optimizer_ids.add(id(optimizer))

    def _trace_if_requested(self, board: ProgressBoard) -> None:
        """Run the leak tracer if the supervisor has requested a trace."""
        request = board.trace_requested()
        if self._leak_tracer is None:
            if request == 0:
                return
            from holdfast.supervise.leaks.tracer import LeakTracer

            self._leak_tracer = LeakTracer(self.observer.emit)
        self._leak_tracer.after_step(request)
