"""`StepTracker`: derive steps and phases of training from calls that torch makes anyway.

A step ends when an optimizer has stepped. If several optimizers step after one backward, they make
one step together. Without an optimizer, every backward is a step. If a guard owns the optimizer,
steps have the guard's numbers; otherwise numbering continues from the count in the optimizer's
state, as Adam has one. Only one thread is tracked: the one that calls backward, and until then the
main thread. Other threads may load, save and evaluate at the same time.

Nothing here raises into the script: errors are noted. Methods that run at every step catch errors
inline and avoid calls of small functions, because each call costs up to a microsecond between the
operations of a small step. The others use `_noted`.

Does not: hook into torch (``hooks`` does).
"""

from __future__ import annotations

import math
import sys
from _thread import get_ident
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVarTuple

from holdfast.core.events.process_events import StepsNotRecorded
from holdfast.recorder.progress import ProcessPhase, SampleRing
from holdfast.recorder.run_files import guarded
from holdfast.supervise.observe.optimizer_facts import (
    only_creates_state,
    settings_of,
    steps_before_this,
)
from holdfast.supervise.observe.pending_values import PendingValues
from holdfast.supervise.observe.values import (
    NOT_READ,
    MemoryReader,
    MemoryUse,
    PendingValue,
    ValueReader,
)

if TYPE_CHECKING:
    from holdfast.core.events.data import EventData
    from holdfast.core.importing import ImportWatch
    from holdfast.recorder.progress import ProgressBoard
    from holdfast.recorder.run_files import ProcessRole

P = TypeVarTuple("P")
_Value: TypeAlias = float | PendingValue | None
# If an optimizer exists but is never seen to step, its step is compiled, so that its hooks do not
# run. After this many backward calls, which is more than recipes accumulate, each call counts as a
# step.
_MAX_BACKWARDS_WITHOUT_STEP = 256
# Loss and gradient norm are read at each of the first steps, then once per pause: a NaN that
# matters persists.
_STEPS_ALL_READ = 1000
_READ_PAUSE_NANOSECONDS = 2_000_000
# The board has 32 bits for the number of steps.
_STEPS_MADE_MASK = 0xFFFFFFFF
# Looking up a member of an enumeration is slow, so these are kept as module constants.
_DATA_WAIT = ProcessPhase.DATA_WAIT
_OPTIMIZER = ProcessPhase.OPTIMIZER


class ObservedProcess(Protocol):
    """The part of `ProcessObserver` that the step tracker needs."""

    watch: ImportWatch

    @property
    def board(self) -> ProgressBoard:
        """The board on which the process shows its progress."""

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Record the settings of the training."""

    def open_samples(self) -> SampleRing:
        """Open the ring buffer in which steps are recorded."""

    def emit(self, data: EventData) -> None:
        """Record an event."""

    def set_role(self, role: ProcessRole) -> None:
        """Show the role that the process has turned out to have."""

    def note_error(self, error: BaseException) -> None:
        """Note one of our errors, which must not reach the script."""


def _noted(method: Callable[[StepTracker, *P], None]) -> Callable[[StepTracker, *P], None]:
    """Decorate a method so that it notes its errors instead of raising them into the script."""

    @wraps(method)
    def noting(tracker: StepTracker, *args: *P) -> None:
        try:
            method(tracker, *args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            tracker.observer.note_error(error)

    return noting


class _Step:
    """The measurements of one step. Times are in nanoseconds, on the monotonic clock.

    The class has no `__init__`, because its call would cost time at every step.
    """

    # Number of the step, once it has ended.
    number = 0

    # When the step began; 0 if unknown.
    began_at = 0
    # Time spent waiting for the loader.
    waited = 0
    # `ProgressBoard.micro_step` when the step began.
    first_micro_step = 0
    # Loss of the last backward call.
    loss: _Value = None
    # Losses of earlier backward calls: the sum of those that are known, and those that are still
    # being copied.
    earlier_loss = 0.0
    earlier_parts: tuple[PendingValue, ...] = ()
    # Gradient norm.
    norm: _Value = None


class StepTracker:
    """Counts the steps of this process and shows its phases.

    Args:
        observer: The process.
        torch: The module.
        has_optimizer: Returns whether any optimizer was created.
    """

    def __init__(
        self, observer: ObservedProcess, torch: ModuleType, has_optimizer: Callable[[], bool]
    ) -> None:
        self.observer = observer
        self._has_optimizer = has_optimizer
        # This costs one function call; `torch.compiler.is_compiling` costs two.
        self.is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        self._values = ValueReader(torch)
        self._read = self._values.read
        self._memory = MemoryReader(torch)
        main_thread = sys.modules["threading"].main_thread().ident
        self._reset(main_thread if main_thread is not None else get_ident())

    def reset_after_fork(self) -> None:
        """Start over in a forked process."""
        step = self._step
        self._values.reset_after_fork([step.loss, step.earlier_parts, step.norm, self._pending])
        self._memory.reset()
        self._reset(get_ident())

    @_noted
    def finish(self) -> None:
        """Complete the newest samples, as far as possible without waiting."""
        if self._samples is not None:
            self._pending.complete(self._samples)

    def _reset(self, thread: int) -> None:
        # Identifier of the thread that trains.
        self.thread = thread
        # What that thread is doing: waiting for a loader, something other than training such as
        # saving, a backward call, or an optimizer's step.
        self.is_waiting = False
        self.is_aside = False
        self.in_backward = False
        self._in_optimizer = False
        # The observer's board, cached here on first use.
        self._board: ProgressBoard | None = None
        # The phase that forward and backward belong to: the first step is a phase of its own.
        self._training_phase = ProcessPhase.FIRST_STEP
        # The phases to return to afterwards.
        self._phase_before_aside = ProcessPhase.STARTING
        self._phase_before_compiling = ProcessPhase.STARTING
        self._phase_before_optimizer = ProcessPhase.STARTING
        # The samples, and the values that complete them later.
        self._samples: SampleRing | None = None
        self._cannot_record = False
        self._pending = PendingValues(self._values)
        self._step = _Step()
        self._wait_began_at = 0
        # The loss that a gradient scaler scaled last, and a weak reference to the scaled loss.
        self._scaled_loss: tuple[Any, Any] | None = None
        # Number of the newest sample as long as its gradients still exist; 0 after the next
        # backward.
        self._ended_sample = 0
        # `id` of the optimizer that ended the newest step; 0 if none has stepped yet.
        self._last_optimizer_id = 0
        # Without an optimizer step, backward calls count as steps after this many; None before the
        # first backward.
        self._max_backwards_without_step: int | None = None
        # Numbers of the optimizers in the ring buffer, by `id`; and the settings of the training.
        self._optimizer_numbers: dict[int, int] = {}
        self._settings: dict[str, Any] = {}
        # Whether loss and norm of this step are read, and when they will be read next.
        self._reads_values = True
        self._next_read = 0
        # The leak tracer, once a trace was requested, and the number of the newest request.
        self._tracer: Any = None
        self._trace_request = 0

    def _use_board(self) -> ProgressBoard:
        self._board = self.observer.board
        return self._board

    # --- loader ---

    def wait_begins(self) -> None:
        """The training loop has requested a batch from a loader."""
        try:
            now = (self._board or self._use_board()).enter(_DATA_WAIT)
            self._wait_began_at = now
            step = self._step
            step.began_at = step.began_at or now
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.observer.note_error(error)

    def wait_ends(self, phase: ProcessPhase | None) -> None:
        """The loader has returned a batch, or is exhausted.

        Args:
            phase: The phase that follows; None for training.
        """
        try:
            now = (self._board or self._use_board()).enter(phase or self._training_phase)
            self._step.waited += now - self._wait_began_at
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.observer.note_error(error)

    @_noted
    def loader_begins(self, loader: Any) -> None:
        """The training loop begins to iterate over a loader."""
        sampler = getattr(loader, "batch_sampler", None)
        batch_size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if batch_size is not None:
            self._settings.setdefault("batch_size", batch_size)

    @_noted
    def evaluation_begins(self) -> None:
        """A module was switched to eval mode, which may be the only sign of an evaluation."""
        board = self.observer.board
        trains = board.phase in (ProcessPhase.FORWARD_BACKWARD, ProcessPhase.END_OF_EPOCH)
        if board.steps_made > 0 and trains:
            board.enter(ProcessPhase.EVALUATION)

    # --- backward ---

    @_noted
    def loss_scaled(self, loss: Any, scaled: Any) -> None:
        """A gradient scaler has multiplied a loss.

        Args:
            loss: The loss before scaling.
            scaled: Weak reference to the scaled loss, from which backward will start.
        """
        self._scaled_loss = (loss, scaled)

    def backward_begins(self, root: Any) -> None:
        """Backward is called.

        Args:
            root: The tensor that backward starts from; None if there are several.
        """
        try:
            self.thread = get_ident()
            self._ended_sample = 0
            board = self._board or self._use_board()
            step = self._step
            if board.phase is not self._training_phase:
                now = board.enter(self._training_phase)
                step.began_at = step.began_at or now
            if self._scaled_loss is not None:
                root = self._take_unscaled_loss(root)
            if root is not None and self._reads_values:
                if step.loss is not None:
                    self._keep_earlier_loss(step.loss)
                step.loss = self._read(root)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.observer.note_error(error)

    def _take_unscaled_loss(self, root: Any) -> Any:
        """Return the loss before scaling, or None if backward starts from another tensor.

        A sum of scaled losses, for example, cannot be unscaled.
        """
        assert self._scaled_loss is not None
        loss, scaled = self._scaled_loss
        self._scaled_loss = None
        return loss if scaled() is root else None

    def _keep_earlier_loss(self, loss: float | PendingValue) -> None:
        """Keep the loss of an earlier backward call: the step's gradients are those of the sum."""
        step = self._step
        if not isinstance(loss, PendingValue):
            step.earlier_loss += loss
        elif loss.has_arrived():
            step.earlier_loss += loss.value()
            self._values.release(loss)
        else:
            step.earlier_parts = (*step.earlier_parts, loss)

    def backward_ends(self) -> None:
        """Backward has returned."""
        try:
            board = self._board or self._use_board()
            board.micro_step += 1
            if self._max_backwards_without_step is None:
                self.observer.set_role("trainer")
                self._max_backwards_without_step = (
                    _MAX_BACKWARDS_WITHOUT_STEP if self._has_optimizer() else 0
                )
            no_optimizer_steps = self._last_optimizer_id == 0
            if no_optimizer_steps and board.micro_step > self._max_backwards_without_step:
                # Every backward is a step.
                self._end_step(board, None)
            elif self._in_optimizer and board.steps_made > 0:
                # The closure of an optimizer called backward; its step continues.
                board.enter(_OPTIMIZER)
            else:
                # Entering the same phase again shows progress.
                board.enter(board.phase)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.observer.note_error(error)

    def norm_computed(self, norm: Any, *_: Any) -> None:
        """The script has computed the gradient norm."""
        try:
            if not self._reads_values:
                return
            value = self._read(norm)
            if self._ended_sample and self._samples is not None:
                # The step with these gradients has already ended.
                if isinstance(value, PendingValue):
                    self._pending.add_norm(self._ended_sample, value)
                else:
                    self._samples.amend(self._ended_sample, grad_norm=value)
                return
            step = self._step
            if isinstance(step.norm, PendingValue):
                self._values.release(step.norm)
            step.norm = value
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.observer.note_error(error)

    # --- optimizer ---

    def optimizer_begins(
        self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An optimizer is about to step.

        If `step` is called with a closure, it runs forward and backward itself.

        Args:
            args: Arguments of `step`, the optimizer first.
            kwargs: Its keyword arguments.
        """
        if self.is_compiling():
            return
        try:
            self.thread = get_ident()
            self._in_optimizer = True
            board = self._board or self._use_board()
            self._phase_before_optimizer = board.phase
            if (len(args) > 1 or kwargs) and _has_closure(args, kwargs):
                board.enter(self._training_phase)
            elif board.steps_made > 0:
                board.enter(_OPTIMIZER)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.observer.note_error(error)

    def optimizer_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """An optimizer has stepped."""
        if self.is_compiling():
            return
        try:
            self._in_optimizer = False
            board = self._board or self._use_board()
            had_backward = board.micro_step != self._step.first_micro_step
            if not had_backward and self._skips_step_without_backward(board, optimizer):
                return
            self._last_optimizer_id = id(optimizer)
            rate = optimizer.param_groups[0].get("lr")
            if not isinstance(rate, (int, float)):
                # A learning rate that is a tensor may be on a device, so reading it could wait.
                rate = None
            self._end_step(board, rate, optimizer)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.observer.note_error(error)

    def _skips_step_without_backward(self, board: ProgressBoard, optimizer: Any) -> bool:
        """Decide whether an optimizer step that no backward preceded counts; return True if not.

        Two kinds do not count: a step that only creates the optimizer's state, and the step of
        another optimizer after the same backward. For these, the phase is restored here. Any other
        one counts, since the script computed its gradients without calling backward.
        """
        is_before_training = board.steps_made == 0 and board.micro_step == 0
        if only_creates_state(optimizer, self._values, is_before_training=is_before_training):
            board.enter(self._phase_before_optimizer)
            return True
        if board.micro_step and id(optimizer) != self._last_optimizer_id:
            # If backward calls were counted so far, count the steps of this optimizer from now on.
            self._last_optimizer_id = self._last_optimizer_id or id(optimizer)
            board.enter(self._training_phase)
            return True
        if self._max_backwards_without_step is None:
            self._max_backwards_without_step = _MAX_BACKWARDS_WITHOUT_STEP
            self.observer.set_role("trainer")
        return False

    # --- the end of a step ---

    def _end_step(
        self, board: ProgressBoard, learning_rate: float | None, optimizer: Any = None
    ) -> None:
        """Count a step, record it, and begin the next one.

        Args:
            board: The progress board of this process.
            learning_rate: The rate of the first parameter group; None if unknown.
            optimizer: The optimizer that has stepped; None if backward calls are counted.
        """
        ended = self._step
        self._step = _Step()
        self._count_step(board, optimizer)
        ended.number = board.step
        now = board.enter(self._training_phase)
        self._step.began_at = now
        self._step.first_micro_step = board.micro_step
        memory = NOT_READ
        if now >= self._memory.next_look:
            memory = self._memory.read(now)
        samples = self._samples or self._open_samples()
        if samples is not None:
            self._write_sample(samples, ended, memory, learning_rate, optimizer)
        self._reads_values = board.steps_made < _STEPS_ALL_READ or now >= self._next_read
        if self._reads_values:
            self._next_read = now + _READ_PAUSE_NANOSECONDS
        # A trace is requested because of the memory readings taken here, so check after those only.
        if memory is not NOT_READ or self._tracer is not None:
            self._trace_if_requested(board)

    def _count_step(self, board: ProgressBoard, optimizer: Any) -> None:
        """Count a step, and give it the number in the training's own count."""
        board.steps_made = (board.steps_made + 1) & _STEPS_MADE_MASK
        guard_entry = guarded.get(id(optimizer))
        guard = None if guard_entry is None else guard_entry[1]()
        if guard is not None:
            # The guard increments its count only after this hook.
            board.step = guard.global_step + 1
        else:
            is_new = id(optimizer) not in self._optimizer_numbers
            # Only while every optimizer so far has made exactly one step: an optimizer that appears
            # later was created during training, not resumed.
            if is_new and board.steps_made == len(self._optimizer_numbers) + 1:
                board.step += steps_before_this(optimizer, self._read)
            board.step += 1
        if board.steps_made == 1:
            self._training_phase = ProcessPhase.FORWARD_BACKWARD

    def _write_sample(
        self,
        samples: SampleRing,
        ended: _Step,
        memory: MemoryUse,
        learning_rate: float | None,
        optimizer: Any,
    ) -> None:
        """Record a step that has ended; values still being copied complete the sample later."""
        micro_steps = self._step.first_micro_step - ended.first_micro_step
        seconds = math.nan
        if ended.began_at:
            seconds = (self._step.began_at - ended.began_at) / 1e9
        optimizer_number = self._optimizer_numbers.get(id(optimizer))
        if optimizer_number is None:
            optimizer_number = self._register_optimizer(optimizer, samples)
        loss = ended.loss
        norm = ended.norm
        known_loss = None
        # If earlier losses are still being copied, the sum is not known yet.
        if type(loss) is float and not ended.earlier_parts:
            known_loss = loss + ended.earlier_loss
        number = samples.write(
            ended.number,
            micro_steps,
            known_loss,
            norm if type(norm) is float else None,
            learning_rate,
            seconds,
            ended.waited / 1e9,
            *memory,
            optimizer=optimizer_number,
        )
        # Without a backward, a norm that is computed later cannot be that of this step.
        self._ended_sample = number if micro_steps else 0
        if ended.earlier_parts or isinstance(loss, PendingValue):
            self._complete_loss_later(number, ended)
        if isinstance(norm, PendingValue):
            self._pending.add_norm(number, norm)
        if self._pending.entries:
            self._pending.complete(samples)

    def _complete_loss_later(self, number: int, ended: _Step) -> None:
        """Let a loss still being copied complete its sample; without its last part, drop it."""
        if isinstance(ended.loss, PendingValue):
            self._pending.add_loss(number, ended.earlier_parts, ended.loss, ended.earlier_loss)
        else:
            for part in ended.earlier_parts:
                # The slot can be reused at once: its next copy follows this one in the stream.
                self._values.release(part)

    def _register_optimizer(self, optimizer: Any, samples: SampleRing) -> int:
        """Number an optimizer that has not stepped before, and return the number; 0 for None.

        Its name and settings are recorded, unless a guard records them.
        """
        if optimizer is None:
            return 0
        guard_entry = guarded.get(id(optimizer))
        if guard_entry is not None:
            name = guard_entry[0]
        else:
            name = f"{type(optimizer).__name__} {len(self._optimizer_numbers) + 1}"
        number = samples.optimizers[name]
        self._optimizer_numbers[id(optimizer)] = number
        if guard_entry is None:
            self._settings |= settings_of(optimizer, name)
            self.observer.write_settings(self._settings)
        return number

    def _open_samples(self) -> SampleRing | None:
        """Return the ring of samples; None on a full disk, where steps are still counted."""
        if self._cannot_record:
            return None
        try:
            self._samples = self.observer.open_samples()
        except OSError as error:
            self._cannot_record = True
            self.observer.note_error(error)
            self.observer.emit(StepsNotRecorded(error=error.strerror or str(error)))
        return self._samples

    def _trace_if_requested(self, board: ProgressBoard) -> None:
        """Let the leak tracer look, if the supervisor has requested a trace."""
        request = board.trace_requested()
        if request == self._trace_request and self._tracer is None:
            return
        self._trace_request = request
        if self._tracer is None:
            from holdfast.supervise.leaks.tracer import LeakTracer

            self._tracer = LeakTracer(self.observer.emit)
        self._tracer.after_step(request)

    # --- saving, compiling ---

    @_noted
    def aside_begins(self, phase: ProcessPhase) -> None:
        """Something other than training begins, such as saving."""
        self._phase_before_aside = self.observer.board.phase
        self.observer.board.enter(phase)

    @_noted
    def aside_ends(self) -> None:
        """Whatever `aside_begins` announced has ended, perhaps with an exception."""
        self.observer.board.enter(self._phase_before_aside)

    @_noted
    def compile_begins(self) -> None:
        """A part of the model is about to be compiled by torch."""
        self._training_phase = ProcessPhase.FIRST_STEP
        board = self.observer.board
        if board.phase not in (ProcessPhase.DATA_WAIT, ProcessPhase.SAVING, ProcessPhase.ENDING):
            self._phase_before_compiling = board.phase
            board.enter(ProcessPhase.FIRST_STEP)

    @_noted
    def compile_ends(self) -> None:
        """The compilation has finished."""
        board = self.observer.board
        if board.steps_made > 0:
            self._training_phase = ProcessPhase.FORWARD_BACKWARD
        if board.phase is not ProcessPhase.FIRST_STEP:
            return
        if self._phase_before_compiling is ProcessPhase.STARTING:
            board.enter(ProcessPhase.FIRST_STEP)
        else:
            board.enter(self._phase_before_compiling)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether these arguments of an optimizer's `step` include a closure."""
    return any(argument is not None for argument in (*args[1:], *kwargs.values()))
