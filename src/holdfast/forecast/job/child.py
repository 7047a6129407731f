"""Trace one job in a child process, which `tracing.trace_job` starts.

The child reads its request from a file in a folder, and writes its progress and its answer to other
files in the same folder. The output of user code goes to another file there. The kernel kills the
child if its parent dies. A child traces only one job, because the fake device cannot be
unregistered.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import HoldfastError
from holdfast.forecast.fake.device import ForecastDevice, forecast_device
from holdfast.forecast.job import building
from holdfast.forecast.job.evaluation_job import EvaluationJob
from holdfast.forecast.job.tracing import ANSWER_FILE, PROGRESS_FILE, REQUEST_FILE, TraceRequest
from holdfast.forecast.job.training_job import TrainingJob
from holdfast.forecast.kernels import scratch, scratch_cpu
from holdfast.forecast.trace.events import Assumption, Trace, live_peak
from holdfast.forecast.trace.tracer import Tracer

# The option of prctl(2) that sends a signal when the parent dies (linux/prctl.h).
_PR_SET_PDEATHSIG = 1
# If a step leaves behind more than this fraction of its peak memory, the forecast reports the
# growth as an assumption. Smaller amounts do not matter for a plan and are common: many jobs keep a
# history of losses.
_UNMENTIONED_GROWTH = 0.01


def main(folder: Path) -> None:
    """Read a request from a folder, trace the job, write the answer to the folder, and exit."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    request = TraceRequest(**json.loads((folder / REQUEST_FILE).read_bytes()))
    message: dict[str, Any]
    try:
        message = {"answer": _Tracing(request, folder).answer()}
    except HoldfastError as error:
        message = {
            "error": {
                "kind": type(error).__name__,
                "what": error.what,
                "limit": error.limit,
                "fix": error.fix,
                "rule": error.rule,
            }
        }
    (folder / ANSWER_FILE).write_text(json.dumps(message))
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without waiting for user code's threads and without running its exit handlers.
    os._exit(0)


class _Tracing:
    """Builds the requested job, and runs and traces its steps.

    Args:
        request: The job to trace.
        folder: The folder for the progress file and the trace files.
    """

    def __init__(self, request: TraceRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder

    def answer(self) -> dict[str, Any]:
        """Trace the job and return the fields of a `TraceResult`, with file names for traces."""
        request = self._request
        with forecast_device(request.route, request.precision) as device:
            begin = time.perf_counter()
            built = self._build()
            tracer = Tracer(
                device.device,
                scratch=scratch_cpu.scratch_of if request.route == "cpu" else scratch.scratch_of,
                uncalibrated=device.uncalibrated,
            )
            job = TrainingJob(
                built,
                device,
                claim_batch=tracer.claim,
                gradient_accumulation_steps=request.gradient_accumulation_steps,
                recompute=request.recompute,
            )
            build_seconds = time.perf_counter() - begin
            with tracer:
                tracer.watch(models=job.models, optimizers=job.optimizers.values())
                self._report("running the first step")
                job.settle(request.sizes[0])
                traces = []
                trace_seconds = []
                for size in request.sizes:
                    self._report(f"tracing a step of {size} samples")
                    begin = time.perf_counter()
                    traces.append(self._trace(job, device, tracer, size))
                    trace_seconds.append(time.perf_counter() - begin)
                evaluation = None
                if request.traces_evaluation and built.evaluation is not None:
                    self._report("tracing the evaluation")
                    evaluation_job = EvaluationJob(built, job, device, tracer.claim)
                    evaluation = self._trace_evaluation(evaluation_job, job, device, tracer)
        traces[-1] = _with_growth_mentioned(traces[-1])
        # Count each parameter only once, because models may share parameters.
        parameters = {
            id(parameter): parameter
            for model in job.models.values()
            for parameter in model.parameters()
        }.values()
        files = []
        for number, trace in enumerate(traces):
            files.append(f"{number}.npz")
            trace.save(self._folder / files[-1])
        evaluation_file = None
        if evaluation is not None:
            evaluation_file = "evaluation.npz"
            evaluation.save(self._folder / evaluation_file)
        return {
            "files": files,
            "evaluation_file": evaluation_file,
            "route": request.route,
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "accumulates": job.accumulates,
            "host_bytes": _peak_host_bytes(),
            "build_seconds": build_seconds,
            "trace_seconds": trace_seconds,
            "casts": job.casts,
            "only_evaluates": job.only_evaluates,
        }

    def _report(self, text: str) -> None:
        """Append a line to the progress file, which the parent polls."""
        with (self._folder / PROGRESS_FILE).open("a") as file:
            file.write(f"{text} ({self._request.precision})\n")

    def _build(self) -> building.BuiltJob:
        name = self._request.factory
        self._report("importing the factory")
        factory = building.load_factory(name)
        self._report("building the model")
        return building.call_factory(
            name, factory, size=self._request.sizes[0], arguments=self._request.arguments
        )

    def _trace(self, job: TrainingJob, device: ForecastDevice, tracer: Tracer, size: int) -> Trace:
        # Run one step of this size before recording one: the memory that a step leaves behind
        # depends on its size, and the very first step allocates in a different order.
        job.step(size)
        with tracer.recording():
            job.step(size)
        # Without a backward pass, no activations are kept that could be recomputed.
        blocks = () if job.only_evaluates else tuple(name for name, _ in job.blocks)
        return tracer.trace(
            micro_batch_size=size,
            precision=self._request.precision,
            route=self._request.route,
            blocks=blocks,
            assumptions=(*job.assumptions, *device.assumptions),
        )

    def _trace_evaluation(
        self, evaluation: EvaluationJob, job: TrainingJob, device: ForecastDevice, tracer: Tracer
    ) -> Trace:
        size = evaluation.batch_size(self._request.sizes[-1])
        # Run the evaluation once before recording it, because the first call may allocate in a
        # different order.
        evaluation.run(size)
        with tracer.recording():
            evaluation.run(size)
        return tracer.trace(
            micro_batch_size=size,
            precision=self._request.precision,
            route=self._request.route,
            # A sharded model gathers its parameters block by block in an evaluation, too.
            blocks=tuple(name for name, _ in job.blocks),
            assumptions=device.assumptions,
        )


def _with_growth_mentioned(trace: Trace) -> Trace:
    """Return the trace, with an added assumption if its step leaves much memory behind."""
    if trace.growth_bytes <= live_peak(trace) * _UNMENTIONED_GROWTH:
        return trace
    what = (
        f"each step of {trace.micro_batch_size} samples leaves {trace.growth_bytes:,} bytes behind"
        " that later steps do not free: the plan covers one step, but the memory of a run grows"
        " with each step"
    )
    return dataclasses.replace(trace, assumptions=(*trace.assumptions, Assumption(what=what)))


def _peak_host_bytes() -> int:
    """Return the peak resident memory of this process.

    The result is in bytes. ``getrusage`` is not used, because the peak that it reports includes the
    parent's memory from before the fork.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no VmHWM")


if __name__ == "__main__":
    # Fake tensors compute nothing, so more threads would only cost memory.
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
