"""`Observer`: the engine of the diagnosis, shared by `watch` and by the guard.

It looks through torch's public hooks and, in sampled steps, a ``TorchFunctionMode``. It changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.learning.batches import Inputs
from holdfast.learning.finding import Finding
from holdfast.learning.flow import Activity, Flow, makes_state
from holdfast.learning.insight import Insight
from holdfast.learning.loss_inputs import LossInputs, unscaled
from holdfast.learning.loss_sites import LossSites
from holdfast.learning.observed import Hook, WatchedModel, WatchedOptimizer, WatchedScheduler, harmless
from holdfast.learning.rules.registry import Findings, judge
from holdfast.learning.sampling import FIRST_WINDOW, FULL_ROUNDS, is_sampled
from holdfast.numerics.eager import is_symbolic

_CALLS_PER_STEP = 4
_JUDGED = (1, 2, 3, 5, 10, 15, 20, 25, 30)


class Observer:
    """Watches models and optimizers, and judges what it saw.

    Args:
        models: Modules by name.
        optimizers: By name.
        schedulers: By name.
        total_steps: Optimizer steps that the run is meant to have; None: unknown.
        objective: What the loss means; see `Policy.objective`.
        frozen: Shell patterns of names of parameters that are meant not to learn.
        ignore: Rules that shall be silent.
        compiled: Whether a model is compiled, so that only what the optimizers see is observed; see `Insight`.
        guided: Whether every pass of training is inside `begin_step`: then modules have hooks nowhere else.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        schedulers: Mapping[str, Any] | None = None,
        *,
        total_steps: int | None = None,
        objective: str = "minimize",
        frozen: Sequence[str] = (),
        ignore: Sequence[str] = (),
        compiled: bool = False,
        guided: bool = False,
    ) -> None:
        self.failure: str | None = None
        self._total_steps, self._objective, self._ignore = total_steps, objective, frozenset(ignore)
        single = len(models) == 1
        self._models = {
            name: WatchedModel(name, module, "" if single else f"{name}.", frozen) for name, module in models.items()
        }
        names = {id(p): key for model in self._models.values() for key, p in model.named()}
        self._optimizers = {
            name: WatchedOptimizer(name, optimizer, set(names)) for name, optimizer in optimizers.items()
        }
        self._schedulers = {name: WatchedScheduler(name, each) for name, each in (schedulers or {}).items()}
        self._flow, self._activity, self._sites = Flow(names), Activity(), LossSites()
        self._inputs = {name: Inputs() for name in models}
        self.mode = LossInputs(self._sites, self._on_activation, self._on_backward, self._on_weight)
        self.insight = Insight(self.mode, lost=compiled)
        self._inside = False  # a model's own forward is running
        self.window = False  # the last step ended one
        self.alignment: dict[str, float] | None = None
        self._owned, self._strays = set[int](), set[int]()
        self._path: list[str] = []
        self._calls = 0
        self._ticks = self._observed = 0
        self._backwards = self._backwards_since_step = 0
        self._sampled = False
        self._guided = guided
        self._validations: list[tuple[int, float | None, float]] = []
        self._found = Findings()
        self._hooks: list[RemovableHandle] = []

    def install(self) -> None:
        """Begin to observe, after making an observer or after `close`."""
        for name, watched in self._optimizers.items():
            watched.open()
            self._hooks.append(watched.optimizer.register_step_pre_hook(self._before_hook(name)))
            self._hooks.append(watched.optimizer.register_step_post_hook(self._after_hook(name)))
        if not self._guided:
            self.insight.keep(self._watch_inputs())

    def _watch_inputs(self) -> Iterator[RemovableHandle]:
        for name, model in self._models.items():
            yield model.module.register_forward_pre_hook(Hook(self._given_hook(name)), with_kwargs=True)

    def _watch_modules(self) -> Iterator[RemovableHandle]:
        if self._guided:
            yield from self._watch_inputs()
        for name, model in self._models.items():
            prefix = "" if len(self._models) == 1 else f"{name}."
            yield model.module.register_forward_hook(Hook(self._answered_hook(name)))
            for path, module in model.module.named_modules():
                if path:
                    yield module.register_forward_pre_hook(Hook(self._enter_hook(prefix + path)))
                    yield module.register_forward_hook(Hook(self._leave), always_call=True)

    # --- sampling -------------------------------------------------------------------------------------------

    @property
    def closure(self) -> bool:
        """Return whether an optimizer calls the loss within its own step."""
        return any(watched.closure for watched in self._optimizers.values())

    @property
    def steps(self) -> int:
        """Return the steps of the optimizer that made most."""
        return max((watched.steps for watched in self._optimizers.values()), default=0)

    def due(self) -> bool:
        """Return whether the next step is to be sampled."""
        if self.failure is not None or self._backwards_since_step > 400:
            return False
        return is_sampled(self._ticks, len(self._optimizers))

    @contextlib.contextmanager
    def begin_step(self) -> Iterator[None]:
        """Observe the forward and backward passes inside, if this step is sampled; may be entered several times."""
        if not self.due():
            yield
            return
        self.look()
        try:
            self.insight.enter_mode()
            yield
        finally:
            self.insight.leave_mode()
            self.insight.end_step()

    @harmless
    def look(self) -> None:
        """Begin a sampled step: hooks on modules, counts within the step at zero."""
        self._sampled = True
        self._calls = 0
        self._path.clear()
        self._inside = False
        self._owned = set().union(*self._ids())
        for inputs in self._inputs.values():
            inputs.begin_step(self._ticks)
        self._new_pass()
        self.insight.begin_step(self._watch_modules())

    def _new_pass(self) -> None:
        self._sites.begin_step()
        self._activity.begin_step()

    # --- what the hooks see ---------------------------------------------------------------------------------

    def _enter_hook(self, path: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, _args: self._path.append(path)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._path:
            self._path.pop()

    def _given_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        model, inputs = self._models[name], self._inputs[name]

        def given(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.is_grad_enabled():
                model.unwatched[module.training] += 1
            elif self.insight.in_step and not self.mode.in_backward:
                self._inside = True
                if self._calls < _CALLS_PER_STEP:
                    self._calls += 1
                    self._note_inputs(inputs, (args, kwargs))

        return given

    def _answered_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        inputs = self._inputs[name]

        def answered(_module: nn.Module, _args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not self.mode.in_backward:
                self._inside = False
                self._note_outputs(inputs, output)

        return answered

    @harmless
    def _note_inputs(self, inputs: Inputs, tree: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            inputs.given(tree, loaded=self.mode.loaded)

    @harmless
    def _note_outputs(self, inputs: Inputs, tree: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            inputs.answered(tree)

    @harmless
    def _on_activation(self, function: str, output: Tensor) -> None:
        if not self.mode.in_backward:
            self._activity.note(function, self._path[-1] if self._path else "", output)

    def _on_weight(self, weight: nn.Parameter) -> None:
        if self._inside and weight.requires_grad and weight.is_leaf and id(weight) not in self._owned:
            self._strays.add(id(weight))

    @harmless
    def _on_backward(self, loss: Tensor) -> None:
        self._backwards += 1
        self._backwards_since_step += 1
        self._new_pass()
        if loss.numel() == 1:
            value = unscaled(loss)
            for watched in self._optimizers.values():
                watched.pending.append(value)
                del watched.pending[:-64]

    # --- optimizer steps ------------------------------------------------------------------------------------

    def _before_hook(self, name: str) -> Callable[[Optimizer, Any, Any], None]:
        def before(_optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if is_symbolic():
                return
            # The arguments of step() as torch hands them on: the optimizer itself comes first.
            self._before(name, closure=kwargs.get("closure") is not None or any(arg is not None for arg in args[1:]))

        return before

    def _after_hook(self, name: str) -> Callable[[Optimizer, Any, Any], None]:
        return lambda _optimizer, _args, _kwargs: None if is_symbolic() else self._after(name)

    @harmless
    def _before(self, name: str, *, closure: bool) -> None:
        watched = self._optimizers[name]
        if makes_state(watched.optimizer):
            return
        watched.begin_step(closure=closure)
        for scheduler in self._schedulers.values():
            if getattr(scheduler.scheduler, "optimizer", watched.optimizer) is watched.optimizer:
                scheduler.note_step()
        if not self._sampled:
            return
        for model in self._models.values():
            model.note_step()
        if closure:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            watched.note_step(self._flow.before_step(name, watched.parameters()))

    @harmless
    def _after(self, name: str) -> None:
        watched = self._optimizers[name]
        if makes_state(watched.optimizer):
            return
        self._backwards_since_step = 0
        if self._sampled and not watched.closure:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                watched.note_moved(moved=bool(self._flow.after_step()["moved"]))
        watched.end_step(told=self._guided)

    def end_step(
        self, loss: float | None = None, names: Sequence[str] = (), *, committed: bool = True, clipped: bool = False
    ) -> list[Finding]:
        """End a step, and return what is found for the first time.

        Args:
            loss: Mean loss of the step, where the caller knows it.
            names: The optimizers whose step and loss it was; none: all.
            committed: Whether the weights were changed.
            clipped: Whether the gradient was scaled down to a limit.
        """
        for name, watched in self._optimizers.items():
            if names and name not in names:
                continue
            if loss is not None:
                watched.losses.add(watched.steps, loss)
            watched.committed += committed
            watched.clipped += clipped
        self._end()
        return self.take_fresh()

    def take_fresh(self) -> list[Finding]:
        """Return what was found since the last call and never told before."""
        return self._found.take_fresh()

    @harmless
    def _end(self) -> None:
        self._ticks += 1
        sampled, self._sampled, self.mode.loaded = self._sampled, False, False
        self.insight.end_step()
        self._flow.forget_step()
        self._observed += sampled
        rounds = self._observed / max(1, len(self._optimizers))
        window = self.window = self._window_due()
        if window or (sampled and (rounds in _JUDGED or rounds % FULL_ROUNDS == 0)):
            self._judge(windows=window)

    def _window_due(self) -> bool:
        steps = self.steps
        if self._total_steps is not None:
            part = max(1, self._total_steps // 5)
            return steps >= 200 and steps % part == 0
        return steps >= FIRST_WINDOW and steps % FIRST_WINDOW == 0 and (steps // FIRST_WINDOW).bit_count() == 1

    # --- judging --------------------------------------------------------------------------------------------

    def facts(self, *, ended: bool = False) -> dict[str, Any]:
        """Return everything that is known, as plain data; the keys are described in ``diagnose.learning``."""
        owned, held = self._ids()
        layers = self._flow.facts()
        return {
            "steps": self.steps,
            "total_steps": self._total_steps,
            "ended": ended,
            "objective": self._objective,
            "backwards": self._backwards,
            "backwards_since_step": self._backwards_since_step,
            "optimizers": {
                name: watched.facts(owned, self._flow.totals.get(name, []))
                for name, watched in self._optimizers.items()
            },
            "models": {name: model.facts(held, layers) for name, model in self._models.items()},
            "schedulers": {name: scheduler.facts() for name, scheduler in self._schedulers.items()},
            "layers": layers,
            "losses": self._sites.facts(),
            "inputs": {name: inputs.facts() for name, inputs in self._inputs.items()},
            "dead_units": self._activity.dead(),
            "saturated": self._activity.saturated(),
            "validations": [list(each) for each in self._validations],
            "strays": len(self._strays),
            "alignment": self.alignment,
        }

    def _ids(self) -> tuple[set[int], set[int]]:
        """Return the parameters of the models, and those of the optimizers."""
        owned = {id(p) for model in self._models.values() for _, p in model.named()}
        return owned, {id(p) for watched in self._optimizers.values() for p in watched.parameters()}

    def _judge(self, *, windows: bool, ended: bool = False) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            facts = self.facts(ended=ended)
        self._found.add(judge(facts, ignore=self._ignore, windows=windows), windows=windows)

    def findings(self) -> list[Finding]:
        """Return what was found, the most important first."""
        return self._found.all()

    @harmless
    def validated(self, value: float) -> None:
        """Add the loss of an evaluation, less is better."""
        last = [watched.losses.points[-10:] for watched in self._optimizers.values() if watched.losses.points]
        training = sorted(loss for _, loss in last[0])[len(last[0]) // 2] if last else None
        self._validations.append((self.steps, training, float(value)))
        for model in self._models.values():
            model.note_validation()

    @harmless
    def finish(self) -> None:
        """Judge the run as a whole, at its end."""
        self._judge(windows=True, ended=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what later judgements need of the past, as plain data."""
        return {
            "steps": {name: watched.steps for name, watched in self._optimizers.items()},
            "losses": {name: [list(p) for p in watched.losses.points] for name, watched in self._optimizers.items()},
            "validations": [list(each) for each in self._validations],
            "told": self._found.told(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a past; optimizers that it does not know begin anew."""
        for name, watched in self._optimizers.items():
            watched.steps = int(state["steps"].get(name, 0))
            watched.losses.points = [(int(step), float(loss)) for step, loss in state["losses"].get(name, [])]
        self._validations = [(int(s), t, float(v)) for s, t, v in state["validations"]]
        self._found.already_told(state["told"])

    def close(self) -> None:
        """Remove all hooks; may be called again."""
        self.insight.close()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for watched in self._optimizers.values():
            watched.close()
