"""Real out-of-memory errors of a CUDA device.

How many steps are recovered, how exactly, and at what cost.

How: the cases are those of ``benchmarks.oom_recovery`` with batches 8 times as large; every fourth
is a wide network with AdamW, whose state is made in the step and does not fit beside the
activations. For each case: a bare step without a limit gives the expected gradient, its peak and
its time; a bare step with an eighth of the batch gives its peak. Then the process's share of the
device's memory is limited (``torch.cuda.set_per_process_memory_fraction``) to a random point
between what an eighth of the batch needs, with a quarter to spare, and 95 % of what the whole batch
needs (with AdamW at least what forward and backward need without its state). Under it a bare step
shows where a plain loop ends, and the guarded step is made. In every fifth case half of that memory
is free only in pieces of at most 12 MiB; of the ten processes that share the device two have
expandable segments. TF32 is off. A step is recovered under the same conditions as in
``benchmarks.oom_recovery``, and a case counts if memory was really refused. A device whose context
has died ends the script with what was found until then.

Cost: wall time between synchronisations over (attempts x time of the bare step). What was there
before the first case is left out of collections of garbage, which are most of it where steps take
milliseconds; run directories are in memory. Ten processes at a time make it a rough figure.

To reach: 200 of 200 recovered.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import tempfile
import time
from collections import Counter as Tally
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.oom_cases import KINDS, Case, Job, draw_case
from benchmarks.results_file import Result, read_options, without_paths
from holdfast import Guard

_TOLERANCE = 1e-5
_TIMES_THE_BARE_ERROR = 2.0
_TIMES_THE_BATCH = 8
_LEAST_SPARE, _MOST_SHARE = 1.25, 0.95
_WIDE = Case(number=0, kind="mlp", batch_size=8192, sizes={"width": 2048, "depth": 6}, share=0.0)
_PROCESSES, _NUMBERS = 10, 960  # at a time, and between the first cases of two
_MIB = 1 << 20
_DEVICE = "cuda"
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of one case.

    Args:
        kind: Of model, or "adamw".
        memory: "whole", "in pieces" or "expandable".
        ended: "recovered", "inexact", "raised ..." or "fits".
        plain: Where a bare step ends under the limit: "forward", "backward", "optimizer", or "" for
            not at all.
        refused: The same of each attempt of the guard that failed; "before" if already the state
            did not fit.
        attempts: Made by the guard.
        difference: Relative L2 difference of the gradient.
        cost: Time over attempts x bare time.
    """

    kind: str
    memory: str = "whole"
    ended: str = "fits"
    plain: str = ""
    refused: list[str] = field(default_factory=list)
    attempts: int = 0
    difference: float | None = None
    cost: float | None = None


class Measured:
    """A job that is put back to its beginning after each step, and says in what a step is."""

    def __init__(self, case: Case, *, adamw: bool) -> None:
        self.job, self.marks = Job(case, _DEVICE, adamw=adamw), [(0.0, "before")]
        for group in self.job.optimizer.param_groups:
            group["lr"] = 0.0  # each step begins with the same weights
        self.job.optimizer.register_step_pre_hook(lambda *_: self._enter("optimizer"))

    def _enter(self, phase: str) -> None:
        self.marks.append((time.time(), phase))

    def phase(self, moment: float = float("inf")) -> str:
        """Return in what a step was at a moment, in seconds of the clock."""
        return [phase for began, phase in self.marks if began <= moment][-1]

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        self._enter("forward")
        value = self.job.loss(batch)
        self._enter("backward")
        return value

    def reset(self) -> None:
        """Drop gradients and state of the optimizer, and free what can be."""
        del self.marks[1:]
        self.job.optimizer.state.clear()
        self.job.optimizer.zero_grad()
        free_everything()

    def bare(self, share: int = 1, *, steps: bool = True) -> tuple[int, float, torch.Tensor]:
        """Make a bare step with a share of the batch.

        Return its peak of reserved bytes, seconds and gradient.
        """
        batch = tuple(tensor[: -(-len(tensor) // share)] for tensor in self.job.batch)
        started = synchronised_seconds()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        if steps:
            self.job.optimizer.step()
        seconds = synchronised_seconds() - started
        found = torch.cuda.max_memory_reserved(), seconds, self.job.gradient()
        self.reset()
        return found

    def gradient_in_fp64(self) -> torch.Tensor:
        """Return the gradient of the step in fp64, by eighths of the batch.

        This job is of no use afterwards.
        """
        self.reset()
        self.job.model.double()
        inputs, labels = self.job.batch
        for part, of_part in zip(inputs.chunk(8), labels.chunk(8), strict=True):
            loss = self.job.loss((part.double(), of_part)) * (len(of_part) / len(labels))
            loss.backward()  # type: ignore[no-untyped-call]
        return self.job.gradient()


def synchronised_seconds() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def free_everything() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def limit_to(bytes_: float | None) -> None:
    """Let the allocator of this process have no more than so many bytes, or all."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if bytes_ is None else min(1.0, bytes_ / total))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 difference of two gradients."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def in_pieces(bytes_: float) -> list[torch.Tensor]:
    """Return blocks of 8 MiB that leave so many bytes free in pieces of 12 MiB.

    Segments are of 20 MiB.
    """
    blocks = [
        torch.empty(8 * _MIB, dtype=torch.uint8, device=_DEVICE)
        for _ in range(2 * int(bytes_ / 12 / _MIB))
    ]
    return blocks[::2]


def run_case(number: int, run_dir: Path, memory: str) -> Row:
    """Run one case."""
    case, adamw = draw_case(number), number // len(KINDS) % 4 == 3
    wide = replace(
        _WIDE, number=number, batch_size=_WIDE.batch_size * (1 + number % 3), share=case.share
    )
    case = wide if adamw else replace(case, batch_size=_TIMES_THE_BATCH * case.batch_size)
    if memory == "whole" and number % 5 == 4:
        memory = "in pieces"
    row, here = (
        Row(kind="adamw" if adamw else case.kind, memory=memory),
        Measured(case, adamw=adamw),
    )
    here.job.bare_step(here.job.small)  # a first step loads kernels
    here.reset()
    least, passes = here.bare(8)[0], here.bare(steps=False)[0] if adamw else 0
    whole, seconds, expected = here.bare()
    if adamw:  # a bare loop makes the state when activations are gone; each later step has both
        state = 2 * sum(p.nbytes for p in here.job.model.parameters())
        least, whole = least + state, passes + state
    low = max(_LEAST_SPARE * least, passes)
    limit = low + case.share * max(0.0, _MOST_SHARE * whole - low)
    kept = in_pieces((limit - torch.cuda.memory_allocated()) / 2) if memory == "in pieces" else []
    limit_to(limit + sum(block.nbytes for block in kept))
    try:
        try:
            here.bare()
        except RuntimeError:  # a library that is refused memory says so in its own words
            row.plain = here.phase()
        here.reset()
        gradient = _guarded_step(here, run_dir, row, seconds)
    finally:
        limit_to(None)
    if gradient is None or row.attempts == 1:
        return row
    del kept
    row.difference, row.ended = difference(gradient, expected), "recovered"
    if not row.difference <= _TOLERANCE:
        exact = here.gradient_in_fp64()
        if not difference(gradient, exact) <= _TIMES_THE_BARE_ERROR * difference(expected, exact):
            row.ended = "inexact"
    return row


def _guarded_step(
    here: Measured, run_dir: Path, row: Row, bare_seconds: float
) -> torch.Tensor | None:
    job = here.job
    guard = Guard(run_dir, model=job.model, optimizer=job.optimizer, save_interval_steps=None)
    if row.kind != "adamw":
        guard.step(job.small, here.loss)
        job.optimizer.zero_grad()
    del here.marks[1:]
    free_everything()
    started = synchronised_seconds()
    try:
        row.attempts = guard.step(job.batch, here.loss).attempts
        seconds = synchronised_seconds() - started
    except Exception as error:  # noqa: BLE001 - which one it is goes into the result
        row.ended = f"raised {without_paths(f'{type(error).__name__}: {error}'.splitlines()[0])}"
        return None
    finally:
        moments = [event.unix_seconds for event in guard.events() if event.kind == "out_of_memory"]
        row.refused = [here.phase(moment) for moment in moments]
        guard.close()
    row.cost = seconds / (row.attempts * bare_seconds)
    return job.gradient()


def collect(first: int, wanted: int, memory: str = "whole") -> tuple[list[Row], list[str]]:
    """Run cases from a number on until enough of them count, or the device is dead.

    Return notes too.
    """
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY) as name:
        for number in range(first, first + 3 * wanted):
            if number == first + 1:
                gc.collect()
                gc.freeze()  # what is loaded is no garbage
            try:
                row = run_case(number, Path(name, str(number)), memory)
            except (RuntimeError, MemoryError) as error:
                notes.append(f"ended at case {number}: {without_paths(str(error).splitlines()[0])}")
                break
            if row.ended != "fits":
                rows.append(row)
            if len(rows) == wanted:
                break
    return rows, notes


def apart(first: int, wanted: int, memory: str = "whole") -> Future[tuple[list[Row], list[str]]]:
    """Run cases in a process of their own."""
    os.environ.update(
        PYTORCH_ALLOC_CONF=f"expandable_segments:{memory == 'expandable'}", OMP_NUM_THREADS="1"
    )
    # It starts with the first call
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    return pool.submit(collect, first, wanted, memory)


def add_figures(result: Result, rows: list[Row]) -> None:
    """Add what came of all cases, and of each kind."""

    def count(what: str, found: list[bool], *, expected: bool = False) -> None:
        result.add_count(what, sum(found), len(found), expected=len(found) if expected else None)

    count("recovered", [row.ended == "recovered" for row in rows], expected=True)
    for kind in (*KINDS, "adamw"):
        count(f"recovered: {kind}", [row.ended == "recovered" for row in rows if row.kind == kind])
    for memory in ("whole", "in pieces", "expandable"):
        count(
            f"recovered: memory {memory}",
            [row.ended == "recovered" for row in rows if row.memory == memory],
        )
    for ended, times in sorted(
        Tally(row.ended for row in rows if row.ended != "recovered").items()
    ):
        result.add_count(f"not recovered: {ended}", times, len(rows))
    for place in ("before", "forward", "backward", "optimizer"):
        count(f"a plain loop ends in: {place}", [row.plain == place for row in rows])
        count(f"first refused in: {place}", [row.refused[:1] == [place] for row in rows])
    recovered = [row for row in rows if row.ended == "recovered"]
    differences = [row.difference for row in recovered if row.difference is not None]
    result.add_samples(
        "relative L2 difference to the bare gradient", "ratio", differences, digits=10
    )
    result.add_samples(
        "attempts of a recovered step", "attempts", [row.attempts for row in recovered]
    )
    result.add_samples(
        "time over attempts x bare time", "ratio", [row.cost for row in recovered if row.cost]
    )
    result.samples["cases"] = [asdict(row) for row in rows]


def main() -> None:
    options = read_options("gpu_oom_recovery", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    each = 2 if options.quick else 20
    parameters = {
        "processes": _PROCESSES,
        "cases of each": each,
        "times_the_batch": _TIMES_THE_BATCH,
    }
    result = Result(options=options, parameters=parameters)
    kinds = ["whole"] * (_PROCESSES - 2) + ["expandable"] * 2
    started = [apart(_NUMBERS * place, each, kind) for place, kind in enumerate(kinds)]
    rows: list[Row] = []
    for process in started:
        more, notes = process.result(500)
        rows += more
        result.notes += notes
    add_figures(result, rows)
    result.write()


if __name__ == "__main__":
    main()
