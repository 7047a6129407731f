"""`Observer`: collects and judges `Observations` of a run, driven by `watch` or the guard.

It looks through torch's public hooks and, in sampled steps, through a ``TorchFunctionMode``. It
changes nothing. Not here: what the numbers mean (`rules`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast.learning.eager_hooks import LOST, EagerHooks, Hook
from holdfast.learning.finding import Finding
from holdfast.learning.functions import FunctionMode
from holdfast.learning.inputs import InputObserver
from holdfast.learning.layers import LayerObserver
from holdfast.learning.losses import LossSites
from holdfast.learning.measures import median_or_none
from holdfast.learning.models import ModelObserver
from holdfast.learning.observations import Observations
from holdfast.learning.optimizers import OptimizerObserver
from holdfast.learning.rules.judge import Findings, judge
from holdfast.learning.sampling import (
    EXAMINED,
    SAMPLED,
    is_end_of_window,
    is_in_schedule,
    is_judged_after,
)
from holdfast.learning.schedulers import SchedulerObserver
from holdfast.learning.sources import unscaled
from holdfast.learning.subjects import Intent, Subjects, check_frozen
from holdfast.memory.oom import find_out_of_memory

# Calls of a model in one step whose arguments are looked at.
MOST_CALLS_PER_STEP = 4
# Backward passes without an optimizer step after which nothing more is sampled.
MOST_BACKWARDS_WITHOUT_STEP = 400
# Losses of backward passes that wait for the optimizer step.
MOST_PENDING_LOSSES = 64
# Training losses whose median is compared with that of a validation.
LOSSES_BEFORE_VALIDATION = 10

_log = logging.getLogger("holdfast")
_Rest = ParamSpec("_Rest")


def _harmless(
    method: Callable[Concatenate[Observer, _Rest], None],
) -> Callable[Concatenate[Observer, _Rest], None]:
    """Keep a failure of the diagnosis out of the training.

    It is logged, and nothing more is observed. If memory ran out, only this observation is left
    out: the guard retries the step with less memory, and it is observed then.
    """

    @functools.wraps(method)
    def guarded(self: Observer, *args: _Rest.args, **kwargs: _Rest.kwargs) -> None:
        if self.failure is not None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training continues
            if find_out_of_memory(error) is not None:
                return
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("the diagnosis has switched itself off: %s", self.failure, exc_info=error)

    return guarded  # type: ignore[return-value]


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """Compute without a graph, and without passing through function modes."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


class Observer:
    """Observes models and optimizers, and judges what it saw.

    Args:
        subjects: What is observed.
        intent: What its owner says about it.
        guided: Whether every training pass is inside `begin_step` and losses are given to
            `end_step`, as a guard does it.

    Raises:
        PolicyError: H102 for a `frozen` pattern that means nothing.
    """

    def __init__(self, subjects: Subjects, intent: Intent, *, guided: bool = False) -> None:
        check_frozen(intent.frozen, subjects)
        self._intent = intent
        self._guided = guided
        # What went wrong in the diagnosis itself. Nothing is observed after that.
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
        self._findings = Findings()

        self.mode = FunctionMode(self._losses, self._on_backward, self._on_weight)
        self.hooks = EagerHooks(self.mode, lost=subjects.compiled)
        # True once it was said that compilation hides most of the run.
        self._loss_of_hooks_reported = False

        # Whether the step that is being made is sampled.
        self.sampled = False
        # Steps that were ended, of all optimizers, and those of them that were sampled.
        self._ended_steps = 0
        self._sampled_steps = 0
        # Calls of the models in this step.
        self._calls = 0
        # True while the forward method of a model runs.
        self._in_forward = False
        # Ids of the parameters that models and optimizers own, and of those that are computed with
        # although nobody owns them.
        self._owned: set[int] = set()
        self._strays: set[int] = set()

    def install(self) -> None:
        """Begin to observe, for the first time or after `close`."""
        self._run.ended = False
        for optimizer in self._optimizers.values():
            optimizer.open()
        if not self._guided:
            self.hooks.keep(self._hook_inputs())

    def close(self) -> None:
        """Remove all hooks. It may be called several times."""
        self.hooks.close()
        for optimizer in self._optimizers.values():
            optimizer.close()

    # --- sampling -------------------------------------------------------------------------------

    @property
    def uses_closure(self) -> bool:
        """Whether an optimizer computes the loss within its own step."""
        return any(optimizer.observed.uses_closure for optimizer in self._optimizers.values())

    @property
    def steps(self) -> int:
        """Steps of the optimizer that made most."""
        counts = [optimizer.observed.steps for optimizer in self._optimizers.values()]
        return max(counts, default=0)

    def due(self) -> bool:
        """Return whether the next step is to be sampled."""
        if self.failure is not None:
            return False
        if self._run.backwards_since_step > MOST_BACKWARDS_WITHOUT_STEP:
            return False
        return is_in_schedule(self._ended_steps, len(self._optimizers), SAMPLED)

    def begin_step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that observes forward and backward passes, if this step is `due`.

        A step may enter it several times.
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

    @_harmless
    def begin_sampling(self) -> None:
        """Begin a sampled step: place hooks on the models, and reset what is counted per step."""
        examine = is_in_schedule(self._ended_steps, len(self._optimizers), EXAMINED)
        self.sampled = True
        self._calls = 0
        self._in_forward = False
        self._losses.begin_pass()
        self.mode.begin_step(examine=examine)
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

    # --- what hooks and the function mode see ---------------------------------------------------

    @_harmless
    def _before_forward(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            self._models[name].note_pass_without_graph()
            return
        # Activation checkpointing runs a forward pass again in backward.
        if not self.sampled or self.mode.in_backward:
            return
        self._in_forward = True
        self._calls += 1
        if self._calls <= MOST_CALLS_PER_STEP:
            arguments = (args, kwargs) if kwargs else args
            with _looking():
                self._inputs[name].note_arguments(arguments, examine=self.mode.examine)

    @_harmless
    def _after_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.is_grad_enabled() and not self.mode.in_backward:
            self._in_forward = False

    @_harmless
    def _on_weight(self, weight: nn.Parameter) -> None:
        if not self._in_forward or id(weight) in self._owned:
            return
        if weight.requires_grad and weight.is_leaf:
            self._strays.add(id(weight))

    @_harmless
    def _on_backward(self, loss: Tensor) -> None:
        self._run.backwards += 1
        self._run.backwards_since_step += 1
        self._losses.begin_pass()
        if loss.numel() != 1 or self._guided:
            return
        value = unscaled(loss)
        for optimizer in self._optimizers.values():
            optimizer.pending_losses.append(value)
            del optimizer.pending_losses[:-MOST_PENDING_LOSSES]

    # --- optimizer steps ------------------------------------------------------------------------

    @_harmless
    def before_step(
        self,
        name: str,
        *,
        closure: bool = False,
        norms: Callable[[], Mapping[int, float]] | None = None,
    ) -> None:
        """Observe that an optimizer is about to step.

        Args:
            name: Name of the optimizer.
            closure: Whether it is given a closure.
            norms: Returns the norms of the gradients before clipping, by the id of the parameter,
                where the caller knows them.
        """
        optimizer = self._optimizers[name]
        optimizer.begin_step(closure=closure)
        self._note_step_of_schedulers(optimizer)
        if not self.sampled:
            self._run.backwards_since_step = 0
            return
        for model in self._models.values():
            model.note_step()
        if closure:
            return
        with _looking():
            gradients = self._layers.before_step(
                name,
                optimizer.parameters(),
                norms() if norms is not None else None,
                weights=self.mode.examine,
            )
            optimizer.note_gradients(gradients)

    def _note_step_of_schedulers(self, optimizer: OptimizerObserver) -> None:
        for scheduler in self._schedulers.values():
            # One that does not say which optimizer it belongs to is counted with every optimizer.
            advanced = getattr(scheduler.scheduler, "optimizer", optimizer.optimizer)
            if advanced is optimizer.optimizer:
                scheduler.note_step()

    @_harmless
    def after_step(self, name: str) -> None:
        """Observe that an optimizer has stepped. A guard only calls this in sampled steps."""
        optimizer = self._optimizers[name]
        self._run.backwards_since_step = 0
        moved = False
        if self.sampled and not optimizer.observed.uses_closure:
            with _looking():
                moved = self._layers.after_step()
        optimizer.end_step(moved=moved, has_loss=self._guided)

    def end_step(self, loss: float | None = None, names: Sequence[str] = ()) -> list[Finding]:
        """End a step, and return what is found for the first time.

        Args:
            loss: The mean loss, where the caller knows it.
            names: The optimizers that stepped; all of them if empty.
        """
        if loss is not None:
            for name, optimizer in self._optimizers.items():
                if not names or name in names:
                    optimizer.add_loss(loss)
        self._ended_steps += 1
        windows = is_end_of_window(self.steps, self._run.total_steps)
        if not (windows or self.sampled):
            return []
        self._judge_step(windows=windows)
        return self.take_fresh()

    @_harmless
    def _judge_step(self, *, windows: bool) -> None:
        due = windows
        if self.sampled:
            self.sampled = False
            self.hooks.end_step()
            self._note_clipping()
            self._sampled_steps += 1
            due = due or is_judged_after(self._sampled_steps, len(self._optimizers))
        if due:
            self._judge(windows=windows)

    def _note_clipping(self) -> None:
        too_early = self.mode.clipped_too_early()
        if too_early:
            self._run.early_clips += 1
        elif too_early is False:
            self._run.early_clips = 0

    # --- judging --------------------------------------------------------------------------------

    def observations(self, *, windows: bool = True) -> Observations:
        """Return everything that is known; it changes with the next step.

        Args:
            windows: Whether medians and other statistics are brought up to date too, which only
                the rules about windows need.
        """
        in_models = self._parameters_of_models()
        in_optimizers = self._parameters_of_optimizers()
        run = self._run
        run.steps = self.steps
        run.strays = len(self._strays)
        run.layers = self._layers.observations(windows=windows)
        run.losses = self._losses.observations(windows=windows)
        run.inputs = {
            name: inputs.observations(windows=windows) for name, inputs in self._inputs.items()
        }
        run.optimizers = {
            name: optimizer.observations(in_models) for name, optimizer in self._optimizers.items()
        }
        run.models = {
            name: model.observations(in_optimizers, run.layers)
            for name, model in self._models.items()
        }
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

    def _judge(self, *, windows: bool, ended: bool = False) -> None:
        with _looking():
            run = self.observations(windows=windows)
        run.ended = ended
        self._findings.add_contracts(judge(run, "contract", self._intent.ignore))
        if windows:
            self._findings.replace_windows(judge(run, "window", self._intent.ignore))

    def findings(self) -> list[Finding]:
        """Return what was found, the most important first, without what is only said on request."""
        return self._findings.reported()

    def findings_on_request(self) -> list[Finding]:
        """Return what was found, including what is not right often enough to be said unasked."""
        return self._findings.all()

    def take_fresh(self) -> list[Finding]:
        """Return the findings that were never returned before."""
        return self._findings.take_fresh()

    def take_notice(self) -> str | None:
        """Return, once, why little is observed; None if everything is."""
        if self._loss_of_hooks_reported or not self.hooks.lost:
            return None
        self._loss_of_hooks_reported = True
        return LOST

    @_harmless
    def validated(self, loss: float) -> None:
        """Add the loss of an evaluation; less is better."""
        histories = [optimizer.observed.losses for optimizer in self._optimizers.values()]
        history = next((losses for losses in histories if losses), [])
        newest = [value for _, value in history[-LOSSES_BEFORE_VALIDATION:]]
        self._run.validations.append((self.steps, median_or_none(newest), float(loss)))
        for model in self._models.values():
            model.note_validation()

    def aligned(self, alignment: dict[str, float]) -> None:
        """Add how well a speech synthesiser's attention is aligned; see `alignment_facts`."""
        self._run.alignment = alignment

    @_harmless
    def finish(self) -> None:
        """Judge the run as a whole, at its end."""
        self._judge(windows=True, ended=True)

    @_harmless
    def judge_now(self) -> None:
        """Judge the run as a whole, whether it has ended or not."""
        self._judge(windows=True, ended=self._run.ended)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what later judgements need of the past, as plain data."""
        return {
            "optimizers": {
                name: optimizer.state_dict() for name, optimizer in self._optimizers.items()
            },
            "validations": [list(validation) for validation in self._run.validations],
            "reported": self._findings.reported_places(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a past. Optimizers that it does not know start without one."""
        for name, optimizer in self._optimizers.items():
            if name in state["optimizers"]:
                optimizer.load_state_dict(state["optimizers"][name])
        self._run.validations = [
            (int(step), training, float(validation))
            for step, training, validation in state["validations"]
        ]
        self._findings.load_reported_places(state["reported"])
