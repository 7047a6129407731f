"""Find the plans for one device: what fits, how fast it is, and which plan to choose.

A plan is a precision, and either no or all repeated blocks recomputed. The largest micro-batch of
each plan is found by replaying the step with the simulated allocator in the device's memory.
Plans are ranked by their time per sample. The sum of live bytes, which is quick to compute, bounds
the search from above.

Tracing is done elsewhere (`forecasting`); the margin is in `fit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.forecast.allocator.replay import Events, Sizes, smallest_cap_bytes
from holdfast.forecast.devices.catalogue import Device
from holdfast.forecast.devices.timing import step_seconds
from holdfast.forecast.plan.fit import Fit, check_fit, default_margin_bytes, with_workspaces
from holdfast.forecast.trace.accumulation import with_accumulation
from holdfast.forecast.trace.events import (
    Trace,
    first_products,
    live_bytes,
    live_peak,
    repeat_steps,
)
from holdfast.forecast.trace.extrapolation import ScaledTrace

Recompute = Literal["none", "all"]

# Number of steps to replay. The first starts with all resident storages in a row, the second with
# the memory layout left by a step.
_STEPS = 2
# Number of steps to replay if the allocator had to release its cache. Its layout then changes from
# step to step: 3 steps failed where 2 had fitted (an encoder with adapters under 8 GiB, in one of
# our runs). A plan counts only if these steps cause no further retries.
_STEPS_TO_SETTLE = 6
# The largest micro-batch tried without a global batch size. Larger ones gain less than 1 % per
# sample in the roofline of `devices.timing`.
MOST_SAMPLES = 4096
# Plans whose time per sample differs by less than this share count as equally fast. It is our
# judgement of how precise a roofline is.
_TIE = 0.02
# torch.cuda.max_memory_allocated counts in blocks of this size (kMinBlockSize in
# c10/core/AllocatorConfig.h).
GRANULE_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One way to run a job on one device.

    Args:
        device: Name of the device.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        recompute: Whether the activations of no or of all blocks are recomputed.
        modules: Paths of the recomputed blocks.
        micro_batch_size: The largest that fits, in samples; 0 if not even one sample does.
        live_bytes: Peak of the tensors' memory, as counted by ``max_memory_allocated``, without
            cuBLAS workspaces.
        process_bytes: Device memory used by the process, including the context.
        margin_bytes: Memory kept free beyond that, for everything that a forecast cannot know.
        missing_bytes: How much memory is missing for one sample; 0 if it fits.
        retries: How often the allocator had to release its cache.
        sample_seconds: Time per sample.
    """

    device: str
    precision: str
    recompute: Recompute
    modules: tuple[str, ...]
    micro_batch_size: int
    live_bytes: int
    process_bytes: int
    margin_bytes: int
    missing_bytes: int
    retries: int
    sample_seconds: float

    @property
    def fits(self) -> bool:
        """Whether at least one sample fits."""
        return self.micro_batch_size > 0

    def policy(self) -> dict[str, Any]:
        """Return the fields of a `Policy` that implement this plan."""
        recompute: list[str] | bool = list(self.modules)
        if not self.modules:
            # If no blocks are recomputed from the start, recompute remains a remedy in case the
            # forecast is too low.
            recompute = True
        return {
            "precision": self.precision,
            "recompute": recompute,
            "micro_batch_size": "auto",
            "forecast_micro_batch_size": self.micro_batch_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device to plan for.

    Args:
        device: The device.
        global_batch_size: Samples per optimizer step; None for as many as fit at once.
        margin_bytes: Memory to keep free; None for the default of the device.
    """

    device: Device
    global_batch_size: int | None = None
    margin_bytes: int | None = None

    @property
    def most_samples(self) -> int:
        """The largest micro-batch size that makes sense."""
        return self.global_batch_size or MOST_SAMPLES

    def margin(self, trace: Trace) -> int:
        """Return how many bytes to keep free for a step."""
        if self.margin_bytes is not None:
            return self.margin_bytes
        return default_margin_bytes(
            self.device, uncalibrated_scratch_bytes=trace.uncalibrated_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A job's step in one precision, at any size.

    Args:
        plain: The step without recomputation.
        recomputed: Traces the step with all blocks recomputed (`Trace.blocks`); returns None if the
            model has no blocks. It is slow, so it is called only if the whole batch does not fit
            without recomputation.
    """

    plain: ScaledTrace
    recomputed: Callable[[], ScaledTrace | None]

    def with_recompute(self, modules: tuple[str, ...]) -> ScaledTrace:
        """Return the step in which these modules, none or all blocks, are recomputed."""
        if not modules:
            return self.plain
        return self.recomputed() or self.plain


def find_plans(steps: Mapping[str, TracedStep], target: Target) -> list[MemoryPlan]:
    """Return all plans for a device, by precision, each without and then with recomputation."""
    plans: list[MemoryPlan] = []
    for precision, step in steps.items():
        plans += _PlanSearch(step, precision, target).plans()
    return plans


def recommend(plans: Sequence[MemoryPlan]) -> MemoryPlan | None:
    """Return the fastest plan that fits, or None.

    Among equally fast plans, the one with the smallest change is chosen. A precision earlier in the
    list counts as a smaller change.
    """
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return None
    best_seconds = min(plan.sample_seconds for plan in fitting)
    fastest = [plan for plan in fitting if plan.sample_seconds <= best_seconds * (1 + _TIE)]
    precisions = list(dict.fromkeys(plan.precision for plan in plans))

    def changes(plan: MemoryPlan) -> tuple[int, ...]:
        return (
            len(plan.modules),
            plan.retries > 0,
            precisions.index(plan.precision),
            -plan.micro_batch_size,
        )

    return min(fastest, key=changes)


def nearest_miss(plans: Iterable[MemoryPlan]) -> MemoryPlan | None:
    """Return the plan that needs the least memory of those that do not fit."""
    misses = [plan for plan in plans if not plan.fits]
    return min(misses, key=lambda plan: plan.missing_bytes, default=None)


def with_relative_times(plans: Sequence[MemoryPlan]) -> list[tuple[MemoryPlan, float]]:
    """Return each plan with its time per sample as a multiple of the fastest plan that fits."""
    best_seconds = min((plan.sample_seconds for plan in plans if plan.fits), default=None)
    if not best_seconds:
        return [(plan, 1.0) for plan in plans]
    return [(plan, plan.sample_seconds / best_seconds) for plan in plans]


def check_trace(trace: Trace, target: Target, steps: int = _STEPS) -> Fit:
    """Return whether a step fits when it is repeated several times."""
    events, sizes = repeat_steps(trace, steps)
    return check_fit(
        events,
        sizes,
        target.device,
        products=first_products(trace),
        margin_bytes=target.margin(trace),
    )


class _PlanSearch:
    """Finds the largest micro-batch of each plan in one precision.

    `_plan` is the search: the live bytes give an upper bound quickly, and the simulated allocator
    then decides by bisection.
    """

    def __init__(self, step: TracedStep, precision: str, target: Target) -> None:
        self._step = step
        self._precision = precision
        self._target = target
        # The search needs the same sizes several times: for live bytes, for the replay and for the
        # time.
        self._trace = functools.lru_cache(maxsize=128)(self._scale)

    def plans(self) -> Iterator[MemoryPlan]:
        """Yield the plan without recomputation and, if the batch does not fit, the one with it."""
        plain = self._plan(())
        yield plain
        if plain.micro_batch_size >= self._target.most_samples:
            return
        if self._step.recomputed() is not None:
            yield self._plan(self._step.plain.template.blocks)

    def _plan(self, modules: tuple[str, ...]) -> MemoryPlan:
        """Return the plan with the largest micro-batch that fits.

        If no sample fits, return the plan with a single sample and the amount of missing memory.
        """
        fits: dict[int, Fit] = {}

        def fits_when_replayed(samples: int) -> bool:
            fit = self._find_fit(self._trace(samples, modules))
            if fit is not None:
                fits[samples] = fit
            return fit is not None

        # A replay is slow, so sizes whose live bytes do not fit are ruled out first.
        bound = _largest_that(
            lambda samples: self._may_fit(self._trace(samples, modules)),
            at_most=self._target.most_samples,
        )
        samples = _largest_that(fits_when_replayed, at_most=bound)
        if samples:
            return self._describe(modules, samples, fits[samples], missing_bytes=0)
        trace = self._trace(1, modules)
        fit = self._replay(trace)
        missing_bytes = self._missing_bytes(trace, fit)
        return self._describe(modules, 0, fit, missing_bytes=missing_bytes)

    def _describe(
        self, modules: tuple[str, ...], samples: int, fit: Fit, *, missing_bytes: int
    ) -> MemoryPlan:
        traced_samples = max(1, samples)
        in_memory = self._in_memory(self._trace(traced_samples, modules))
        return MemoryPlan(
            device=self._target.device.name,
            precision=self._precision,
            recompute="all" if modules else "none",
            modules=modules,
            micro_batch_size=samples,
            live_bytes=live_peak(in_memory, GRANULE_BYTES),
            process_bytes=fit.process_bytes,
            margin_bytes=fit.margin_bytes,
            missing_bytes=missing_bytes,
            retries=fit.replay.retries,
            sample_seconds=self._sample_seconds(traced_samples, modules),
        )

    # The step at some size.

    def _scale(self, samples: int, modules: tuple[str, ...]) -> Trace:
        return self._step.with_recompute(modules).at(samples)

    def _in_memory(self, trace: Trace) -> Trace:
        """Return the step as the allocator sees it, with gradients of earlier micro-batches."""
        total = self._target.global_batch_size
        if total is None or not self._step.plain.accumulates:
            return trace
        return with_accumulation(trace, total)

    def _with_workspaces(self, trace: Trace, steps: int) -> tuple[Events, Sizes]:
        events, sizes = repeat_steps(trace, steps)
        return with_workspaces(events, sizes, self._target.device, first_products(trace))

    # Does it fit?

    def _may_fit(self, trace: Trace) -> bool:
        """Return whether the live bytes alone fit, which needs no replay."""
        trace = self._in_memory(trace)
        cap_bytes = self._target.device.available_bytes - self._target.margin(trace)
        events, sizes = self._with_workspaces(trace, 1)
        return int(live_bytes(events, sizes, GRANULE_BYTES).max(initial=0)) <= cap_bytes

    def _find_fit(self, trace: Trace) -> Fit | None:
        """Return how a step fits, or None if it does not."""
        if not self._may_fit(trace):
            return None
        fit = self._replay(trace)
        if not fit.fits:
            return None
        if fit.replay.retries:
            return self._fit_without_more_retries(trace, fit)
        return fit

    def _fit_without_more_retries(self, trace: Trace, fit: Fit) -> Fit | None:
        """Return how a step fits after more steps, or None if the cache has to be released again.

        Args:
            trace: The step.
            fit: The fit after fewer steps, in which the cache was released.
        """
        later = self._replay(trace, _STEPS_TO_SETTLE)
        if later.fits and later.replay.retries == fit.replay.retries:
            return later
        return None

    def _replay(self, trace: Trace, steps: int = _STEPS) -> Fit:
        return check_trace(self._in_memory(trace), self._target, steps)

    def _missing_bytes(self, trace: Trace, fit: Fit) -> int:
        """Return how much more memory a step would need to fit, at least 1 byte."""
        events, sizes = self._with_workspaces(self._in_memory(trace), _STEPS)
        needed = smallest_cap_bytes(events, sizes)
        return max(1, needed + fit.margin_bytes - self._target.device.available_bytes)

    # How fast is it?

    def _sample_seconds(self, samples: int, modules: tuple[str, ...]) -> float:
        """Return the time per sample.

        The last micro-batch of a global batch may be smaller than the others.
        """
        device = self._target.device
        total = self._target.global_batch_size or samples
        full, rest = divmod(total, samples)
        seconds = step_seconds(self._trace(samples, modules), device, micro_steps=full)
        if rest:
            # The difference between two and one micro-batches is one micro-batch without the
            # optimizer's step, which is counted above.
            last = self._trace(rest, modules)
            seconds += step_seconds(last, device, micro_steps=2) - step_seconds(
                last, device, micro_steps=1
            )
        return seconds / total


def _largest_that(holds: Callable[[int], bool], *, at_most: int) -> int:
    """Return the largest number up to `at_most` for which a predicate holds, 0 if there is none.

    `at_most` is tried first; if it does not hold, the number is found by bisection. So the
    predicate must hold for all smaller numbers as well.
    """
    low = 0
    high = at_most + 1
    trial = at_most
    while high - low > 1:
        if holds(trial):
            low = trial
        else:
            high = trial
        trial = (low + high) // 2
    return low
