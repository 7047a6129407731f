"""Plans for a device: what fits at which micro-batch size, how fast each is, and which one to take.

A plan is a precision, and whether blocks are recomputed. For each the largest micro-batch is
searched by playing the step on the simulated allocator under the device's memory; plans are ranked
by their time for a sample. Live bytes, which are quick to add up, bound the search from above.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.forecast.allocator.replay import smallest_cap_bytes
from holdfast.forecast.devices.catalogue import Device
from holdfast.forecast.devices.timing import step_seconds
from holdfast.forecast.plan.fit import Fit, check_fit, default_margin_bytes, with_workspaces
from holdfast.forecast.trace.accumulation import with_accumulation
from holdfast.forecast.trace.events import Trace, first_products, live_bytes, live_peak, played
from holdfast.forecast.trace.extrapolation import ScaledTrace

Recompute = Literal["none", "all"]

# That are played: the first begins with what is resident in a row, the second with what a step
# leaves
_STEPS = 2
# Where the allocator had to give back its cache in them, its blocks lie otherwise in the next: 3
# steps were seen to fail where 2 had fitted (an encoder with adapters under 8 GiB). It must have
# settled: no more of that in these.
_STEPS_TO_SETTLE = 6
# Looked for without a global batch size; gains of larger micro-batches are below 1 % by then
MOST_SAMPLES = 4096
_TIE = 0.02  # of the time per sample: less than what a roofline can tell apart
GRANULE_BYTES = 512  # in which `max_memory_allocated` counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan on one device.

    Args:
        micro_batch_size: The largest that fits, in samples; 0 if not even one does.
        live_bytes: Most that tensors hold at once, as ``max_memory_allocated`` counts it, without
            workspaces.
        process_bytes: What the process takes of the device, context included.
        margin_bytes: What was kept free beyond that for what a forecast cannot know.
        missing_bytes: By how much it does not fit with one sample; 0 if it does.
        retries: How often the allocator had to give back what it had cached.
        sample_seconds: Time for one sample.
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
        """Return the fields of a `Policy` that carry this plan out."""
        # True: as a remedy only, should the forecast be too low
        recompute: Any = list(self.modules) or True
        return {
            "precision": self.precision,
            "recompute": recompute,
            "micro_batch_size": "auto",
            "forecast_micro_batch_size": self.micro_batch_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a device; no global batch size: whatever fits at once.

    No margin: the default.
    """

    device: Device
    global_batch_size: int | None = None
    margin_bytes: int | None = None

    @property
    def most_samples(self) -> int:
        """Return the largest micro-batch that makes sense."""
        return self.global_batch_size or MOST_SAMPLES

    def margin(self, trace: Trace) -> int:
        """Return what to keep free for a step, in bytes."""
        if self.margin_bytes is not None:
            return self.margin_bytes
        return default_margin_bytes(
            self.device, uncalibrated_scratch_bytes=trace.uncalibrated_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A job's step in one precision at any size, as it is.

    `recomputed` traces it with all blocks recomputed.

    That is asked for where not the whole batch fits; it returns the step and the blocks, or None
    without any.
    """

    plain: ScaledTrace
    recomputed: Callable[[], tuple[ScaledTrace, tuple[str, ...]] | None] = lambda: None

    def of(self, modules: tuple[str, ...]) -> ScaledTrace:
        """Return the step in which these modules, none or all blocks, are recomputed."""
        found = self.recomputed() if modules else None
        return self.plain if found is None else found[0]


def plan_rows(steps: Mapping[str, Step], question: Question) -> list[Row]:
    """Return every plan on a device, in the order of precisions and recomputation."""
    return [
        row
        for precision, step in steps.items()
        for row in _Search(step, precision, question).rows()
    ]


def recommended(rows: Sequence[Row]) -> Row | None:
    """Return the plan to take: the fastest, of those as fast the one that changes least.

    None if none fits.

    What stands earlier in the list of precisions counts as the smaller change.
    """
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    best = min(row.sample_seconds for row in fitting)
    near = [row for row in fitting if row.sample_seconds <= best * (1 + _TIE)]
    precisions = list(dict.fromkeys(row.precision for row in rows))

    def changes(row: Row) -> tuple[int, ...]:
        return (
            len(row.modules),
            row.retries > 0,
            precisions.index(row.precision),
            -row.micro_batch_size,
        )

    return min(near, key=changes)


def nearest_miss(rows: Iterable[Row]) -> Row | None:
    """Return the plan that needs least, where none fits."""
    return min(
        (row for row in rows if not row.fits), key=lambda row: row.missing_bytes, default=None
    )


def check_trace(trace: Trace, question: Question) -> tuple[Fit, int]:
    """Return whether a trace that was made with a plan's own settings fits, and its live peak in
    bytes.
    """
    return _fit(trace, question), live_peak(trace, GRANULE_BYTES)


def _fit(trace: Trace, question: Question, steps: int = _STEPS) -> Fit:
    margin = question.margin(trace)
    return check_fit(
        *played(trace, steps), question.device, products=first_products(trace), margin_bytes=margin
    )


class _Search:
    """Looks for the largest micro-batch of plans with one precision."""

    def __init__(self, step: Step, precision: str, question: Question) -> None:
        self._step, self._precision, self._question = step, precision, question
        self._at = functools.lru_cache(maxsize=128)(
            lambda samples, modules: step.of(modules).at(samples)
        )

    def _in_memory(self, trace: Trace) -> Trace:
        """Return the step as memory sees it, in which gradients of earlier micro-batches are
        kept.
        """
        total = self._question.global_batch_size
        return (
            with_accumulation(trace, total)
            if total is not None and self._step.plain.accumulates
            else trace
        )

    def rows(self) -> Iterable[Row]:
        """Yield the plans without recomputation and, unless that would only cost time, with it."""
        nothing = self._largest(())
        yield nothing
        if (
            nothing.micro_batch_size < self._question.most_samples
            and (found := self._step.recomputed()) is not None
        ):
            yield self._largest(found[1])

    def _largest(self, modules: tuple[str, ...]) -> Row:
        """Return the plan with the largest micro-batch that fits.

        Of all that live bytes allow, found by halving.
        """
        low, high = 0, self._question.most_samples + 1
        fit = None
        for fits in (self._may_fit, self._find_fit):
            low, trial = 0, high - 1
            while high - low > 1:
                found = fits(self._at(trial, modules))
                low, high = (trial, high) if found else (low, trial)
                fit = found or fit
                trial = (low + high) // 2
        return self._row(modules, low, fit if isinstance(fit, Fit) else None)

    def _may_fit(self, trace: Trace) -> bool:
        """Return whether live bytes alone are within the memory, which takes no replay."""
        trace = self._in_memory(trace)
        cap = self._question.device.available_bytes - self._question.margin(trace)
        return (
            int(live_bytes(*self._with_workspaces(trace, 1), GRANULE_BYTES).max(initial=0)) <= cap
        )

    def _find_fit(self, trace: Trace) -> Fit | None:
        """Return how a step fits; None if it does not."""
        if not self._may_fit(trace):
            return None
        found = self._replayed(trace)
        if found.fits and found.replay.retries:
            later = self._replayed(trace, _STEPS_TO_SETTLE)
            return later if later.fits and later.replay.retries == found.replay.retries else None
        return found if found.fits else None

    def _replayed(self, trace: Trace, steps: int = _STEPS) -> Fit:
        return _fit(self._in_memory(trace), self._question, steps)

    def _with_workspaces(self, trace: Trace, steps: int) -> tuple[Any, Any]:
        return with_workspaces(*played(trace, steps), self._question.device, first_products(trace))

    def _seconds(self, samples: int, modules: tuple[str, ...]) -> float:
        """Return the time for a sample.

        The last micro-batch of a global batch may be a smaller one.
        """
        device, total = self._question.device, self._question.global_batch_size or samples
        full, rest = divmod(total, samples)
        seconds = step_seconds(self._at(samples, modules), device, micro_steps=full)
        if rest:
            last = functools.partial(step_seconds, self._at(rest, modules), device)
            seconds += last(micro_steps=2) - last(micro_steps=1)
        return seconds / total

    def _row(self, modules: tuple[str, ...], samples: int, fit: Fit | None) -> Row:
        device, missing = self._question.device, 0
        samples = 0 if fit is None else samples
        trace = self._at(max(1, samples), modules)
        in_memory = self._in_memory(trace)
        if fit is None:
            fit = self._replayed(trace)
            needed = smallest_cap_bytes(*self._with_workspaces(in_memory, _STEPS))
            missing = max(1, needed + fit.margin_bytes - device.available_bytes)
        return Row(
            device=device.name,
            precision=self._precision,
            recompute="all" if modules else "none",
            modules=modules,
            micro_batch_size=samples,
            live_bytes=live_peak(in_memory, GRANULE_BYTES),
            process_bytes=fit.process_bytes,
            margin_bytes=fit.margin_bytes,
            missing_bytes=missing,
            retries=fit.replay.retries,
            sample_seconds=self._seconds(max(1, samples), modules),
        )


def with_relative_times(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Return each plan with its time for a sample as a multiple of the fastest that fits."""
    best = min((row.sample_seconds for row in rows if row.fits), default=None)
    return [(row, row.sample_seconds / best if best else 1.0) for row in rows]
