"""Determine whether the result of a step may be read one step later; see ``decision``.

`DecisionTiming` asks four tables of rules. `RUN_RULES` is asked when the run begins,
`BEFORE_STEP_RULES` and `RANK_RULES` before each step, and `AFTER_BACKWARD_RULES` after its backward
pass. The first rule that returns a reason wins. The step is then decided now, that is, its result
is read before its optimizer runs. Each reason is recorded once.

The rules in the first two tables have the same answer on all ranks. Those in the last two may have
different answers, and a rank with a reason then reads the result of the step alone; see
``run.joint_steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from holdfast.core.errors import PolicyError
from holdfast.core.events import run_events
from holdfast.core.text import listed
from holdfast.guard.context import RunContext
from holdfast.guard.decision import UnreadAttempt
from holdfast.guard.splitting.window import Window
from holdfast.guard.state.work import Work
from holdfast.guard.step.repetition import is_repetition_due
from holdfast.loader.random_state import RandomState, changed_generators
from holdfast.memory.tensors import versions_of
from holdfast.numerics.eager import anything_compiled

# The optimizers whose fused implementation reads ``found_inf`` (torch 2.11 to 2.13). Only
# these exact types have the gate, since a subclass may do more in its ``step`` than the kernel.
_OPTIMIZERS_WITH_GATE = (Adam, AdamW, SGD, Adagrad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why the result of a step must be read before its optimizer runs."""

    # The reason as a clause. None if it is not recorded, because it is expected from time to time.
    why: str | None
    # How to avoid it. None if it cannot be avoided.
    fix: str | None = None


_NOT_RECORDED = Reason(why=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeStep:
    """What is known about a step before its first attempt."""

    context: RunContext
    batch: Any
    # The names of the optimizers to step.
    names: Sequence[str]
    # The names of the optimizers that have stepped in this process.
    stepped: set[str]
    # The generators from which both the loss function and the loop draw.
    shared_generators: frozenset[str]
    # Whether no divergence is suspected.
    is_calm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterBackward:
    """What is known about a step after its backward pass."""

    context: RunContext
    work: Work
    attempt: UnreadAttempt
    # Whether a loss function was seen to use an average.
    average_is_used: bool


RunRule: TypeAlias = Callable[[RunContext], Reason | None]
BeforeStepRule: TypeAlias = Callable[[BeforeStep], Reason | None]
AfterBackwardRule: TypeAlias = Callable[[AfterBackward], Reason | None]


# --- when the run begins


def additional_state(context: RunContext) -> Reason | None:
    """The device cannot undo changes to objects passed as ``state=``."""
    names = [name for name in context.parts.states if name not in _names_of_averages(context)]
    if not names:
        return None
    return Reason(why=f"a device cannot undo changes to the objects passed as state= ({names[0]})")


def several_devices(context: RunContext) -> Reason | None:
    """The gate's flag is on one device, so it cannot gate a parameter on another one."""
    devices = context.parts.devices()
    if len(devices) < 2:
        return None
    return Reason(why=f"the models are on several devices ({listed(map(str, devices))})")


def device_without_events(context: RunContext) -> Reason | None:
    """Some devices cannot report that a copy to the host is complete."""
    for device in context.parts.devices():
        if not hasattr(torch.get_device_module(device), "Event"):
            return Reason(why=f"torch has no events for {device.type} devices")
    return None


RUN_RULES: tuple[RunRule, ...] = (
    additional_state,
    several_devices,
    device_without_events,
)


# --- when a step begins


def ranks_that_must_agree(step: BeforeStep) -> Reason | None:
    """Some ranks can agree on a step only before its optimizer runs, as with a sharded model."""
    why = step.context.ranks.why_decide_now
    return None if why is None else Reason(why=why)


def optimizer_without_gate(step: BeforeStep) -> Reason | None:
    """Only torch's fused optimizers read the gate's flag."""
    for name in step.names:
        optimizer = step.context.parts.optimizers[name]
        if not has_gate(optimizer):
            kind = type(optimizer).__name__
            return Reason(why=f"optimizer {name!r} ({kind}) is not fused", fix=_fix_for(optimizer))
    return None


def optimizer_with_hooks(step: BeforeStep) -> Reason | None:
    """A hook runs even if the step is refused."""
    for name in step.names:
        optimizer = step.context.parts.optimizers[name]
        hooks = (
            *optimizer._optimizer_step_pre_hooks.values(),
            *optimizer._optimizer_step_post_hooks.values(),
        )
        if hooks:
            return Reason(why=f"optimizer {name!r} has hooks that run in each step")
    # These hooks run in the steps of all optimizers.
    global_hooks = (
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    )
    if all(_only_observes(hook) for hook in global_hooks):
        return None
    return Reason(why="a hook is registered that runs in each step of all optimizers")


def _only_observes(hook: Any) -> bool:
    """Return whether a hook is one of holdfast's or torch's own, which only observe steps."""
    while isinstance(hook, partial):
        hook = hook.func
    # A method and a function have the name of their module, other objects that of their class.
    module = getattr(hook, "__module__", None) or ""
    return module.partition(".")[0] in ("holdfast", "torch")


def first_step_of_an_optimizer(step: BeforeStep) -> Reason | None:
    """An optimizer's first step creates its state, which a refused step would leave behind."""
    return None if step.stepped.issuperset(step.names) else _NOT_RECORDED


def nested_step(step: BeforeStep) -> Reason | None:
    """The outer step is not complete, so the inner one cannot be left undecided."""
    if not step.context.state.is_changing:
        return None
    return Reason(why="a step runs inside another step")


def several_batches(step: BeforeStep) -> Reason | None:
    """The batches of a window are weighted by their numbers of items, which the host reads."""
    if not isinstance(step.batch, Window):
        return None
    return Reason(why="a step over a window of batches reads the number of items of each batch")


def average_that_compiled_code_may_use(step: BeforeStep) -> Reason | None:
    """In compiled code, nothing notices that an average is used before it is up to date."""
    parts = step.context.parts
    if not parts.averages or not (parts.compiled or anything_compiled()):
        return None
    return Reason(why="compiled code may use an average (averaged=) before it is up to date")


def short_of_memory(step: BeforeStep) -> Reason | None:
    """While a remedy is in use, each committed step may change the next plan."""
    ladder = step.context.ladder
    if ladder.is_at_rest and ladder.plan.micro_batch_size is None:
        return None
    return Reason(why="the batch size is limited, or a remedy for a lack of memory is in use")


def frozen_parameters_that_change(step: BeforeStep) -> Reason | None:
    """The device does not undo changes to frozen parameters, as in a momentum encoder."""
    if not step.context.buffers.states.frozen_parameters_change():
        return None
    return Reason(why="the loss function changes frozen parameters")


def shared_generators(step: BeforeStep) -> Reason | None:
    """A generator cannot be rewound if the loop has drawn from it in the meantime."""
    if not step.shared_generators:
        return None
    generators = listed(sorted(step.shared_generators))
    return Reason(why=f"the loss function and the loop draw from the same generator ({generators})")


def suspected_divergence(step: BeforeStep) -> Reason | None:
    """While a divergence is suspected, there is no loss limit that the device could apply."""
    if step.is_calm or not _may_refuse_spikes(step.context):
        return None
    return _NOT_RECORDED


# These rules must have the same answer on all ranks, since all of them must run either
# `Steps._run_now` or `Steps._launch_or_decide`, whose collectives differ.
BEFORE_STEP_RULES: tuple[BeforeStepRule, ...] = (
    ranks_that_must_agree,
    optimizer_without_gate,
    optimizer_with_hooks,
    first_step_of_an_optimizer,
    nested_step,
    several_batches,
    average_that_compiled_code_may_use,
    suspected_divergence,
)

# These rules may have different answers on different ranks. With several ranks, their reason
# applies only after the backward pass, together with those of `AFTER_BACKWARD_RULES`.
RANK_RULES: tuple[BeforeStepRule, ...] = (
    short_of_memory,
    frozen_parameters_that_change,
    shared_generators,
)


# --- after the backward pass


def buffer_without_copy(step: AfterBackward) -> Reason | None:
    """A buffer that was replaced, or has changed for the first time, cannot be gated."""
    if step.context.buffers.can_gate():
        return None
    return Reason(why="the loss function replaces a buffer, or changes one for the first time")


def frozen_parameters_have_changed(step: AfterBackward) -> Reason | None:
    """Frozen parameters may begin to change in any step, such as after a warm-up."""
    if not step.context.buffers.states.frozen_parameters_have_changed():
        return None
    return Reason(why="the loss function changes frozen parameters")


def parameter_without_state(step: AfterBackward) -> Reason | None:
    """A parameter's first step creates its state, which a refused step would leave behind."""
    for name in step.work.names:
        optimizer = step.context.parts.optimizers[name]
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if len(optimizer.state) >= count:
            # Usually every parameter has state, which is quick to check.
            continue
        for group in optimizer.param_groups:
            if not _needs_state(optimizer, group):
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and not optimizer.state.get(parameter):
                    return Reason(
                        why=f"a parameter of optimizer {name!r} is stepped for the first time"
                    )
    return None


def average_that_the_loss_uses(step: AfterBackward) -> Reason | None:
    """The average must include the last step before the loss function uses it."""
    if not step.average_is_used:
        return None
    return Reason(why="the loss function uses an average (averaged=)")


def repetition_is_due(step: AfterBackward) -> Reason | None:
    """A scheduled repetition compares two passes, so their results must be read."""
    return _NOT_RECORDED if is_repetition_due(step.context) else None


def changed_batch(step: AfterBackward) -> Reason | None:
    """A batch that the loss function has changed cannot be used again if the step is refused."""
    if versions_of(step.work.tensors) == step.work.versions:
        return None
    return Reason(why="the loss function changes its batch in place")


AFTER_BACKWARD_RULES: tuple[AfterBackwardRule, ...] = (
    buffer_without_copy,
    frozen_parameters_have_changed,
    parameter_without_state,
    average_that_the_loss_uses,
    repetition_is_due,
    changed_batch,
)


# --- optimizers


def has_gate(optimizer: Optimizer) -> bool:
    """Return whether an optimizer changes nothing in a step if ``found_inf`` is 1."""
    if type(optimizer) not in _OPTIMIZERS_WITH_GATE:
        return False
    return all(group.get("fused") for group in optimizer.param_groups)


def _needs_state(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether the parameters of a group have state once they have been stepped."""
    return not (type(optimizer) is SGD and group["momentum"] == 0)


def _fix_for(optimizer: Optimizer) -> str:
    """Return how to get an optimizer with a gate."""
    kind = type(optimizer)
    if kind in _OPTIMIZERS_WITH_GATE:
        return f"create it with torch.optim.{kind.__name__}(..., fused=True)"
    return "use torch's Adam, AdamW, SGD or Adagrad with fused=True"


def _may_refuse_spikes(context: RunContext) -> bool:
    """Return whether the policy refuses steps with finite values that are unusually high."""
    return context.policy.spike_action in ("skip", "roll_back")


def _names_of_averages(context: RunContext) -> set[str]:
    """Return the names in ``parts.states`` that belong to averages of the models."""
    averages = {id(average) for average in context.parts.averages.values()}
    return {name for name, state in context.parts.states.items() if id(state) in averages}


class GeneratorUse:
    """Finds the random generators from which both the loss function and the loop draw."""

    def __init__(self) -> None:
        # The generators that the last step has moved, and the random state after it. None if the
        # loop may have restored the state since then.
        self._last_step: tuple[frozenset[str], RandomState] | None = None
        # All generators found so far.
        self.shared: frozenset[str] = frozenset()

    def note_step(self, before: RandomState, after: RandomState) -> None:
        """Note the random state before and after a step."""
        self._last_step = (changed_generators(before, after), after)

    def note_next_step(self, now: RandomState) -> None:
        """Note the random state at the beginning of the next step."""
        if self._last_step is None:
            return
        moved, after = self._last_step
        if moved:
            self.shared |= moved & changed_generators(after, now)

    def forget(self) -> None:
        """Ignore draws until the next step, such as those for the order of the next epoch."""
        self._last_step = None


class DecisionTiming:
    """Determines for each step of a run whether its result may be read one step later.

    Args:
        context: The objects that the parts of the run share.
        framework_reason: Why a framework needs each result at once. None if the user wrote the
            loop.

    Raises:
        PolicyError: H105 if the policy asks for late decisions, but an optimizer has no gate.
    """

    def __init__(self, context: RunContext, framework_reason: str | None) -> None:
        self._context = context
        self.generators = GeneratorUse()
        # The names of the optimizers that have stepped in this process.
        self._stepped: set[str] = set()
        # Whether a loss function was seen to use an average.
        self._average_is_used = False
        # The reasons that were recorded.
        self._recorded: set[str] = set()
        # The reason in `RANK_RULES` why this rank must read the result of the current step at once,
        # whatever other ranks do. It is found before the step, and applies after backward.
        self._reason_of_rank: Reason | None = None
        decide = context.policy.decide
        if decide == "late":
            for name, optimizer in context.parts.optimizers.items():
                _check_has_gate(name, optimizer)
        # Whether any step of this run may be decided late. If a rule forbids it, this is cleared in
        # the first step, once the reason has been recorded.
        self.may_decide_late = decide == "late" or (
            decide == "auto" and context.parts.device_type() != "cpu"
        )
        # The reason why no step of this run is decided late. It is recorded in the first step, when
        # the recording is open.
        self._reason_of_run: Reason | None = None
        if framework_reason is not None:
            self._reason_of_run = Reason(why=framework_reason)
        elif self.may_decide_late:
            self._reason_of_run = _reason_in(RUN_RULES, context)

    def must_decide_now(self, batch: Any, names: Sequence[str], *, is_calm: bool) -> bool:
        """Return whether the result of the next step must be read before its optimizer runs.

        The answer is the same on all ranks.

        Args:
            batch: The batch of the step.
            names: The names of the optimizers to step.
            is_calm: Whether no divergence is suspected. It must be the same on all ranks.
        """
        if not self.may_decide_late:
            return True
        reason = self._reason_of_run
        if reason is not None:
            self.may_decide_late = False
        else:
            step = BeforeStep(
                context=self._context,
                batch=batch,
                names=names,
                stepped=self._stepped,
                shared_generators=self.generators.shared,
                is_calm=is_calm,
            )
            reason = _reason_in(BEFORE_STEP_RULES, step)
            self._reason_of_rank = _reason_in(RANK_RULES, step)
            if not self._context.ranks.has_group:
                # A process without other ranks need not wait until after backward.
                reason = reason or self._reason_of_rank
        return self._note(reason)

    def must_decide_attempt_now(self, work: Work, attempt: UnreadAttempt) -> bool:
        """Return whether the result of an attempt must be read before the optimizer runs.

        The answer may be different on other ranks. Call this only after `must_decide_now` has
        returned False for the step.
        """
        step = AfterBackward(
            context=self._context,
            work=work,
            attempt=attempt,
            average_is_used=self._average_is_used,
        )
        return self._note(self._reason_of_rank or _reason_in(AFTER_BACKWARD_RULES, step))

    def note_committed(self, names: Sequence[str]) -> None:
        """Note that these optimizers have stepped."""
        self._stepped.update(names)

    def note_average_use(self) -> None:
        """Note that the loss function of the current step uses an average."""
        self._average_is_used = True

    def loss_limit(self, series: str) -> float:
        """Return the loss above which the device must refuse the next step.

        Args:
            series: The name of the series of losses to which the step belongs.
        """
        if not _may_refuse_spikes(self._context):
            return float("inf")
        calm_loss = self._context.spikes.calm_loss(series)
        # While a divergence is suspected, refuse every step, so that the host judges it.
        return float("-inf") if calm_loss is None else calm_loss

    def _note(self, reason: Reason | None) -> bool:
        """Record a reason once, and return whether there is one."""
        if reason is None:
            return False
        if reason.why and reason.why not in self._recorded:
            self._recorded.add(reason.why)
            event: run_events.DecidedNow
            if reason.fix:
                event = run_events.OptimizerNotFused(why=reason.why, fix=reason.fix)
            else:
                event = run_events.DecidedNow(why=reason.why)
            self._context.record.emit(event)
        return True


def _reason_in(rules: Sequence[Callable[[Any], Reason | None]], facts: Any) -> Reason | None:
    """Return the reason of the first rule that has one, or None."""
    for rule in rules:
        reason = rule(facts)
        if reason is not None:
            return reason
    return None


def _check_has_gate(name: str, optimizer: Optimizer) -> None:
    """Raise H105 if the policy asks for late decisions, but an optimizer has no gate."""
    if has_gate(optimizer):
        return
    raise PolicyError(
        f'decide="late" with optimizer {name!r}, a {type(optimizer).__name__} that is not fused',
        limit="only a fused optimizer can keep a refused step from changing the weights",
        fix=f'{_fix_for(optimizer)}, or set decide="auto".',
        rule="H105",
    )
