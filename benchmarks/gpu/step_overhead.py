"""What a guarded step costs beyond a bare one on a CUDA device when nothing goes wrong.

Time, waits and memory: of guarded loops, and time of other frameworks. It takes less than five
minutes.

How: as ``benchmarks.step_overhead``, with wall time between two synchronisations around each block
of steps, since the device works on its own. The bare loop does not wait for the device in between.
A block takes about 0.2 s, five steps at least.

*Warm*: loops that have made 500 steps with a small batch, and then a few with their own. For each
length of a step all loops take turns. Those with fused AdamW are compared with a bare loop with
fused AdamW, and those with foreach AdamW, which is torch's default, with a bare loop with that:
guarded loops that decide a step before its optimizer is launched (*now*) and one step later
(*late*, which needs a fused optimizer), Accelerate, Lightning and transformers' Trainer. They have
their defaults, except that the frameworks save and log nothing.

*First*: the first 400 steps, the very first included.

*Conv*: a model with BatchNorm, whose running statistics a late decision has to undo on the device.

*Host* is the time in which the bare loop has issued a step, not waiting for its end: where it is
that of the bare step, the host sets the pace. How often a step waits is counted by
``torch.cuda.set_sync_debug_mode``. Memory is the most that torch has allocated on the device during
3 steps after 2, of one loop at a time.

To reach, with fused AdamW and decided late: median ratio <= 1.04, 1.02, 1.01, 1.005 and 1.002 where
a bare step takes 5, 10, 20, 50 and 100 ms; no synchronisation; peak memory <= 1 % more plus a copy
of the mutable buffers.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.results_file import Result, read_options
from benchmarks.step_loops import (
    BLOCK_STEPS,
    FRAMEWORKS,
    LOOPS,
    Loop,
    in_turns,
    silence_frameworks,
)
from benchmarks.step_models import Implementation, Job, find_batch_size

_HOST_STEPS = 5
_HOST_SAMPLES = 5
_SETTLING_STEPS = 3  # batches that a framework's loader has fetched ahead are used up
_COUNTED_STEPS = 100  # steps, of which the diagnosis looks at more than the loss in some
_LEAST_BLOCK_STEPS = 5
_LEAST_ROUNDS = 4
_MOST_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A loop and the AdamW that it has.

    Args:
        loop: Its name in `LOOPS`.
        implementation: Of AdamW.
    """

    loop: str
    implementation: Implementation

    @property
    def name(self) -> str:
        """What the loop is called among all."""
        return f"{self.loop}, {self.implementation}"

    @property
    def beside(self) -> str:
        """The name of the bare loop that it is compared with."""
        return f"bare, {self.implementation}"

    @property
    def text(self) -> str:
        """What figures call the loop."""
        if self.loop in ("now", "late"):
            return f"guarded, {self.implementation}, decide={self.loop}"
        return self.name


_DECIDED = (
    Row(loop="bare", implementation="fused"),
    Row(loop="now", implementation="fused"),
    Row(loop="late", implementation="fused"),
)
_ROWS = (
    *_DECIDED,
    *(Row(loop=name, implementation="fused") for name in FRAMEWORKS),
    Row(loop="bare", implementation="foreach"),
    Row(loop="now", implementation="foreach"),
    *(Row(loop=name, implementation="foreach") for name in FRAMEWORKS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a bare step, and what a guarded one may cost.

    Args:
        milliseconds: Of a bare step.
        at_most: Largest ratio, with fused AdamW and decided late, that reaches the target.
    """

    milliseconds: float
    at_most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured, and for how long.

    Args:
        device: Where the loops train.
        kind: The model whose steps have each of `lengths`; see `Job`.
        lengths: Of a bare step.
        conv_lengths: The same of the convolutional model.
        first_milliseconds: Length of the steps of which the first ones are timed.
        first_steps: How many steps are the first ones.
        warm_steps: Steps that a loop makes with a small batch before it is timed.
        block_seconds: How long a block of steps takes, if it is not below five steps.
        seconds_of_a_length: Time for the rounds of one length; there are `_LEAST_ROUNDS` at least.
    """

    device: str = "cuda"
    kind: str = "mlp2048"
    lengths: tuple[Length, ...]
    conv_lengths: tuple[Length, ...] = ()
    first_milliseconds: float = 10.0
    first_steps: int = 400
    warm_steps: int = 500
    block_seconds: float = 0.2
    seconds_of_a_length: float = 25.0


FULL = Setting(
    lengths=(
        Length(milliseconds=5.0, at_most=1.04),
        Length(milliseconds=10.0, at_most=1.02),
        Length(milliseconds=20.0, at_most=1.01),
        Length(milliseconds=50.0, at_most=1.005),
        Length(milliseconds=100.0, at_most=1.002),
    ),
    conv_lengths=(Length(milliseconds=10.0), Length(milliseconds=20.0)),
)
QUICK = Setting(
    lengths=(Length(milliseconds=10.0, at_most=1.02),),
    conv_lengths=(Length(milliseconds=10.0),),
    seconds_of_a_length=1.0,
)
_TINY_BATCH = 4
_SMALL_BATCH = 64


class DeviceClock:
    """Tells the wall time at which the device has finished everything, or the time at once.

    Args:
        device: The device.
    """

    def __init__(self, device: str) -> None:
        self._module: Any = torch.get_device_module(device)
        self._waits = True

    def __call__(self) -> float:
        """Return the time in seconds."""
        if self._waits:
            self._module.synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Tell the time at once during the ``with`` block, which begins when the device is idle."""
        self._module.synchronize()
        self._waits = False
        yield
        self._waits = True


@dataclass(slots=True)
class Made:
    """A loop that has been created.

    Args:
        row: Which one.
        job: What it trains. Its batch may be replaced.
        run: Makes steps.
    """

    row: Row
    job: Job
    run: Loop


class Benchmark:
    """Measures the cost of steps on one device.

    Args:
        result: What the figures are added to.
        setting: What is measured.
    """

    def __init__(self, result: Result, setting: Setting) -> None:
        self._result = result
        self._setting = setting
        self._device = setting.device
        self._clock = DeviceClock(setting.device)

    def run(self) -> None:
        """Measure everything. Afterwards threads of frameworks are left, which never end."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.measure_first("tiny", "tiny", _TINY_BATCH)
            sizes = self.find_batch_sizes(self._setting.kind, self._setting.lengths)
            milliseconds = self._setting.first_milliseconds
            if milliseconds in sizes:
                name = f"{self._setting.kind}, {milliseconds:g} ms"
                self.measure_first(name, self._setting.kind, sizes[milliseconds])
            conv_sizes = self.find_batch_sizes("conv", self._setting.conv_lengths)
            if self._device == "cuda":
                self.measure_memory(self._setting.kind, max(sizes.values()))
                for batch_size in list(conv_sizes.values())[-1:]:
                    self.measure_memory("conv", batch_size)
            self.measure_warm("conv", self._setting.conv_lengths, conv_sizes, _DECIDED)
            self.measure_warm(self._setting.kind, self._setting.lengths, sizes, _ROWS)

    # --- time

    def find_batch_sizes(self, kind: str, lengths: Sequence[Length]) -> dict[float, int]:
        """Return the batch size by the milliseconds of a bare step."""
        sizes = {}
        for length in lengths:
            size = find_batch_size(kind, length.milliseconds, self._clock, self._device)
            sizes[length.milliseconds] = size.batch_size
            self._result.parameters[f"{kind}, {length.milliseconds:g} ms"] = {
                "batch_size": size.batch_size,
                "bare_milliseconds": size.milliseconds,
            }
        return sizes

    def measure_first(self, name: str, kind: str, batch_size: int) -> None:
        """Add what the first steps cost, and for a tiny model what warm ones cost as well."""
        made = self._make(kind, batch_size, _DECIDED)
        steps = self._setting.first_steps
        rounds = self._in_turns(made, steps // BLOCK_STEPS, BLOCK_STEPS)
        # The first steps are compared as one sample: the very first of them differ.
        sums = {
            row.name: sum(seconds[row.name] for seconds in rounds) / len(rounds) for row in _DECIDED
        }
        self._add_costs(f"{name}, first {steps} steps", [sums], _DECIDED, {})
        if kind == "tiny":
            warm = self._in_turns(made, _MOST_ROUNDS, BLOCK_STEPS)
            self._add_costs(f"{name}, warm", warm, _DECIDED, {})

    def measure_warm(
        self,
        kind: str,
        lengths: Sequence[Length],
        sizes: dict[float, int],
        rows: Sequence[Row],
    ) -> None:
        """Add what warm steps of each length cost, in loops that are created once for all."""
        if not lengths:
            return
        made = self._make(kind, _SMALL_BATCH, rows)
        for loop in made:
            loop.run(self._setting.warm_steps)
        present = [loop.row for loop in made]
        for length in lengths:
            name = f"{kind}, {length.milliseconds:g} ms"
            batch = Job(kind, sizes[length.milliseconds], self._device).batch
            for loop in made:
                loop.job.batch = batch
                loop.run(_SETTLING_STEPS)
            block_steps = self._steps_of_a_block(length)
            rounds = self._in_turns(made, self._rounds(length, len(made)), block_steps)
            targets = {} if length.at_most is None else {"late, fused": length.at_most}
            self._add_costs(f"{name}, warm", rounds, present, targets)
            self._add_host_time(name, made)
            if length is lengths[0]:
                # How often a step waits does not depend on its length.
                self._add_synchronisations(name, made)

    def _steps_of_a_block(self, length: Length) -> int:
        steps = round(1000 * self._setting.block_seconds / length.milliseconds)
        return max(_LEAST_BLOCK_STEPS, steps)

    def _rounds(self, length: Length, loops: int) -> int:
        """Return how many rounds of all loops there is time for."""
        block_seconds = self._steps_of_a_block(length) * length.milliseconds / 1000
        rounds = int(self._setting.seconds_of_a_length / (loops * block_seconds))
        return min(max(rounds, _LEAST_ROUNDS), _MOST_ROUNDS)

    def _make(self, kind: str, batch_size: int, rows: Sequence[Row]) -> list[Made]:
        """Create loops. A framework that is not installed is left out."""
        made = []
        for row in rows:
            job = Job(kind, batch_size, self._device, row.implementation)
            try:
                made.append(Made(row, job, LOOPS[row.loop](job, self._clock)))
            except ImportError as error:
                self._result.notes.append(f"{row.name} left out: {error}")
        return made

    def _in_turns(
        self, made: Sequence[Made], rounds: int, block_steps: int
    ) -> list[dict[str, float]]:
        loops = [(loop.row.name, loop.run) for loop in made]
        return in_turns(loops, rounds, seed=0, block_steps=block_steps)

    def _add_costs(
        self,
        when: str,
        samples: Sequence[dict[str, float]],
        rows: Sequence[Row],
        targets: dict[str, float],
    ) -> None:
        """Add what the steps of each loop cost over those of its bare loop.

        Args:
            when: The model, and which steps.
            samples: Seconds of a step, by name of the row.
            rows: The loops.
            targets: The largest ratio that reaches the target, by name of the row.
        """
        for row in rows:
            if row.loop == "bare":
                milliseconds = [1000 * seconds[row.name] for seconds in samples]
                self._result.add_samples(
                    f"{when}: bare step, {row.implementation}", "ms", milliseconds
                )
            elif when.startswith("tiny"):
                added = [1e6 * (seconds[row.name] - seconds[row.beside]) for seconds in samples]
                self._result.add_samples(
                    f"{when}: added to a step, {row.text}", "us", added, digits=1
                )
            else:
                ratios = [seconds[row.name] / seconds[row.beside] for seconds in samples]
                self._result.add_samples(
                    f"{when}: time of {row.text} over bare",
                    "ratio",
                    ratios,
                    at_most=targets.get(row.name),
                )

    def _add_host_time(self, name: str, made: Sequence[Made]) -> None:
        """Add the time in which the host issues a step of the first loop, which is bare."""
        bare = made[0]
        milliseconds = []
        for _ in range(_HOST_SAMPLES):
            with self._clock.without_waiting():
                milliseconds.append(1000 * bare.run(_HOST_STEPS) / _HOST_STEPS)
        self._result.add_samples(
            f"{name}: host's time of a bare step, {bare.row.implementation}", "ms", milliseconds
        )

    # --- waits and memory, which only CUDA counts

    def _add_synchronisations(self, name: str, made: Sequence[Made]) -> None:
        """Add how often a step of each guarded loop waits for the device."""
        if self._device != "cuda":
            return
        for loop in made:
            if loop.row.loop in ("now", "late"):
                self._result.add_samples(
                    f"{name}: synchronisations of a step, {loop.row.text}",
                    "",
                    [self._synchronisations(loop.run)],
                    at_most=0.0 if loop.row.loop == "late" else 1.0,
                )

    def _synchronisations(self, run: Loop) -> float:
        """Return how often a step of a loop waits for the device."""
        with warnings.catch_warnings(record=True) as caught, self._clock.without_waiting():
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run(_COUNTED_STEPS)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = ["called a synchronizing" in str(warning.message) for warning in caught]
        return sum(waits) / _COUNTED_STEPS

    def measure_memory(self, kind: str, batch_size: int) -> None:
        """Add the peak memory of guarded loops beyond that of a bare one."""
        peaks = {}
        buffer_bytes = 0
        for row in _DECIDED:
            gc.collect()
            torch.cuda.empty_cache()
            job = Job(kind, batch_size, self._device, row.implementation)
            buffer_bytes = job.mutable_buffer_bytes()
            run = LOOPS[row.loop](job, self._clock)
            run(2)
            torch.cuda.reset_peak_memory_stats()
            run(3)
            peaks[row.name] = torch.cuda.max_memory_allocated()
            del run, job
        for row in _DECIDED[1:]:
            bare_peak = peaks[row.beside]
            beyond = (peaks[row.name] - bare_peak - buffer_bytes) / bare_peak
            self._result.add_samples(
                f"{kind}, {row.text}: extra peak less mutable buffers, over bare peak",
                "ratio",
                [beyond],
                at_most=0.01,
            )


def main() -> None:
    options = read_options("gpu_step_overhead", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    silence_frameworks()
    setting = QUICK if options.quick else FULL
    parameters = {"warm_steps": setting.warm_steps, "block_seconds": setting.block_seconds}
    result = Result(options=options, parameters=parameters)
    Benchmark(result, setting).run()
    result.write()


if __name__ == "__main__":
    main()
