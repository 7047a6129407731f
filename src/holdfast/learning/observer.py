"""`Observer`: the engine of the diagnosis, shared by `watch` and by the guard.

It looks through torch's public hooks and, in sampled steps, a ``TorchFunctionMode``. It changes
nothing. What it sees goes into `Facts`, which the rules judge.
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
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.learning.eager_hooks import LOST, EagerHooks, Hook
from holdfast.learning.facts import Facts
from holdfast.learning.finding import Finding
from holdfast.learning.functions import FunctionMode, LossPlaces, unscaled
from holdfast.learning.inputs import InputObserver, fingerprint
from holdfast.learning.layers import ActivationObserver, LayerObserver
from holdfast.learning.measures import median
from holdfast.learning.models import ModelObserver, is_meant
from holdfast.learning.optimizers import OptimizerObserver, SchedulerObserver
from holdfast.learning.rules.judge import Findings, judge
from holdfast.memory.oom import find_out_of_memory

_FIRST_WINDOW = 400
"""Steps after which a run is judged as a whole for the first time."""
SAMPLED, EXAMINED = (8, 12, 80), (6, 40, 160)
"""Rounds of all optimizers at first, then one step in so many before the first window's end, and
after it. Sampled: losses, their targets, gradients; examined too: layers, activations, weights,
inputs, what losses are given."""
_CALLS_PER_STEP = 4
_JUDGED, _JUDGED_EVERY = (1, 3, 8, 10), 20  # sampled rounds

_log = logging.getLogger("holdfast")
_Rest = ParamSpec("_Rest")


def is_sampled(step: int, optimizers: int, schedule: tuple[int, int, int] = SAMPLED) -> bool:
    """Return whether a step is looked at.

    All of the first, then few, two rounds at no fixed distance.
    """
    players, (first, share, later_share) = max(1, optimizers), schedule
    if step < first * players:
        return True
    # Two rounds, so that their batches can be compared. Multiplicative hashing instead of every
    # tenth: it cannot fall into step with epochs, it draws no random number, and what is chosen
    # once in 40 is chosen once in 12 too.
    share = share if step < _FIRST_WINDOW * players else later_share
    return (step // (2 * players) * 2654435761) % 2**32 < 2**32 // share


def _harmless(
    method: Callable[Concatenate[Observer, _Rest], None],
) -> Callable[Concatenate[Observer, _Rest], None]:
    """Keep a failure of the diagnosis out of the training.

    It is logged, and nothing is observed any more.

    For want of memory only this observation is left out.
    """

    @functools.wraps(method)
    def guarded(self: Observer, *args: _Rest.args, **kwargs: _Rest.kwargs) -> None:
        if self.failure is not None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            if find_out_of_memory(error) is not None:
                return  # the step is made again with less, and looked at then
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("the diagnosis has switched itself off: %s", self.failure, exc_info=error)

    return guarded  # type: ignore[return-value]


class Observer:
    """Observes models and optimizers, and judges what it saw.

    `frozen` are parameters and modules that are meant not to learn (H102 for one that is none), see
    `is_meant`;
    `ignore` rules that shall be silent. `compiled`: a model is compiled, so that only what the
        optimizers see is
    observed, see `EagerHooks`. `guided`: every pass of training is inside `begin_step`, and losses
        are given to
    `end_step`.
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
        self._facts = Facts(total_steps=total_steps, objective=objective)
        self._ignore, self._guided = frozenset(ignore), guided
        self._prefixes = {name: "" if len(models) == 1 else f"{name}." for name in models}
        self._models = {
            name: ModelObserver(module, self._prefixes[name], frozen)
            for name, module in models.items()
        }
        named = [
            f"{self._prefixes[key]}{k}"
            for key, model in models.items()
            for k, _ in model.named_parameters()
        ]
        for pattern in frozen:
            if not any(is_meant(name, pattern) for name in named):
                raise PolicyError(
                    f"frozen names {pattern!r}, which is no parameter or module of the models",
                    limit=(
                        "it is a list of names as named_parameters() has them, of modules, or of"
                        " shell patterns"
                    ),
                    fix=did_you_mean(
                        pattern,
                        named,
                        otherwise=f"pass such as {'.'.join(named[:1])!r}, or drop it.",
                    ),
                    rule="H102",
                )
        names = {id(p): key for model in self._models.values() for key, p in model.named()}
        self._optimizers = {
            name: OptimizerObserver(each, set(names)) for name, each in optimizers.items()
        }
        self._schedulers = {
            name: SchedulerObserver(each) for name, each in (schedulers or {}).items()
        }
        self._inputs = {name: InputObserver() for name in models}
        self._layers, self._activations, self._losses = (
            LayerObserver(names),
            ActivationObserver(),
            LossPlaces(),
        )
        self.mode = FunctionMode(
            self._losses, self._on_activation, self._on_backward, self._on_weight
        )
        self.hooks = EagerHooks(self.mode, lost=compiled)
        self._inside = False  # a model's own forward is running
        self._owned, self._strays = set[int](), set[int]()
        self._held, self._shapes = set[int](), set[torch.Size]()  # of what the optimizers hold
        self._copies: dict[int, int] = {}  # first fingerprints of weights that no optimizer holds
        self._copied, self._examined = set[int](), 0  # steps with such, steps that were examined
        self._copies_change = False
        self._path: list[str] = []  # of the modules that run
        self._calls = 0
        self._ticks = self._observed = 0
        self.sampled = self._lost_said = False  # sampled: this step is looked at
        self._found = Findings()

    def install(self) -> None:
        """Begin to observe, after making an observer or after `close`."""
        for each in self._optimizers.values():
            each.open()
        if not self._guided:
            self.hooks.keep(self._hook_inputs())

    def _hook_inputs(self) -> Iterator[RemovableHandle]:
        for name, model in self._models.items():
            yield model.module.register_forward_pre_hook(
                Hook(partial(self._given, name)), with_kwargs=True
            )

    def _hook_modules(self) -> Iterator[RemovableHandle]:
        if self._guided:
            yield from self._hook_inputs()
        for name, model in self._models.items() if self.mode.closely else ():
            yield model.module.register_forward_hook(Hook(partial(self._answered, name)))
            for path, module in model.module.named_modules():
                if path:
                    enter = partial(self._enter, self._prefixes[name] + path)
                    yield module.register_forward_pre_hook(Hook(enter))
                    yield module.register_forward_hook(Hook(self._leave), always_call=True)

    # --- sampling
    # ------------------------------------------------------------------------

    @property
    def closure(self) -> bool:
        """Whether an optimizer calls the loss within its own step."""
        return any(each.known.closure for each in self._optimizers.values())

    @property
    def steps(self) -> int:
        """Steps of the optimizer that made most."""
        most = 0
        for each in self._optimizers.values():
            most = max(most, each.known.steps)
        return most

    def due(self) -> bool:
        """Return whether the next step is to be sampled."""
        if self.failure is not None or self._facts.backwards_since_step > 400:
            return False
        return is_sampled(self._ticks, len(self._optimizers))

    def begin_step(self) -> contextlib.AbstractContextManager[None]:
        """Observe the forward and backward passes inside, if this step is `due`.

        May be entered several times.
        """
        return self._seeing() if self.due() else contextlib.nullcontext()

    @contextlib.contextmanager
    def _seeing(self) -> Iterator[None]:
        self.look()
        try:
            self.hooks.enter_mode()
            yield
        finally:
            self.hooks.leave_mode()
            self.hooks.end_step()

    @_harmless
    def look(self) -> None:
        """Begin a sampled step: hooks on modules, counts within the step at zero."""
        self.sampled, self._inside = True, False
        self._calls = 0
        self._path.clear()
        self.mode.order = ""
        for inputs in self._inputs.values():
            inputs.begin_step(self._ticks)
        self._begin_pass()
        self.mode.closely = is_sampled(self._ticks, len(self._optimizers), EXAMINED)
        if self.mode.closely:
            owned, self._held = self._ids()
            self._owned = owned | self._held
            self._shapes = {
                p.shape for each in self._optimizers.values() for p in each.parameters()
            }
            self._examined += 1
        self.hooks.begin_step(self._hook_modules())

    def _begin_pass(self) -> None:
        self._losses.begin_pass()
        self._activations.begin_pass()

    # --- what the hooks see
    # ------------------------------------------------------------------------

    def _enter(self, path: str, _module: nn.Module, _args: Any) -> None:
        self._path.append(path)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._path:
            self._path.pop()

    @_harmless
    def _given(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            self._models[name].note_pass_without_graph()
        elif self.sampled and not self.mode.in_backward:
            self._inside = True
            self._calls += 1
            if self._calls <= _CALLS_PER_STEP:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    self._inputs[name].note_arguments(
                        (args, kwargs) if kwargs else args, closely=self.mode.closely
                    )

    @_harmless
    def _answered(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not self.mode.in_backward:
            self._inside = False
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._inputs[name].note_answer(output)

    @_harmless
    def _on_activation(self, function: str, output: Tensor) -> None:
        if not self.mode.in_backward:
            self._activations.note(function, self._path[-1] if self._path else "", output)

    @_harmless
    def _on_weight(self, weight: nn.Parameter, *, graph: bool) -> None:
        if (
            graph
            and self._inside
            and weight.requires_grad
            and weight.is_leaf
            and id(weight) not in self._owned
        ):
            self._strays.add(id(weight))
        if not graph and id(weight) not in self._held and weight.shape in self._shapes:
            seen = fingerprint(weight)
            self._copies_change = (
                self._copies_change or self._copies.setdefault(id(weight), seen) != seen
            )
            self._copied.add(self._ticks)

    @_harmless
    def _on_backward(self, loss: Tensor) -> None:
        self._facts.backwards += 1
        self._facts.backwards_since_step += 1
        self._begin_pass()
        if loss.numel() == 1 and not self._guided:
            value = unscaled(loss)
            for each in self._optimizers.values():
                each.pending.append(value)
                del each.pending[:-64]

    # --- optimizer steps
    # ------------------------------------------------------------------------

    @_harmless
    def before_step(
        self,
        name: str,
        *,
        closure: bool = False,
        norms: Callable[[], Mapping[int, float]] | None = None,
    ) -> None:
        """Take in that an optimizer is about to step.

        `norms` gives those of unclipped gradients, where known.
        """
        each = self._optimizers[name]
        each.begin_step(closure=closure)
        for scheduler in self._schedulers.values():
            if getattr(scheduler.scheduler, "optimizer", each.optimizer) is each.optimizer:
                scheduler.note_step()
        if not self.sampled:
            self._facts.backwards_since_step = 0
            return
        for model in self._models.values():
            model.note_step()
        if not closure:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                known, weights = norms() if norms else None, self.mode.closely
                each.note_gradients(
                    self._layers.before_step(name, each.parameters(), known, weights=weights)
                )

    @_harmless
    def after_step(self, name: str) -> None:
        """Take in that an optimizer has stepped; a guided step that is not sampled needs it not."""
        each, moved = self._optimizers[name], False
        self._facts.backwards_since_step = 0
        if self.sampled and not each.known.closure:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                moved = self._layers.after_step()
        each.end_step(moved=moved, has_loss=self._guided)

    def end_step(
        self,
        loss: float | None = None,
        names: Sequence[str] = (),
        *,
        committed: bool = True,
        clipped: float = 0.0,
    ) -> list[Finding]:
        """End a step of these optimizers (none: all), and return what is found for the first time.

        `loss` is the mean loss, where the caller knows it, and `clipped` the norm that the gradient
        was scaled down to, or 0. The weights of a step that is not `committed` were not changed.
        """
        for name, each in self._optimizers.items():
            if names and name not in names:
                continue
            if loss is not None:
                each.add_loss(loss)
            each.known.committed_steps += committed
            if clipped:
                each.known.clipped_steps, each.known.clipped_to = (
                    each.known.clipped_steps + 1,
                    clipped,
                )
        self._ticks += 1
        window = self._window_due()
        if not (window or self.sampled):
            return []
        self._end(window=window)
        return self.take_fresh()

    @_harmless
    def _end(self, *, window: bool) -> None:
        sampled, self.sampled = self.sampled, False
        if sampled and "c" in (order := self.mode.order):
            early = order.startswith("c") and order.endswith("b")
            self._facts.early_clips = self._facts.early_clips + 1 if early else 0
        if sampled:
            self.hooks.end_step()
        self._observed += sampled
        rounds = self._observed / max(1, len(self._optimizers))
        if window or (sampled and (rounds in _JUDGED or rounds % _JUDGED_EVERY == 0)):
            self._judge(windows=window)

    def _window_due(self) -> bool:
        steps, total = self.steps, self._facts.total_steps
        if total is not None:
            return steps >= 200 and steps % max(1, total // 5) == 0
        return (
            steps >= _FIRST_WINDOW
            and steps % _FIRST_WINDOW == 0
            and (steps // _FIRST_WINDOW).bit_count() == 1
        )

    # --- judging
    # ------------------------------------------------------------------------

    def facts(self, *, windows: bool = True) -> Facts:
        """Return everything that is known; it changes with the next step.

        Without `windows` only for contracts.
        """
        owned, held = self._ids()
        facts = self._facts
        facts.steps = self.steps
        facts.strays = len(self._strays)
        facts.followed = self._copies_change and len(self._copied) >= 0.8 * self._examined
        facts.layers = self._layers.facts(windows=windows)
        facts.optimizers = {
            name: each.facts(owned, windows=windows) for name, each in self._optimizers.items()
        }
        facts.models = {name: each.facts(held, facts.layers) for name, each in self._models.items()}
        facts.schedulers = {name: each.known for name, each in self._schedulers.items()}
        facts.losses = self._losses.facts(windows=windows)
        facts.inputs = {name: each.facts(windows=windows) for name, each in self._inputs.items()}
        if windows:
            facts.dead_units, facts.saturated = (
                self._activations.dead(),
                self._activations.saturated(),
            )
        return facts

    def _ids(self) -> tuple[set[int], set[int]]:
        """Return the parameters of the models, and those of the optimizers."""
        owned = {id(p) for model in self._models.values() for _, p in model.named()}
        return owned, {id(p) for each in self._optimizers.values() for p in each.parameters()}

    def _judge(self, *, windows: bool, ended: bool = False) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            facts = self.facts(windows=windows)
        facts.ended = ended
        statistical = judge(facts, "window", self._ignore) if windows else None
        self._found.add(judge(facts, "contract", self._ignore), statistical)

    def findings(self) -> list[Finding]:
        """Return what was found, the most important first."""
        return self._found.all()

    def take_fresh(self) -> list[Finding]:
        """Return what was found since the last call and never returned before."""
        return self._found.take_fresh()

    def take_notice(self) -> str | None:
        """Return, once, why little is seen; None if all is seen."""
        if self._lost_said or not self.hooks.lost:
            return None
        self._lost_said = True
        return LOST

    @_harmless
    def validated(self, value: float) -> None:
        """Add the loss of an evaluation, less is better."""
        losses = next(
            (each.known.losses[-10:] for each in self._optimizers.values() if each.known.losses), []
        )
        self._facts.validations.append(
            (self.steps, median([loss for _, loss in losses]), float(value))
        )
        for model in self._models.values():
            model.note_validation()

    def aligned(self, facts: dict[str, float]) -> None:
        """Add how the attention of a speech synthesiser lies; see `alignment_facts`."""
        self._facts.alignment = facts

    @_harmless
    def finish(self) -> None:
        """Judge the run as a whole, at its end."""
        self._judge(windows=True, ended=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what later judgements need of the past, as plain data."""
        return {
            "optimizers": {name: each.state_dict() for name, each in self._optimizers.items()},
            "validations": [list(each) for each in self._facts.validations],
            "reported": self._found.reported(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a past; optimizers that it does not know begin anew."""
        for name, each in self._optimizers.items():
            if name in state["optimizers"]:
                each.load_state_dict(state["optimizers"][name])
        self._facts.validations = [(int(s), t, float(v)) for s, t, v in state["validations"]]
        self._found.load_reported(state["reported"])

    def close(self) -> None:
        """Remove all hooks; may be called again."""
        self.hooks.close()
        for each in self._optimizers.values():
            each.close()
