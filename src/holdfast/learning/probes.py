"""Find out why a run does not learn, by trying things on a copy: only after a rule has seen that it does not.

H831  does the loss fall along the negative gradient?        wrong sign, wrong backward, optimizer that climbs
H830  does the loss change when an input is given to others?  a path from input to output that is broken
H825  does the run's own step lower the loss of its batch?    learning rate too high
H824  does a hundred times the step lower it far more?        learning rate too low
H829  can a fresh Adam fit eight samples?                     fault in code or architecture, or dead weights

On the CPU this runs in a forked copy of the process. With an accelerator it runs in place, and all that a trial
changes (see ``trial``) is put back; side effects of the loss function beside its models remain. Every evaluation
starts from the same random state, so dropout and noise are the same in all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.core.clock import Clock
from holdfast.core.forked import NoAnswer, backward_works_in_a_copy, in_a_copy_of_this_process
from holdfast.learning.finding import Finding
from holdfast.learning.trial import CannotTry, Trial
from holdfast.loader.splitting import Split
from holdfast.memory.oom import clear_exception_frames, find_out_of_memory
from holdfast.numerics.eager import eager

_STEPS = 20  # on one batch: with too high a learning rate its loss rises at more than half of them
_TAIL = 5
_LOWER = (0.3, 0.1, 0.03, 0.01, 0.001)
_HIGHER = (10.0, 100.0, 1e3, 1e4, 1e5)
_FELL = 0.01  # of the loss in 20 steps on one batch: healthy runs of the tests fall by 0.02 and more
_SMOOTH = 0.1  # of the way down is climbed again: healthy runs below 0.05, rates too high above 1
_HARDLY = 3e-3
_OFTEN = 0.3  # of the steps: a sampled loss of reinforcement learning jumps now and then
_FELL_CLEARLY = 0.05
_FIT_STEPS = 200  # on a few samples, of which a sound model learns at least half in them
_FIT_SAMPLES = 8
_FIT_DROP = 0.5
_FIT_PAIRS = 0.75
_FIT_DROP_ALONE = 0.05  # of losses without targets: a likelihood or a divergence has a floor that nobody knows
_FIT_RATES = (1e-3, 1e-2, 1e-1)  # Adam moves each weight by at most this: unscaled targets need the last one
_TENSORS = 16
# A correct gradient has the slope 1, a reversed one -1. A rounding in the forward, as in quantised networks, has any.
_REVERSED = (-5.0, -0.3)
_AGREE = 0.8  # the slopes of two steps of different length; those of a rounded forward do not
_SAME = 1e-7  # relative: an input that is ignored changes no bit; unscaled targets leave a healthy one 1e-6


def probe(
    batch: Any,
    loss_fn: Callable[[Any], Any],
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    *,
    size: int | None,
    split: Split,
    budget_seconds: float,
    clock: Clock,
    before_step: Callable[[], object] | None = None,
    in_place: bool | None = None,
) -> list[Finding]:
    """Try out on one batch why a run does not learn. Nothing of the run is changed.

    Args:
        batch: Fits into memory as a whole. The first 32 samples are used, if it can be cut.
        loss_fn: Of a batch, as given to ``Guard.step``, and under autocast by itself if the run is.
        models: By name: all that the loss function uses.
        optimizers: By name: those that the step moves. Gradients go to their parameters only.
        size: Samples of the batch; None if it has no batch dimension.
        split: How it is cut.
        budget_seconds: When to stop trying; looked at before each evaluation.
        clock: Time.
        before_step: Called between backward and step, to clip as the run does.
        in_place: Whether to try in this process. None: only if no copy of it can make a backward pass, as with
            accelerators.

    Returns:
        Causes that were found, none in a healthy run; and a note, with rule H828, of what was not tried.
    """
    deadline = clock.monotonic_seconds() + budget_seconds
    trial = Trial(
        batch, size, split, loss_fn, models, optimizers, before_step, lambda: clock.monotonic_seconds() >= deadline
    )
    if in_place is None:
        devices = {parameter.device.type for model in models.values() for parameter in model.parameters()}
        in_place = not devices <= {"cpu", "meta"} or not backward_works_in_a_copy()
    if in_place:
        return _probe(trial)
    try:
        answer = in_a_copy_of_this_process(
            lambda: {"findings": [asdict(finding) for finding in _probe(trial)]},
            timeout_seconds=2 * budget_seconds + 30,  # one evaluation may take long, and is not interrupted
        )
    except NoAnswer as error:
        return [_untried({"all probes": str(error)})]
    return [Finding(**finding) for finding in answer["findings"]]


def _probe(trial: Trial) -> list[Finding]:
    found: list[Finding] = []
    untried: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(eager())  # what is tried has other sizes, and a copy of the process has no compiler
        try:
            stack.enter_context(trial)
        except Exception as error:  # noqa: BLE001 - no memory for copies: nothing was changed yet
            return [_untried({"all probes": _why(error)})]
        for name, attempt in _PROBES.items():
            if {finding.rule for finding in found} & _EXPLAINED_BY.get(name, set()):
                continue
            try:
                trial.begin()
                found += attempt(trial)
            except Exception as error:  # noqa: BLE001 - a loss function may fail on what it never meets in training
                untried[name] = _why(error)
    return [*found, _untried(untried)] if untried else found


def _why(error: BaseException) -> str:
    why = find_out_of_memory(error) or f"{type(error).__name__}: {error}"[:200]
    clear_exception_frames(error)
    return str(error) if isinstance(error, CannotTry) else why


_EXPLAINED_BY = {"H825": {"H831"}, "H829": {"H831", "H830", "H825"}}


def _cause(rule: str, what: str, fix: str, where: str = "", *, confidence: float, sure: bool = True) -> Finding:
    return Finding(
        rule=rule,
        severity="error" if sure else "advice",
        kind="cause",
        confidence=confidence,
        what=what,
        fix=fix,
        where=where,
    )


def _untried(why: dict[str, str]) -> Finding:
    return Finding(
        rule="H828",
        severity="note",
        kind="symptom",
        confidence=1.0,
        what=f"The search for the cause is not complete: {', '.join(why)} not tried ({next(iter(why.values()))})",
        fix="Allow the diagnosis more time, or look at the causes that the rule names one by one.",
    )


# --- the direction of the gradient ------------------------------------------------------------------------------


def _try_direction(trial: Trial) -> list[Finding]:
    """Compare what the gradient predicts with what the loss does, for all weights and for single tensors."""
    loss = trial.finite_loss(trial.batch, backward=True)
    gradients = trial.gradients()
    squares = {name: float(gradient.double().square().sum()) for name, (_, gradient) in gradients.items()}
    total = sum(squares.values())
    if total == 0 or not math.isfinite(total):
        return []
    whole = trial.slopes(list(gradients.values()), loss)
    largest = sorted((name for name in squares if squares[name] > 1e-4 * total), key=lambda name: -squares[name])
    single = {name: trial.slopes([gradients[name]], loss) for name in largest[:_TENSORS]}
    reversed_tensors = [name for name, slopes in single.items() if _is_reversed(slopes)]
    is_all = _is_reversed(whole)
    if not is_all and not reversed_tensors:
        return []
    part = "" if is_all else f" of {len(reversed_tensors)} weight tensor(s)"
    fix = (
        "Look for a wrong sign in a custom autograd function or in a gradient hook between these weights and the "
        "loss; a gradient-reversal layer does this on purpose."
    )
    return [
        _cause(
            "H831",
            f"The loss rises along the negative gradient{part}",
            fix,
            ", ".join(reversed_tensors[:3]) + ", ..." * (len(reversed_tensors) > 3),
            confidence=0.95 if is_all else 0.8,
            sure=is_all,
        )
    ]


def _is_reversed(slopes: Sequence[float]) -> bool:
    low, high = _REVERSED
    return len(slopes) == 2 and low < min(slopes) and max(slopes) < high and max(slopes) < _AGREE * min(slopes)


# --- the way from the inputs to the loss --------------------------------------------------------------------------


def _try_inputs(trial: Trial) -> list[Finding]:
    """Give samples the inputs of others, one tensor of the batch at a time."""
    loss = trial.loss(trial.batch)
    same = max(_SAME * abs(loss), 2 * abs(trial.loss(trial.batch) - loss))  # kernels may not be reproducible
    influence: dict[int, float] = {}
    for number in trial.varying(trial.batch):
        changes = []
        for changed in trial.mixed(trial.batch, number):
            with contextlib.suppress(ValueError, RuntimeError, IndexError):  # lengths that fit no other sample
                changes.append(abs(trial.loss(changed) - loss))
        influence[number] = max(changes) if len(changes) == 3 and not any(map(math.isnan, changes)) else math.inf
    ignored = [number for number, change in influence.items() if change <= same]
    # An input is real numbers, or rows of integers; a column may be ids.
    ignored = [n for n in ignored if trial.tensor(n).is_floating_point() or trial.tensor(n).ndim > 1]
    if not ignored or len(ignored) == len(influence):
        return []
    read = trial.read_by_loss()
    fix = (
        "Follow it through forward: an output that is overwritten or detached, a multiplication by 0, an activation "
        "that is the same for every input, or units that are all dead."
    )
    names = {number: f"tensor {number} of the batch" for number in influence}
    return [
        _cause(
            "H830",
            f"The loss stays the same when samples are given the {names[number]} of other samples",
            fix,
            names[number],
            confidence=0.95,
        )
        for number in ignored
        if number in read
    ]


# --- the learning rate --------------------------------------------------------------------------------------------


def _try_rates(trial: Trial) -> list[Finding]:
    """Make the run's own steps on one batch; if they do not lower its loss, with other learning rates."""
    own = trial.own_steps(1.0, _STEPS)
    start, fall = abs(own[0]), _fall(own)
    if not math.isfinite(start):
        raise CannotTry(f"its loss is {own[0]:g}")
    if _climb(own) > fall and _rises(own) >= _OFTEN:
        return _try_lower_rates(trial, own)
    if max(abs(loss - own[0]) for loss in own) < _HARDLY * start:
        for factor in _HIGHER:
            higher = trial.own_steps(factor, _STEPS)
            if _fall(higher) > _FELL_CLEARLY * start:
                return [_rate_finding("H824", trial, own, factor, higher)]
    return []


def _try_lower_rates(trial: Trial, own: list[float]) -> list[Finding]:
    lower = own
    for factor in _LOWER:
        lower = trial.own_steps(factor, _STEPS)
        if _fall(lower) > max(_FELL * abs(own[0]), _fall(own)) and _climb(lower) < _SMOOTH * _fall(lower):
            return [_rate_finding("H825", trial, own, factor, lower)]
    if _fall(lower) >= -1e-6 * abs(own[0]) or _rises(lower) < 0.9:
        return []
    what = "The optimizer moves against the gradient: the loss rises with every step, however small"
    fix = "Look for maximize=True, a negative learning rate or a wrong sign in the optimizer's step."
    return [_cause("H831", what, fix, trial.optimizer_names, confidence=0.9)]


def _fall(losses: Sequence[float]) -> float:
    """Return by how much the last losses lie below the first; -Inf if one is not finite."""
    if not all(map(math.isfinite, losses)):
        return -math.inf
    return losses[0] - math.fsum(losses[-_TAIL:]) / _TAIL


def _climb(losses: Sequence[float]) -> float:
    """Return the sum of all steps upwards."""
    return math.fsum(max(after - before, 0.0) for before, after in itertools.pairwise(losses))


def _rises(losses: Sequence[float]) -> float:
    """Return the share of steps after which the loss was not lower."""
    return sum(not after < before for before, after in itertools.pairwise(losses)) / (len(losses) - 1)


def _rate_finding(rule: str, trial: Trial, own: list[float], factor: float, other: list[float]) -> Finding:
    after = math.fsum(other[-_TAIL:]) / _TAIL
    if rule == "H825":
        what = (
            f"too high: the run's own steps raise the loss of one batch in {_rises(own):.0%} of {len(own) - 1} steps"
        )
    else:
        what = "too low: the run's own steps hardly change the loss of one batch"
    return _cause(
        rule,
        f"The learning rate is {what}, with {factor:g} times the rate it falls from {other[0]:.4g} to {after:.4g}",
        f"Multiply the learning rate by {factor:g}, from a state before the trouble if there is one.",
        trial.optimizer_names,
        confidence=0.85,
        sure=False,
    )


# --- whether it can learn at all ----------------------------------------------------------------------------------


def _try_to_fit(trial: Trial) -> list[Finding]:
    """Fit a few samples with a fresh Adam."""
    few, samples = trial.first(_FIT_SAMPLES)
    drop = _FIT_DROP if len(trial.varying(few)) > 1 else _FIT_DROP_ALONE
    for rate in _FIT_RATES:
        trial.begin()
        if _fits(trial, few, rate, drop):
            return []
    what = f"A fresh Adam cannot lower the loss of {samples or 'all'} samples by {drop:.0%} in {_FIT_STEPS} steps"
    fix = (
        "The fault is in the code, the architecture or the weights, not in the data or the learning rate: look for a "
        "detached path, a loss on the wrong tensor, a saturated output, dead units, or too few trainable weights."
    )
    sure = drop == _FIT_DROP
    return [_cause("H829", what, fix, confidence=0.85 if sure else 0.6, sure=sure)]


def _fits(trial: Trial, few: Any, rate: float, drop: float) -> bool:
    """Return whether a fresh Adam fits a few samples."""
    optimizer = torch.optim.Adam(trial.parameters, lr=rate)
    first = last = trial.finite_loss(few, backward=True)
    for _ in range(_FIT_STEPS):
        trial.densify()
        optimizer.step()
        last = trial.loss(few, backward=True)
        if not math.isfinite(last):
            return False
        if first - last >= drop * abs(first):
            return True
    # A loss with a floor, such as label smoothing, may not halve. It fits if only the right pairs have a low one.
    pairs = (pair for number in trial.varying(few)[1:] for pair in trial.mixed(few, number))
    return any(last < _FIT_PAIRS * trial.loss(pair) for pair in pairs)


_PROBES: dict[str, Callable[[Trial], list[Finding]]] = {
    "H831": _try_direction,
    "H830": _try_inputs,
    "H825": _try_rates,
    "H829": _try_to_fit,
}
