"""`Observer`: collects `Observations` of a run and applies the rules, for `watch` or a guard.

The observer uses torch's public hooks and, in sampled steps, a ``TorchFunctionMode``. It does not
change the results of training. The package `rules` interprets the measurements.

Nothing is read from the device while a step runs. The step's measurements are collected in an
`ObservedStep`, and are read when the step ends, in `Observer.end_step`:

    begin_step, hooks     measure inputs, losses and targets
    before_step           measure gradients
    after_step            measure updates
    step_launched         only if the guard decides the step late: start to copy the measurements
    end_step              read and note the measurements, and apply the rules
    discard               drop the measurements of a step that was undone, to be run again
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast.learning.eager_hooks import EagerHooks, Hook
from holdfast.learning.finding import Finding
from holdfast.learning.inputs import InputObserver
from holdfast.learning.layers import KnownNorms, LayerObserver
from holdfast.learning.losses.function_mode import FunctionMode
from holdfast.learning.losses.sites import LossSites
from holdfast.learning.losses.sources import unscaled
from holdfast.learning.measurements import Measurements
from holdfast.learning.measures import median_or_none, streak
from holdfast.learning.models import ModelObserver
from holdfast.learning.observations import Observations
from holdfast.learning.optimizers import OptimizerObserver, SchedulerObserver
from holdfast.learning.rules.judge import Findings
from holdfast.learning.sampling import (
    EXAMINED,
    SAMPLED,
    is_end_of_window,
    is_judged_after,
    is_selected,
)
from holdfast.learning.subjects import Intent, Subjects, check_frozen
from holdfast.memory.oom import find_out_of_memory

# Maximum number of model calls per step whose arguments are examined.
MAX_CALLS_PER_STEP = 4
# Maximum number of backward passes without an optimizer step. After that, no more steps are
# sampled.
MAX_BACKWARDS_WITHOUT_STEP = 400
# Maximum number of losses that are kept between two optimizer steps, one per backward pass.
MAX_PENDING_LOSSES = 64
# Maximum number of measurements that are kept without a guard, where a step may never end.
MAX_PENDING_MEASUREMENTS = 1000
# Number of training losses whose median is compared with a validation loss.
LOSSES_BEFORE_VALIDATION = 10

_log = logging.getLogger("holdfast")
_Rest = ParamSpec("_Rest")


def _contain_errors(
    method: Callable[Concatenate[Observer, _Rest], None],
) -> Callable[Concatenate[Observer, _Rest], None]:
    """Decorate a method so that its errors never reach the training script.

    An error is logged, and observation stops for good. An out-of-memory error only skips this
    observation, because the guard retries the step with less memory and the retry is observed.
    """

    @functools.wraps(method)
    def guarded(self: Observer, *args: _Rest.args, **kwargs: _Rest.kwargs) -> None:
        if self.failure is not None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            if find_out_of_memory(error) is not None:
                return
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("the diagnosis failed and is now off: %s", self.failure, exc_info=error)

    return guarded  # type: ignore[return-value]


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """Return a context manager that disables gradient recording and function modes."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


@dataclass(slots=True, kw_only=True)
class ObservedStep:
    """What is known about a step whose measurements have not been noted yet."""

    measurements: Measurements = field(default_factory=Measurements)
    # Whether its passes are observed.
    sampled: bool = False
    # The names of the optimizers that have stepped.
    stepped: list[str] = field(default_factory=list)
    # Whether rules are applied at the end of the step, and whether window rules are among them.
    is_judged: bool = False
    windows: bool = False
    # Whether the step was sampled without hooks, because the process compiles code.
    is_limited: bool = False


class Observer:
    """Observes models and optimizers, and applies the rules to the observations.

    Args:
        subjects: The objects to observe.
        intent: The user's statements about the run.
        guided: Whether a guard calls the observer. Every training pass then runs inside
            `begin_step`, and `end_step` receives the losses.

    Raises:
        PolicyError: H102 if a `frozen` pattern matches nothing.
    """

    def __init__(self, subjects: Subjects, intent: Intent, *, guided: bool = False) -> None:
        check_frozen(intent.frozen, subjects)
        self._intent = intent
        self._guided = guided
        # The error that stopped the diagnosis, or None.
        self.failure: str | None = None

        self._run = Observations(total_steps=intent.total_steps, objective=intent.objective)
        self._models = {
            name: ModelObserver(module, subjects.prefix(name), intent.frozen)
            for name, module in subjects.models.items()
        }
        names = {
            id(parameter): name
            for model in self._models.values()
            for name, parameter in model.named_parameters().items()
        }
        self._optimizers = {
            name: OptimizerObserver(optimizer, names)
            for name, optimizer in subjects.optimizers.items()
        }
        self._schedulers = {
            name: SchedulerObserver(scheduler) for name, scheduler in subjects.schedulers.items()
        }
        self._inputs = {name: InputObserver() for name in subjects.models}
        self._layers = LayerObserver(names)
        self._losses = LossSites()
        self.findings = Findings(intent.ignore)

        self.mode = FunctionMode(self._losses, self._on_backward, self._on_weight)
        self.hooks = EagerHooks(self.mode, disabled=subjects.compiled)

        # The step that is running, or the next one between two steps.
        self._current = ObservedStep()
        # The step before it, if its optimizer has been launched but its result is unknown.
        self._launched: ObservedStep | None = None
        # Whether the last step was sampled without hooks; see `ObservedStep`.
        self._is_limited = False
        # Number of completed steps, summed over all optimizers, and how many of them were sampled.
        self._ended_steps = 0
        self._sampled_steps = 0
        # Number of model calls in the current step.
        self._calls = 0
        # True while a model's forward method is running.
        self._in_forward = False
        # Ids of the parameters that are in a model or an optimizer, and of the parameters that a
        # forward pass uses although they are in neither.
        self._owned: set[int] = set()
        self._strays: set[int] = set()

    def install(self) -> None:
        """Start observing, either for the first time or again after `close`."""
        self._run.ended = False
        self.discard()
        for optimizer in self._optimizers.values():
            optimizer.open()
        if not self._guided:
            self.hooks.register_until_close(self._hook_inputs())

    def take_notice(self) -> str | None:
        """Return why most observations of the last step are off, once; None if they are on."""
        return self.hooks.take_notice() if self._is_limited else None

    def close(self) -> None:
        """Remove all hooks. May be called several times."""
        self.hooks.close()
        for optimizer in self._optimizers.values():
            optimizer.close()

    # --- sampling -------------------------------------------------------------------------------

    @property
    def uses_closure(self) -> bool:
        """Whether an optimizer's step is called with a closure that computes the loss."""
        return any(optimizer.observed.uses_closure for optimizer in self._optimizers.values())

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer that has stepped most often."""
        # A loop is faster than `max`, and this runs in every step.
        most = 0
        for optimizer in self._optimizers.values():
            if optimizer.observed.steps > most:
                most = optimizer.observed.steps
        return most

    @property
    def sampled(self) -> bool:
        """Whether the current step is sampled."""
        return self._current.sampled

    def due(self) -> bool:
        """Return whether the next step, or the current one, should be sampled."""
        if self.failure is not None:
            return False
        # A launched step that counts has reset this number.
        is_stepping = self._launched is not None
        if not is_stepping and self._run.backwards_since_step > MAX_BACKWARDS_WITHOUT_STEP:
            return False
        return is_selected(self._step_number(), len(self._optimizers), SAMPLED)

    def _step_number(self) -> int:
        """Return the number of steps before the current one, including one that was launched."""
        return self._ended_steps + (self._launched is not None)

    def begin_step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that observes the training passes in its body.

        It does nothing if the step should not be sampled (see `due`). It may be entered several
        times per step, for example once per micro-batch.
        """
        return self._observing() if self.due() else contextlib.nullcontext()

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        self.begin_sampling()
        try:
            self.hooks.enter_mode()
            yield
        finally:
            self.hooks.leave_mode()
            self.hooks.end_step()

    @_contain_errors
    def begin_sampling(self) -> None:
        """Begin a sampled step: register hooks on the models and reset the per-step counters."""
        examine = is_selected(self._step_number(), len(self._optimizers), EXAMINED)
        self._current.sampled = True
        self._calls = 0
        self._in_forward = False
        self._losses.begin_pass()
        self.mode.begin_step(self._current.measurements, examine=examine)
        if examine:
            self._owned = self._parameters_of_models() | self._parameters_of_optimizers()
        self.hooks.begin_step(self._hooks_of_step())

    def _hook_inputs(self) -> Iterator[RemovableHandle]:
        for name, model in self._models.items():
            hook = Hook(partial(self._before_forward, name))
            yield model.module.register_forward_pre_hook(hook, with_kwargs=True)

    def _hooks_of_step(self) -> Iterator[RemovableHandle]:
        if self._guided:
            yield from self._hook_inputs()
        if self.mode.examine:
            for model in self._models.values():
                yield model.module.register_forward_hook(Hook(self._after_forward))

    # --- observations by hooks and the function mode --------------------------------------------

    @_contain_errors
    def _before_forward(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Measure the inputs of a training call, or count a call without an autograd graph."""
        measurements = self._current.measurements
        if not self._guided and len(measurements) > MAX_PENDING_MEASUREMENTS:
            self._note_measurements()
        if not torch.is_grad_enabled():
            self._models[name].measure_pass_without_graph(measurements)
            return
        # Calls during backward are recomputations by activation checkpointing.
        if not self.sampled or self.mode.in_backward:
            return
        self._in_forward = True
        self._calls += 1
        if self._calls <= MAX_CALLS_PER_STEP:
            arguments = (args, kwargs) if kwargs else args
            with _unobserved():
                self._inputs[name].measure_arguments(
                    measurements, arguments, examine=self.mode.examine
                )

    @_contain_errors
    def _after_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Record that a model's forward method has returned."""
        if torch.is_grad_enabled() and not self.mode.in_backward:
            self._in_forward = False

    @_contain_errors
    def _on_weight(self, weight: nn.Parameter) -> None:
        """Record a trainable parameter that is used but is in neither a model nor an optimizer."""
        if not self._in_forward or id(weight) in self._owned:
            return
        if weight.requires_grad and weight.is_leaf:
            self._current.measurements.add(partial(self._strays.add, id(weight)))

    @_contain_errors
    def _on_backward(self, loss: Tensor) -> None:
        """Count a backward pass. Without a guard, also keep its loss for the optimizer step."""
        self._current.measurements.add(self._note_backward)
        self._losses.begin_pass()
        if self._guided:
            return
        # The step may never end, for example because the script has forgotten `optimizer.step()`.
        self._note_measurements()
        if loss.numel() != 1:
            return
        value = unscaled(loss)
        for optimizer in self._optimizers.values():
            optimizer.pending_losses.append(value)
            del optimizer.pending_losses[:-MAX_PENDING_LOSSES]

    def _note_backward(self) -> None:
        self._run.backwards += 1
        self._run.backwards_since_step += 1

    # --- optimizer steps ------------------------------------------------------------------------

    @_contain_errors
    def before_step(
        self,
        name: str,
        *,
        closure: bool = False,
        known_norms: Callable[[], KnownNorms] | None = None,
    ) -> None:
        """Observe an optimizer just before it steps.

        Args:
            name: Name of the optimizer.
            closure: Whether `step` was called with a closure.
            known_norms: Function that returns the gradient norms before clipping. None if they are
                unknown; the host then waits for them.
        """
        optimizer = self._optimizers[name]
        optimizer.observed.uses_closure = optimizer.observed.uses_closure or closure
        step = self._current
        step.stepped.append(name)
        optimizer.measure_step(step.measurements)
        self._measure_step_of_schedulers(optimizer)
        if not step.sampled:
            step.measurements.add(self._note_optimizer_step)
            return
        for model in self._models.values():
            model.measure_step(step.measurements)
        if closure:
            return
        with _unobserved():
            self._layers.measure_gradients(
                step.measurements,
                name,
                optimizer.parameters(),
                optimizer.note_gradients,
                None if known_norms is None else known_norms(),
                weights=self.mode.examine,
            )
            optimizer.measure_accumulation(step.measurements)

    def _measure_step_of_schedulers(self, optimizer: OptimizerObserver) -> None:
        for scheduler in self._schedulers.values():
            # A scheduler without an ``optimizer`` attribute is counted for every optimizer.
            advanced = getattr(scheduler.scheduler, "optimizer", optimizer.optimizer)
            if advanced is optimizer.optimizer:
                scheduler.measure_step(self._current.measurements)

    def _note_optimizer_step(self) -> None:
        self._run.backwards_since_step = 0

    @_contain_errors
    def after_step(self, name: str) -> None:
        """Observe an optimizer just after it has stepped.

        A guard calls this only in sampled steps.
        """
        optimizer = self._optimizers[name]
        step = self._current
        step.measurements.add(self._note_optimizer_step)
        if step.sampled and not optimizer.observed.uses_closure:
            with _unobserved():
                self._layers.measure_update(step.measurements, optimizer.note_update)
        step.measurements.add(partial(optimizer.end_step, has_loss=self._guided))

    def step_launched(self) -> None:
        """End the measurements of a step whose result is still unknown.

        Call `end_step` once the step is known to count, and `discard` if it has to be repeated.
        """
        step = self._current
        self._launched = step
        self._current = ObservedStep()
        self._end_measurements(step)
        self._start_copy(step)

    @_contain_errors
    def _start_copy(self, step: ObservedStep) -> None:
        with _unobserved():
            step.measurements.start_copy()

    def discard(self) -> None:
        """Drop all measurements that have not been noted.

        The steps that they belong to, which are the current and the launched one, run again.
        """
        self._launched = None
        self._current = ObservedStep()
        for optimizer in self._optimizers.values():
            optimizer.forget_gradients()

    def end_step(self, loss: float | None = None, names: Sequence[str] = ()) -> list[Finding]:
        """End a step, and return the findings that no earlier call has returned.

        Args:
            loss: The mean loss of the step, or None if the caller does not know it.
            names: Names of the optimizers that stepped. If empty, all of them did.
        """
        step = self._launched
        if step is None:
            step = self._current
            self._current = ObservedStep()
            self._end_measurements(step)
        self._launched = None
        self._is_limited = step.is_limited
        self._note(step)
        if loss is not None:
            for name, optimizer in self._optimizers.items():
                if not names or name in names:
                    optimizer.add_loss(loss)
        self._ended_steps += 1
        self._sampled_steps += step.sampled
        if not (step.windows or step.sampled):
            return []
        if not self._guided:
            # With a guard, the hooks were removed after the passes, and the hooks of the next step
            # may already be in place.
            self.hooks.end_step()
        if step.is_judged:
            self._judge_step(windows=step.windows)
        return self.findings.take_fresh()

    @_contain_errors
    def _end_measurements(self, step: ObservedStep) -> None:
        """Take the last measurements of a step, and determine whether rules are applied after it.

        These measurements show the models and optimizers as the step has left them.
        """
        step.windows = is_end_of_window(self._steps_after(step), self._run.total_steps)
        step.is_judged = step.windows
        if step.sampled:
            step.is_limited = self.hooks.disabled
            too_early = self.mode.clipped_too_early()
            step.measurements.add(partial(self._note_clipping, too_early=too_early))
            if is_judged_after(self._sampled_steps + 1, len(self._optimizers)):
                step.is_judged = True
        if step.is_judged:
            with _unobserved():
                self._measure_subjects(step.measurements)

    def _steps_after(self, step: ObservedStep) -> int:
        """Return the number of steps, as in `steps`, once a step has been noted."""
        most = 0
        for name, optimizer in self._optimizers.items():
            steps = optimizer.observed.steps + step.stepped.count(name)
            if steps > most:
                most = steps
        return most

    @_contain_errors
    def _note_measurements(self) -> None:
        """Note the measurements of the current step so far."""
        self._current.stepped.clear()
        with _unobserved():
            self._current.measurements.note_all()

    @_contain_errors
    def _note(self, step: ObservedStep) -> None:
        """Note the measurements of a step that has ended."""
        with _unobserved():
            step.measurements.note_all()

    @_contain_errors
    def _judge_step(self, *, windows: bool) -> None:
        """Apply the rules after a step. Its subjects have been measured."""
        self._judge(windows=windows, ended=False)

    def _note_clipping(self, *, too_early: bool | None) -> None:
        """Count consecutive sampled steps that clipped gradients only before backward."""
        if too_early is not None:
            self._run.early_clips = streak(self._run.early_clips, continues=too_early)

    # --- judging --------------------------------------------------------------------------------

    def observations(self) -> Observations:
        """Measure the models and optimizers as they are now, and return all observations.

        Later steps update the same object.
        """
        self._note_measurements()
        measurements = Measurements()
        with _unobserved():
            self._measure_subjects(measurements)
            measurements.note_all()
        return self._gathered()

    def _measure_subjects(self, measurements: Measurements) -> None:
        """Measure the models and optimizers as they are now."""
        in_models = self._parameters_of_models()
        in_optimizers = self._parameters_of_optimizers()
        for optimizer in self._optimizers.values():
            optimizer.measure(measurements, in_models)
        for model in self._models.values():
            model.measure(measurements, in_optimizers, self._layers.layers)

    def _gathered(self) -> Observations:
        """Return all observations that have been noted."""
        run = self._run
        run.steps = self.steps
        run.strays = len(self._strays)
        run.layers = self._layers.observations()
        run.losses = self._losses.observations()
        run.inputs = {name: inputs.observations() for name, inputs in self._inputs.items()}
        run.optimizers = {name: optimizer.observed for name, optimizer in self._optimizers.items()}
        run.models = {name: model.observed for name, model in self._models.items()}
        run.schedulers = {name: scheduler.observed for name, scheduler in self._schedulers.items()}
        return run

    def _parameters_of_models(self) -> set[int]:
        return {
            id(parameter)
            for model in self._models.values()
            for parameter in model.named_parameters().values()
        }

    def _parameters_of_optimizers(self) -> set[int]:
        return {
            id(parameter)
            for optimizer in self._optimizers.values()
            for parameter in optimizer.parameters()
        }

    def _judge(self, *, windows: bool, ended: bool) -> None:
        with _unobserved():
            run = self._gathered()
        run.ended = ended
        self.findings.judge(run, windows=windows)

    @_contain_errors
    def validated(self, loss: float) -> None:
        """Record the loss of an evaluation. Lower is better."""
        self._note_measurements()
        histories = [optimizer.observed.losses for optimizer in self._optimizers.values()]
        history = next((losses for losses in histories if losses), [])
        newest = [value for _, value in history[-LOSSES_BEFORE_VALIDATION:]]
        self._run.validations.append((self.steps, median_or_none(newest), float(loss)))
        for model in self._models.values():
            model.note_validation()

    def aligned(self, alignment: dict[str, float]) -> None:
        """Record the attention alignment of a speech synthesis model; see `alignment_facts`."""
        self._run.alignment = alignment

    @_contain_errors
    def finish(self) -> None:
        """Apply all rules to the observations of the whole run, once it has ended."""
        self.observations()
        self._judge(windows=True, ended=True)

    @_contain_errors
    def judge_now(self) -> None:
        """Apply all rules to the run so far."""
        self.observations()
        self._judge(windows=True, ended=self._run.ended)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain data."""
        return {
            "optimizers": {
                name: optimizer.state_dict() for name, optimizer in self._optimizers.items()
            },
            "validations": [list(validation) for validation in self._run.validations],
            "reported": self.findings.reported_keys(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`. Optimizers that it does not contain start afresh."""
        for name, optimizer in self._optimizers.items():
            if name in state["optimizers"]:
                optimizer.load_state_dict(state["optimizers"][name])
        self._run.validations = [
            (int(step), training, float(validation))
            for step, training, validation in state["validations"]
        ]
        self.findings.load_reported_keys(state["reported"])
