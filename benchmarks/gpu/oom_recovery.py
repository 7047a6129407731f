"""Real out-of-memory errors of a CUDA device: how many steps are recovered, how exactly, and at what cost.

How: the cases are those of ``benchmarks.oom_recovery`` with batches 8 times as large. In one process, for each case:
a bare step without a limit gives the expected gradient, its peak and its time; a bare step with an eighth of the
batch gives its peak. Then the process's share of the device's memory is limited
(``torch.cuda.set_per_process_memory_fraction``) to a random point between what an eighth of the batch needs, with a
quarter to spare, and 95 % of what the whole batch needs, and the guarded step is made. TF32 is off. A step is
recovered under the same conditions as there, and a case counts if memory was really refused. A device whose context
has died ends the script with what was found until then.

Cost: wall time between synchronisations over (attempts x time of the bare step).

To reach: 200 of 200 recovered.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import Counter as Tally
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.oom_cases import KINDS, Case, Job, draw_case
from benchmarks.oom_recovery import gradient_in_fp64, relative_difference, warmed_up
from benchmarks.results_file import Result, read_options, without_paths
from holdfast import Guard

_TOLERANCE = 1e-5
_TIMES_THE_BARE_ERROR = 2.0
_TIMES_THE_BATCH = 8
_LEAST_SPARE, _MOST_SHARE = 1.25, 0.95


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of one case.

    Args:
        kind: Of model.
        ended: "recovered", "inexact", "raised ..." or "fits".
        attempts: Made by the guard.
        difference: Relative L2 difference of the gradient.
        cost: Time over attempts x bare time.
    """

    kind: str
    ended: str = "fits"
    attempts: int = 0
    difference: float | None = None
    cost: float | None = None


def free_everything() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def bare_step(case: Case, samples: int, file: Path | None) -> tuple[int, float]:
    """Make the step without a limit; return its peak of reserved bytes and its seconds."""
    free_everything()
    job = warmed_up(case, "cuda")
    batch = tuple(tensor[:samples] for tensor in job.batch)
    torch.cuda.synchronize()
    started = time.perf_counter()
    job.bare_step(batch)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    if file is not None:
        torch.save(job.gradient(), file)
    return torch.cuda.max_memory_reserved(), seconds


def run_case(case: Case, folder: Path) -> Row:
    """Run one case."""
    bare, exact = folder / "bare.pt", folder / "fp64.pt"
    whole, bare_seconds = bare_step(case, case.batch_size, bare)
    eighth, _ = bare_step(case, -(-case.batch_size // 8), None)
    least, most = _LEAST_SPARE * eighth, _MOST_SHARE * whole
    limit = least + case.share * max(0.0, most - least)
    row = Row(kind=case.kind)
    gradient = _guarded_step(case, limit, folder / str(case.number), row, bare_seconds)
    if gradient is None or row.attempts == 1:
        return row
    row.difference = relative_difference(gradient, bare)
    row.ended = "recovered"
    if row.difference > _TOLERANCE:
        free_everything()
        gradient_in_fp64(case, exact, "cuda")
        of_bare = relative_difference(torch.load(bare, weights_only=True), exact)
        if relative_difference(gradient, exact) > _TIMES_THE_BARE_ERROR * of_bare:
            row.ended = "inexact"
    return row


def _guarded_step(case: Case, limit: float, run_dir: Path, row: Row, bare_seconds: float) -> torch.Tensor | None:
    free_everything()
    job = Job(case, "cuda")
    guard = Guard(run_dir, model=job.model, optimizer=job.optimizer, save_interval_steps=None)
    guard.step(job.small, job.loss)
    job.optimizer.zero_grad()
    free_everything()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    torch.cuda.synchronize()
    started = time.perf_counter()
    try:
        row.attempts = guard.step(job.batch, job.loss).attempts
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - which one it is goes into the result
        row.ended = f"raised {without_paths(f'{type(error).__name__}: {error}'.splitlines()[0])}"
        return None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        guard.close()
    row.cost = (time.perf_counter() - started) / (row.attempts * bare_seconds)
    return job.gradient()


def collect(result: Result, wanted: int) -> list[Row]:
    """Run cases until enough of them count, or the device is dead."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(3 * wanted):
            case = draw_case(number)
            run = partial(run_case, replace(case, batch_size=_TIMES_THE_BATCH * case.batch_size), Path(name))
            try:
                row = run()
            except RuntimeError as error:
                result.notes.append(f"ended at case {number}: {without_paths(str(error).splitlines()[0])}")
                break
            if row.ended != "fits":
                rows.append(row)
            if len(rows) == wanted:
                break
    return rows


def main() -> None:
    options = read_options("gpu_oom_recovery", __doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = 16 if options.quick else 200
    result = Result(options=options, parameters={"cases": wanted, "times_the_batch": _TIMES_THE_BATCH})
    bare_step(draw_case(0), 8, None)  # the first step on a device loads its kernels
    rows = collect(result, wanted)
    recovered = [row for row in rows if row.ended == "recovered"]
    result.add_count("recovered", len(recovered), len(rows), expected=len(rows))
    for kind in KINDS:
        of_kind = [row.ended for row in rows if row.kind == kind]
        result.add_count(f"recovered: {kind}", of_kind.count("recovered"), len(of_kind))
    for ended, count in sorted(Tally(row.ended for row in rows if row.ended != "recovered").items()):
        result.add_count(f"not recovered: {ended}", count, len(rows))
    differences = [row.difference for row in recovered if row.difference is not None]
    result.add_samples("relative L2 difference to the bare gradient", "ratio", differences, digits=10)
    result.add_samples("attempts of a recovered step", "attempts", [row.attempts for row in recovered])
    costs = [row.cost for row in recovered if row.cost is not None]
    result.add_samples("time over attempts x bare time", "ratio", costs)
    result.write()


if __name__ == "__main__":
    main()
