"""Find the plans for one device, and recommend the fastest one.

A plan combines a precision, the choice to recompute no or all repeated blocks, and the largest
micro-batch that fits with these settings. The micro-batch is found by replaying the step with the
simulated allocator. If the live bytes at a certain size, which are quick to compute, already exceed
the device's memory, that size is not replayed. Plans are ranked by their estimated time per sample.

With a `Variation`, the micro-batch is fixed, and the largest value of a parameter of the user's
factory is found in the same way.

`forecasting` traces the job, and `fit` defines the margin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.forecast.allocator.replay import Events, Sizes, smallest_cap_bytes
from holdfast.forecast.devices.catalogue import Device
from holdfast.forecast.devices.timing import step_seconds
from holdfast.forecast.plan.fit import Fit, check_fit, default_margin_bytes, with_workspaces
from holdfast.forecast.plan.sharding import Sharding, sharded
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

# The number of steps to replay. The first step starts with all resident storages next to each
# other, and the second with the memory layout that the first step leaves behind.
_STEPS = 2
# The number of steps to replay if the allocator had to release its cache. In this case, the layout
# changes from step to step, so a later step may fail: in one test (an encoder with adapters in
# 8 GiB), two steps fit but three did not. A plan is accepted only if these steps cause no further
# retries.
_STEPS_TO_SETTLE = 6
# The largest micro-batch to try if the user sets no global batch size. According to the estimates
# of `devices.timing`, larger micro-batches are less than 1 % faster per sample.
MOST_SAMPLES = 4096
# The largest value of a varied parameter to try. Few models are trained with longer sequences:
# Llama 4 Maverick has this number of positions (max_position_embeddings in its config.json).
MOST_VALUE = 1 << 20
# Plans count as equally fast if their times per sample differ by less than this fraction, which is
# a judgment of how precise a roofline model is.
_TIE = 0.02
# torch.cuda.max_memory_allocated counts memory in multiples of this size (kMinBlockSize in
# c10/core/AllocatorConfig.h).
GRANULE_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One way to run a job on one device.

    Args:
        device: The name of the device.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        recompute: ``"all"`` if the activations of all blocks are recomputed, otherwise ``"none"``.
        modules: The paths of the recomputed blocks.
        micro_batch_size: The largest micro-batch that fits, in samples; 0 if not even one sample
            fits. If `is_fixed`, this is the size that the user chose, whether it fits or not.
        live_bytes: The peak memory of tensors, as `torch.cuda.max_memory_allocated` would report
            it, but without cuBLAS workspaces.
        process_bytes: The device memory of the whole process, including the CUDA context.
        margin_bytes: How many bytes are kept free in addition, for everything that the forecast
            does not cover.
        missing_bytes: How many more bytes the smallest size would need: one sample, the fixed
            micro-batch, or the smallest value of the parameter. 0 if it fits.
        retries: How often the allocator had to release its cache.
        sample_seconds: The estimated time per sample, in seconds.
        is_fixed: Whether the user chose the micro-batch size.
        value: The largest value of the varied parameter that fits, or its smallest value if none
            fits. None if no parameter is varied.
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
    is_fixed: bool = False
    value: int | None = None

    @property
    def fits(self) -> bool:
        """Whether at least the smallest size fits."""
        return self.missing_bytes == 0

    @property
    def described_size(self) -> int:
        """The size that the figures describe: a micro-batch size or the parameter's value."""
        if self.value is not None:
            return self.value
        return max(1, self.micro_batch_size)

    def policy(self) -> dict[str, Any]:
        """Return the `Policy` fields that put this plan into effect."""
        recompute: list[str] | bool = list(self.modules)
        if not self.modules:
            # The run starts without recomputation. True lets `Guard` recompute activations if
            # memory runs out because the forecast was too low.
            recompute = True
        policy: dict[str, Any] = {"precision": self.precision, "recompute": recompute}
        if self.is_fixed:
            return {**policy, "micro_batch_size": self.micro_batch_size}
        return {
            **policy,
            "micro_batch_size": "auto",
            "forecast_micro_batch_size": self.micro_batch_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A parameter of the user's factory, such as a sequence length, whose largest value is sought.

    Args:
        name: The name of the parameter.
        step: Only multiples of this number are tried. Kernels round many sizes up, so memory
            follows a simple function only at such multiples.
    """

    name: str
    step: int

    @property
    def traced_values(self) -> tuple[int, int, int]:
        """The values at which the job is traced."""
        return (self.step, 2 * self.step, 4 * self.step)

    @property
    def values(self) -> range:
        """The values to try, in ascending order."""
        return range(self.step, max(MOST_VALUE, 4 * self.step) + 1, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device to plan for, with the user's settings.

    Args:
        device: The device.
        global_batch_size: The number of samples per optimizer step on this device, or None for one
            micro-batch per step.
        micro_batch_size: The fixed number of samples per micro-batch, or None to find the largest.
        variation: The parameter whose largest value is found, or None. It requires a fixed
            `micro_batch_size`.
        margin_bytes: How many bytes to keep free, or None for the device's default.
        sharding: How the step is distributed over GPUs of this kind, or None for a single one.
    """

    device: Device
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    variation: Variation | None = None
    margin_bytes: int | None = None
    sharding: Sharding | None = None

    @property
    def sizes(self) -> range:
        """The sizes to try, in ascending order: micro-batch sizes, or values of the parameter."""
        if self.variation is not None:
            return self.variation.values
        if self.micro_batch_size is not None:
            return range(self.micro_batch_size, self.micro_batch_size + 1)
        return range(1, (self.global_batch_size or MOST_SAMPLES) + 1)

    def margin(self, trace: Trace) -> int:
        """Return how many bytes to keep free on the device while a step runs."""
        if self.margin_bytes is not None:
            return self.margin_bytes
        device = self.device
        if self.sharding is not None:
            # No forecast was compared with a real run on several GPUs.
            device = replace(device, is_measured=False)
        return default_margin_bytes(device, uncalibrated_scratch_bytes=trace.uncalibrated_bytes)

    def sharded(self, trace: Trace) -> Trace:
        """Return the part of a step that runs on this device."""
        return trace if self.sharding is None else sharded(trace, self.sharding)

    def in_memory(self, trace: Trace, *, accumulates: bool) -> Trace:
        """Return a step with one micro-batch with all memory that it needs on this device.

        Args:
            trace: The step.
            accumulates: Whether the job can accumulate gradients. If so, and if the global batch is
                larger than the micro-batch, their memory is included.
        """
        if self.global_batch_size is not None and accumulates:
            trace = with_accumulation(trace, self.global_batch_size)
        return self.sharded(trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A job's step in one precision, with and without recomputation.

    Args:
        plain: The step without recomputation.
        recomputed: A function that traces the step with all of `Trace.blocks` recomputed. It
            returns None if the model has no blocks or the step fails. Because it is slow, it is
            called only if the whole batch does not fit without recomputation.
    """

    plain: ScaledTrace
    recomputed: Callable[[], ScaledTrace | None]

    def with_recompute(self, modules: tuple[str, ...]) -> ScaledTrace:
        """Return the step with or without recomputation.

        Args:
            modules: The paths of all blocks to get the step with recomputation, or an empty tuple
                to get the step without it.
        """
        if not modules:
            return self.plain
        return self.recomputed() or self.plain


def find_plans(steps: Mapping[str, TracedStep], target: Target) -> list[MemoryPlan]:
    """Return all plans for a device: for each precision, one without and one with recomputation.

    The plan with recomputation is left out if it is not needed or not possible.
    """
    plans: list[MemoryPlan] = []
    for precision, step in steps.items():
        plans += _PlanSearch(step, precision, target).plans()
    return plans


def recommend(plans: Sequence[MemoryPlan]) -> MemoryPlan | None:
    """Return the fastest plan that fits, or None if no plan fits.

    If a parameter is varied, only the plans with its largest value are considered. Among plans that
    are about equally fast (`_TIE`), the one that changes the job the least is chosen. The criteria,
    in decreasing order of importance, are: fewer recomputed modules, no allocator retries, an
    earlier precision in the list, and a larger micro-batch.
    """
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return None
    largest_value = max(plan.value or 0 for plan in fitting)
    fitting = [plan for plan in fitting if (plan.value or 0) == largest_value]
    best_seconds = min(plan.sample_seconds for plan in fitting)
    fastest = [plan for plan in fitting if plan.sample_seconds <= best_seconds * (1 + _TIE)]
    precisions = list(dict.fromkeys(plan.precision for plan in plans))

    def cost_of_change(plan: MemoryPlan) -> tuple[int, ...]:
        return (
            len(plan.modules),
            plan.retries > 0,
            precisions.index(plan.precision),
            -plan.micro_batch_size,
        )

    return min(fastest, key=cost_of_change)


def nearest_miss(plans: Iterable[MemoryPlan]) -> MemoryPlan | None:
    """Return the plan that lacks the least memory among those that do not fit, if any."""
    misses = [plan for plan in plans if not plan.fits]
    return min(misses, key=lambda plan: plan.missing_bytes, default=None)


def with_relative_times(plans: Sequence[MemoryPlan]) -> list[tuple[MemoryPlan, float]]:
    """Return each plan with its time per sample, relative to the fastest plan that fits.

    If no plan fits, all relative times are 1.
    """
    best_seconds = min((plan.sample_seconds for plan in plans if plan.fits), default=None)
    if not best_seconds:
        return [(plan, 1.0) for plan in plans]
    return [(plan, plan.sample_seconds / best_seconds) for plan in plans]


def check_trace(trace: Trace, target: Target, steps: int = _STEPS) -> Fit:
    """Check whether a step fits the target device when it is repeated `steps` times."""
    events, sizes = repeat_steps(trace, steps)
    return check_fit(
        events,
        sizes,
        target.device,
        products=first_products(trace),
        margin_bytes=target.margin(trace),
    )


class _PlanSearch:
    """Finds the largest size of each plan in one precision, among `Target.sizes`.

    `_plan` performs the search. An upper bound is quickly computed from the live bytes. The largest
    size up to that bound is then found by bisection with the simulated allocator.
    """

    def __init__(self, step: TracedStep, precision: str, target: Target) -> None:
        self._step = step
        self._precision = precision
        self._target = target
        # Cached, because the search needs each size several times: for the live bytes, the replay
        # and the estimated time.
        self._trace = functools.lru_cache(maxsize=128)(self._scale)

    def plans(self) -> Iterator[MemoryPlan]:
        """Yield the plan without recomputation and, if needed and possible, the plan with it.

        Recomputation is needed if the largest size to try does not fit without it.
        """
        plain = self._plan(())
        yield plain
        if plain.fits and plain.described_size == self._target.sizes[-1]:
            return
        if self._step.recomputed() is not None:
            yield self._plan(self._step.plain.template.blocks)

    def _plan(self, modules: tuple[str, ...]) -> MemoryPlan:
        """Return the plan with the largest size that fits.

        If not even the smallest size fits, the plan describes a step with that size, and states how
        much memory is missing.
        """
        sizes = self._target.sizes
        fits: dict[int, Fit] = {}

        # Sizes are counted from 1 below, because `_largest_that` finds numbers from 1 on.
        def may_fit(count: int) -> bool:
            return self._may_fit(self._trace(sizes[count - 1], modules))

        def fits_when_replayed(count: int) -> bool:
            fit = self._find_fit(self._trace(sizes[count - 1], modules))
            if fit is not None:
                fits[count] = fit
            return fit is not None

        # Replays are slow, so first rule out sizes whose live bytes alone do not fit.
        bound = _largest_that(may_fit, at_most=len(sizes))
        count = _largest_that(fits_when_replayed, at_most=bound)
        if count:
            return self._describe(modules, sizes[count - 1], fits[count], missing_bytes=0)
        trace = self._trace(sizes[0], modules)
        fit = self._replay(trace)
        missing_bytes = self._missing_bytes(trace, fit)
        return self._describe(modules, sizes[0], fit, missing_bytes=missing_bytes)

    def _describe(
        self, modules: tuple[str, ...], size: int, fit: Fit, *, missing_bytes: int
    ) -> MemoryPlan:
        trace = self._trace(size, modules)
        is_fixed = self._target.micro_batch_size is not None
        micro_batch_size = trace.micro_batch_size
        if missing_bytes and not is_fixed:
            micro_batch_size = 0
        return MemoryPlan(
            device=self._target.device.name,
            precision=self._precision,
            recompute="all" if modules else "none",
            modules=modules,
            micro_batch_size=micro_batch_size,
            live_bytes=live_peak(self._in_memory(trace), GRANULE_BYTES),
            process_bytes=fit.process_bytes,
            margin_bytes=fit.margin_bytes,
            missing_bytes=missing_bytes,
            retries=fit.replay.retries,
            sample_seconds=self._sample_seconds(size, modules),
            is_fixed=is_fixed,
            value=None if self._target.variation is None else size,
        )

    # The step at a given size.

    def _scale(self, size: int, modules: tuple[str, ...]) -> Trace:
        return self._step.with_recompute(modules).at(size)

    def _in_memory(self, trace: Trace) -> Trace:
        return self._target.in_memory(trace, accumulates=self._step.plain.accumulates)

    def _with_workspaces(self, trace: Trace, steps: int) -> tuple[Events, Sizes]:
        events, sizes = repeat_steps(trace, steps)
        return with_workspaces(events, sizes, self._target.device, first_products(trace))

    # Does it fit?

    def _may_fit(self, trace: Trace) -> bool:
        """Return whether the live bytes alone fit, which is necessary but not sufficient."""
        trace = self._in_memory(trace)
        cap_bytes = self._target.device.available_bytes - self._target.margin(trace)
        events, sizes = self._with_workspaces(trace, 1)
        return int(live_bytes(events, sizes, GRANULE_BYTES).max(initial=0)) <= cap_bytes

    def _find_fit(self, trace: Trace) -> Fit | None:
        """Replay a step and return the result, or None if the step does not fit."""
        if not self._may_fit(trace):
            return None
        fit = self._replay(trace)
        if not fit.fits:
            return None
        if fit.replay.retries:
            return self._fit_without_more_retries(trace, fit)
        return fit

    def _fit_without_more_retries(self, trace: Trace, fit: Fit) -> Fit | None:
        """Replay more steps and return the result, or None if they do not fit or need more retries.

        Args:
            trace: The step.
            fit: The result of replaying the first `_STEPS` steps, in which the cache was released.
        """
        later = self._replay(trace, _STEPS_TO_SETTLE)
        if later.fits and later.replay.retries == fit.replay.retries:
            return later
        return None

    def _replay(self, trace: Trace, steps: int = _STEPS) -> Fit:
        return check_trace(self._in_memory(trace), self._target, steps)

    def _missing_bytes(self, trace: Trace, fit: Fit) -> int:
        """Return how many more bytes the device would need for a step to fit; at least 1."""
        events, sizes = self._with_workspaces(self._in_memory(trace), _STEPS)
        needed = smallest_cap_bytes(events, sizes)
        return max(1, needed + fit.margin_bytes - self._target.device.available_bytes)

    # How fast is it?

    def _sample_seconds(self, size: int, modules: tuple[str, ...]) -> float:
        """Return the estimated time per sample, in seconds.

        Args:
            size: The size of the step. If its micro-batches do not divide the global batch size,
                the last micro-batch is smaller.
            modules: The paths of the recomputed modules.
        """
        device = self._target.device
        trace = self._trace(size, modules)
        total = self._target.global_batch_size or trace.micro_batch_size
        full, rest = divmod(total, trace.micro_batch_size)
        if rest and self._target.variation is not None:
            # The step is known with one micro-batch size only, so count the last one as full.
            return step_seconds(trace, device, micro_steps=full + 1) / total
        seconds = step_seconds(trace, device, micro_steps=full)
        if rest:
            # Add the time of the last micro-batch without the optimizer's update, which is already
            # counted above. This is the difference between a step with two such micro-batches and a
            # step with one.
            last = self._trace(rest, modules)
            seconds += step_seconds(last, device, micro_steps=2) - step_seconds(
                last, device, micro_steps=1
            )
        return seconds / total


def _largest_that(holds: Callable[[int], bool], *, at_most: int) -> int:
    """Return the largest number from 1 to `at_most` for which a predicate holds, or 0.

    `at_most` itself is tried first. If the predicate fails for it, the number is found by
    bisection. Bisection assumes that the predicate holds for all numbers up to the result.
    """
    low = 0
    # `low` is the largest number known to pass, and `high` is the smallest number known to fail.
    # 0 counts as passing, and all numbers above `at_most` count as failing.
    high = at_most + 1
    trial = at_most
    while high - low > 1:
        if holds(trial):
            low = trial
        else:
            high = trial
        trial = (low + high) // 2
    return low
