"""What a training process is doing, and what a step is, from calls that torch makes anyway.

A step ends when an optimizer has stepped. Several optimizers that step after one backward make one
step; where there is no optimizer, each backward is a step. The number of a step is the guard's
where one has the optimizer; else it goes on from what the state of an optimizer counts, as Adam's
does. Only one thread is looked at: that which calls backward, the main thread until then. Others
load, save and evaluate beside it.

Does not: hook into torch (``hooks`` does), and never raises: what goes wrong is noted, and the
    script goes on.
"""

from __future__ import annotations

import math
import sys
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVarTuple

from holdfast.core.events.process_events import StepsNotRecorded
from holdfast.recorder.progress import Phase, SampleRing
from holdfast.recorder.run_files import guarded
from holdfast.supervise.observe.values import MemoryReadings, OnItsWay, ValueReader

if TYPE_CHECKING:
    from holdfast.core.events.event import EventData
    from holdfast.core.importing import ImportWatch
    from holdfast.recorder.progress import ProgressBoard
    from holdfast.recorder.run_files import ProcessRole

P = TypeVarTuple("P")
# Calls of backward after which they are counted as steps although an optimizer was made: it is
# compiled, so that its hooks do not run. More than recipes accumulate.
_PATIENCE = 256
_Value = float | OnItsWay | None
_NOT_READ = (0, 0, 0, 0)
# Loss and norm are read at each of so many steps, then once in so many nanoseconds: a NaN that
# matters stays.
_ALL_READ, _READ_NANOSECONDS = 1000, 2_000_000
# An attribute of an enumeration is slow to find
_DATA_WAIT, _OPTIMIZER = Phase.DATA_WAIT, Phase.OPTIMIZER


class Observed(Protocol):
    """The process that is observed, as far as its steps need it."""

    watch: ImportWatch

    @property
    def board(self) -> ProgressBoard:
        """What the process does right now."""

    def describe(self, settings: dict[str, Any]) -> None:
        """Keep what the training is set to."""

    def samples(self) -> SampleRing:
        """Open the ring that steps are recorded in."""

    def emit(self, data: EventData) -> None:
        """Record an event."""

    def becomes(self, role: ProcessRole) -> None:
        """Say what the process has turned out to be."""

    def failed(self, error: BaseException) -> None:
        """Note an error of ours, which must not reach the script."""


def _noted(method: Callable[[Steps, *P], None]) -> Callable[[Steps, *P], None]:
    @wraps(method)
    def noting(steps: Steps, *args: *P) -> None:
        try:
            method(steps, *args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            steps.observer.failed(error)

    return noting


class Steps:
    """Counts the steps of this process and shows its phases."""

    def __init__(
        self, observer: Observed, torch: ModuleType, finds_optimizer: Callable[[], bool]
    ) -> None:
        self.observer = observer
        self._values, self._memory = ValueReader(torch), MemoryReadings(torch)
        self._read = self._values.read
        # One call; `is_compiling`: two
        self.is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        self._finds_optimizer = finds_optimizer
        main = sys.modules["threading"].main_thread().ident
        self._start(main if main is not None else get_ident())

    def begin(self) -> None:
        """Begin anew in a forked process."""
        self._values.begin([self._loss, self._parts, self._norm, self._on_their_way])
        self._memory.begin()
        self._start(get_ident())

    @_noted
    def finish(self) -> None:
        """Complete the newest samples, as far as that needs no waiting."""
        self._complete()

    def _start(self, thread: int) -> None:
        self.thread = thread
        self._board: ProgressBoard | None = None
        self.waits = self.aside = self.in_backward = False
        self._optimizes = False
        self._samples: SampleRing | None = None
        self._cannot_record = False
        self._training = Phase.FIRST_STEP  # what a forward and a backward are a part of
        self._micro_before = 0
        self._ended = 0  # number of the newest sample, until there are other gradients
        self._counted = 0  # which optimizer ended the newest step
        self._numbers: dict[int, int] = {}  # of optimizers in the ring
        self._settings: dict[str, Any] = {}
        # Calls of backward until they are steps; None before the first
        self._patience: int | None = None
        self._began = self._wait_began = self._waited = 0
        self._before_aside = self._before_compiling = self._before_optimizer = Phase.STARTING
        self._reads, self._next_read = True, 0  # loss and norm of this step
        self._loss: _Value = None
        # Of earlier calls of backward in the step
        self._loss_before, self._parts = 0.0, list[OnItsWay]()
        self._norm: _Value = None
        self._scaled: tuple[Any, Any] | None = None
        self._on_their_way: deque[tuple[int, str, OnItsWay, float]] = deque()
        self._arrived = 0.0  # of parts of a loss
        self._tracer: Any = None
        self._traced = 0

    def _show(self) -> ProgressBoard:
        self._board = self.observer.board
        return self._board

    # --- loader
    # ------------------------------------------------------------------------

    def wait_begins(self) -> None:
        """The loop asks a loader for something."""
        try:
            self._wait_began = now = (self._board or self._show()).enter(_DATA_WAIT)
            self._began = self._began or now
        except Exception as error:  # noqa: BLE001 - as `_noted`, at each step without a call more
            self.observer.failed(error)

    def wait_ends(self, phase: Phase | None) -> None:
        """The loop has a batch, or there is none; None: to train with."""
        try:
            self._waited += (self._board or self._show()).enter(
                phase or self._training
            ) - self._wait_began
        except Exception as error:  # noqa: BLE001 - as `_noted`, at each step without a call more
            self.observer.failed(error)

    @_noted
    def loads(self, loader: Any) -> None:
        """The loop begins to iterate a loader, to train with."""
        sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if size is not None:
            self._settings.setdefault("batch_size", size)

    @_noted
    def evaluates(self) -> None:
        """A module was asked to evaluate, which may be all that is seen of an evaluation."""
        if self.observer.board.made > 0 and self.observer.board.phase in (
            Phase.FORWARD_BACKWARD,
            Phase.END_OF_EPOCH,
        ):
            self.observer.board.enter(Phase.EVALUATION)

    # --- backward
    # ------------------------------------------------------------------------

    @_noted
    def scales(self, loss: Any, scaled: Any) -> None:
        """A gradient scaler has multiplied a loss.

        `scaled` refers weakly to what backward will get.
        """
        self._scaled = (loss, scaled)

    def backward_begins(self, root: Any) -> None:
        """Backward is called with the tensor that it begins with, None if there are several."""
        try:
            self.thread = get_ident()
            self._ended = 0
            board = self._board or self._show()
            if board.phase is not self._training:
                now = board.enter(self._training)
                self._began = self._began or now
            if self._scaled is not None:
                loss, scaled = self._scaled
                self._scaled = None
                # Of a sum of scaled losses, the scale is in it
                root = loss if scaled() is root else None
            if root is not None and self._reads:
                if self._loss is not None:
                    self._keep_part(self._loss)
                self._loss = self._read(root)
        except Exception as error:  # noqa: BLE001 - as `_noted`, at each step without a call more
            self.observer.failed(error)

    def _keep_part(self, part: float | OnItsWay) -> None:
        """Keep what an earlier call of backward began with.

        The gradients of a step are those of the sum.
        """
        if not isinstance(part, OnItsWay):
            self._loss_before += part
        elif part.arrived():
            self._loss_before += part.value()
            self._values.give_back(part)
        else:
            self._parts.append(part)

    def backward_ends(self) -> None:
        """Backward has returned."""
        try:
            board = self._board or self._show()
            board.micro_step += 1
            if self._patience is None:
                self.observer.becomes("trainer")
                self._patience = _PATIENCE if self._finds_optimizer() else 0
            if self._counted == 0 and board.micro_step > self._patience:
                self._end_step(board, None)
            else:
                board.enter(_OPTIMIZER if self._optimizes and board.made > 0 else board.phase)
        except Exception as error:  # noqa: BLE001 - as `_noted`, at each step without a call more
            self.observer.failed(error)

    def clipped(self, norm: Any, *_: Any) -> None:
        """The script has computed the norm of the gradients."""
        try:
            if not self._reads:
                return
            value = self._read(norm)
            if self._ended and self._samples is not None:
                if isinstance(value, OnItsWay):
                    self._on_their_way.append((self._ended, "grad_norm", value, 0.0))
                else:
                    self._samples.amend(self._ended, grad_norm=value)
                return
            if isinstance(self._norm, OnItsWay):
                self._values.give_back(self._norm)
            self._norm = value
        except Exception as error:  # noqa: BLE001 - as `_noted`, at each step without a call more
            self.observer.failed(error)

    # --- optimizer
    # ------------------------------------------------------------------------

    def optimizer_begins(
        self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An optimizer is about to step.

        With a closure, the first argument, it runs forward and backward itself.
        """
        if self.is_compiling():
            return
        try:
            self.thread = get_ident()
            self._optimizes = True
            board = self._board or self._show()
            self._before_optimizer = board.phase
            if (kwargs or len(args) > 1) and any(
                each is not None for each in (*args[1:], *kwargs.values())
            ):
                board.enter(self._training)
            elif board.made > 0:
                board.enter(_OPTIMIZER)
        except Exception as error:  # noqa: BLE001 - as `_noted`, at each step without a call more
            self.observer.failed(error)

    def optimizer_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """An optimizer has stepped."""
        if self.is_compiling():
            return
        try:
            self._optimizes = False
            board = self._board or self._show()
            if board.micro_step == self._micro_before:
                if self._makes_state(board, optimizer):
                    board.enter(self._before_optimizer)
                    return
                if board.micro_step and id(optimizer) != self._counted:
                    # 0: no optimizer was known, backward counted
                    self._counted = self._counted or id(optimizer)
                    board.enter(self._training)
                    return
                if self._patience is None:  # gradients came by another way than backward
                    self._patience = _PATIENCE
                    self.observer.becomes("trainer")
            self._counted = id(optimizer)
            rate = optimizer.param_groups[0].get("lr")
            # A rate that is a tensor may be on a device.
            self._end_step(
                board, float(rate) if isinstance(rate, (int, float)) else None, optimizer
            )
        except Exception as error:  # noqa: BLE001 - as `_noted`, at each step without a call more
            self.observer.failed(error)

    def _makes_state(self, board: ProgressBoard, optimizer: Any) -> bool:
        """Return whether a step without a backward before it was only made for the state of its
        optimizer.

        So torch.distributed.checkpoint does, with a learning rate of 0, and others, with gradients
        of 0, before the
        training begins. Gradients may come by another way than backward: then they are not 0.
        """
        groups = optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        if all(
            self._values.read(rate) == 0 if getattr(rate, "is_cpu", False) else rate == 0.0
            for rate in rates
        ):
            return True
        gradients = [
            p.grad for group in groups for p in group.get("params", ()) if p.grad is not None
        ]
        if not gradients:  # one of torch's does nothing then; another may draw its own
            return type(optimizer).__module__.startswith("torch.optim.")
        return board.made == board.micro_step == 0 and self._values.all_zero(gradients)

    def _made_before(self, optimizer: Any) -> int:
        """Return how many steps the state of an optimizer has that has just made one here.

        0 if it does not say.
        """
        states = getattr(optimizer, "state", None)
        state = next(iter(states.values()), None) if isinstance(states, dict) else None
        count = state.get("step") if isinstance(state, dict) else None
        if getattr(count, "is_cpu", False):
            count = self._read(count)
        return int(count) - 1 if isinstance(count, (int, float)) and 1 < count < 2**53 else 0

    def _end_step(
        self, board: ProgressBoard, learning_rate: float | None, optimizer: Any = None
    ) -> None:
        loss, before, norm, began = self._loss, self._loss_before, self._norm, self._began
        parts, self._parts = self._parts, []
        self._loss, self._loss_before, self._norm = None, 0.0, None
        if parts and not isinstance(loss, OnItsWay):  # the sum is not known
            for part in parts:
                self._values.give_back(part)  # the copy that comes next follows it in the stream
        board.made = made = (board.made + 1) & 0xFFFFFFFF  # as many bits as the board has
        counted = guarded.get(id(optimizer))
        record = None if counted is None else counted[1]()
        if made == len(self._numbers) + 1 and record is None and id(optimizer) not in self._numbers:
            # Until one has made its second: later ones are made anew
            board.step += self._made_before(optimizer)
        # Which counts it after this
        board.step = step = (board.step if record is None else record.global_step) + 1
        if made == 1:
            self._training = Phase.FORWARD_BACKWARD
        self._began = now = board.enter(self._training)
        micro_steps = board.micro_step - self._micro_before
        memory = _NOT_READ if now < self._memory.next_look else self._memory.look(now)
        if (samples := self._samples or self._open_samples()) is not None:
            number = samples.write(
                step,
                micro_steps,
                loss + before if type(loss) is float else None,
                norm if type(norm) is float else None,
                learning_rate,
                (now - began) / 1e9 if began else math.nan,
                self._waited / 1e9,
                *memory,
                optimizer=self._numbers.get(id(optimizer)) or self._name(optimizer, samples),
            )
            self._ended = number if micro_steps else 0  # else gradients come without backward
            if isinstance(loss, OnItsWay):
                self._on_their_way.extend((number, "", part, 0.0) for part in parts)
                self._on_their_way.append((number, "loss", loss, before))
            if isinstance(norm, OnItsWay):
                self._on_their_way.append((number, "grad_norm", norm, 0.0))
            if self._on_their_way:
                self._complete()
        self._waited, self._micro_before = 0, board.micro_step
        self._reads = made < _ALL_READ or now >= self._next_read
        if self._reads:
            self._next_read = now + _READ_NANOSECONDS
        # Whoever asks for a trace has seen memory grow
        if memory is not _NOT_READ or self._tracer is not None:
            requested = board.trace_requested()
            if requested != self._traced or self._tracer is not None:
                self._trace(requested)

    def _name(self, optimizer: Any, samples: SampleRing) -> int:
        """Return the number of an optimizer that has not stepped before, 0 of None."""
        if optimizer is not None:
            name, _ = guarded.get(
                id(optimizer), (f"{type(optimizer).__name__} {len(self._numbers) + 1}", None)
            )
            self._numbers[id(optimizer)] = samples.optimizers[name]
            if id(optimizer) not in guarded:  # its guard keeps that otherwise
                for index, group in enumerate(optimizer.param_groups):
                    self._settings |= {
                        f"{name}.{index}.{key}": v for key, v in group.items() if key != "params"
                    }
                self.observer.describe(self._settings)
        return self._numbers.get(id(optimizer), 0)

    def _open_samples(self) -> SampleRing | None:
        """Return the ring of samples; None on a full disk: the steps are counted all the same."""
        if not self._cannot_record:
            try:
                self._samples = self.observer.samples()
            except OSError as error:
                self._cannot_record = True
                self.observer.failed(error)
                self.observer.emit(StepsNotRecorded(error=error.strerror or str(error)))
        return self._samples

    def _complete(self) -> None:
        """Put what has arrived from a device into the samples that it belongs to."""
        while (
            self._on_their_way and self._samples is not None and self._on_their_way[0][2].arrived()
        ):
            number, name, sent, before = self._on_their_way.popleft()
            if name == "loss":
                before, self._arrived = before + self._arrived, 0.0
            if name:
                self._samples.amend(number, **{name: sent.value() + before})
            else:
                self._arrived += sent.value()
            self._values.give_back(sent)

    def _trace(self, requested: int) -> None:
        """Look for what holds memory, once somebody outside has asked for it."""
        self._traced = requested
        if self._tracer is None:
            from holdfast.supervise.leaks.tracer import LeakTracer

            self._tracer = LeakTracer(self.observer.emit)
        self._tracer.after_step(requested)

    # --- saving, compiling
    # ------------------------------------------------------------------------

    @_noted
    def aside_begins(self, phase: Phase) -> None:
        """Something else is about to be done, such as to save."""
        self._before_aside = self.observer.board.phase
        self.observer.board.enter(phase)

    @_noted
    def aside_ends(self) -> None:
        """It is done, or cannot be."""
        self.observer.board.enter(self._before_aside)

    @_noted
    def compile_begins(self) -> None:
        """A part of the model is about to be compiled."""
        self._training = Phase.FIRST_STEP
        if self.observer.board.phase not in (Phase.DATA_WAIT, Phase.SAVING, Phase.ENDING):
            self._before_compiling = self.observer.board.phase
            self.observer.board.enter(Phase.FIRST_STEP)

    @_noted
    def compile_ends(self) -> None:
        """It is compiled."""
        self._training = (
            Phase.FIRST_STEP if self.observer.board.made == 0 else Phase.FORWARD_BACKWARD
        )
        if self.observer.board.phase is Phase.FIRST_STEP:
            starts = self._before_compiling is Phase.STARTING
            self.observer.board.enter(Phase.FIRST_STEP if starts else self._before_compiling)
