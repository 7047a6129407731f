"""The process that traces.

It finds one request as a file in a folder, and writes what it does and finds there.

What user code prints goes to a file that the parent keeps. It is killed when its parent dies. It is
never used twice: the fake device is there for good.
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
from holdfast.forecast.job.jobs import Job
from holdfast.forecast.job.tracing import ANSWER, DOING, REQUEST
from holdfast.forecast.kernels import scratch, scratch_cpu
from holdfast.forecast.trace.events import Assumption, Trace, live_peak
from holdfast.forecast.trace.tracer import Tracer

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Of the peak, that a step may leave behind without a word: small histories do
_SHARE_OF_GROWTH = 0.01


def main(folder: Path) -> None:
    """Do what the request in a folder asks for, and write the answer there."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    request = json.loads((folder / REQUEST).read_bytes())
    message: dict[str, Any]
    try:
        message = {"answer": _Tracing(request, folder).answer()}
    except HoldfastError as error:
        words = {"what": error.what, "limit": error.limit, "fix": error.fix, "rule": error.rule}
        message = {"error": {"kind": type(error).__name__, **words}}
    (folder / ANSWER).write_text(json.dumps(message))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what user code has started does not hold it up


class _Tracing:
    """Builds a job, makes steps of it and traces them: the fields of a `TraceRequest`."""

    def __init__(self, request: dict[str, Any], folder: Path) -> None:
        self._request, self._folder = request, folder
        self._sizes: list[int] = request["sizes"]
        self._job: Job
        self._device: ForecastDevice
        self._tracer: Tracer

    def _begin(self, text: str) -> None:
        with (self._folder / DOING).open("a") as file:
            file.write(f"{text} ({self._request['precision']})\n")

    def answer(self) -> dict[str, Any]:
        """Return the fields of a `TraceResult` that are known here, and the files of the traces
        in the folder.
        """
        request = self._request
        with forecast_device(request["route"], request["precision"]) as device:
            self._device = device
            begun = time.perf_counter()
            self._job = job = self._build()
            build_seconds = time.perf_counter() - begun
            scratch_of = (scratch_cpu if request["route"] == "cpu" else scratch).scratch_of
            with Tracer(
                device.device, scratch=scratch_of, uncalibrated=device.uncalibrated
            ) as self._tracer:
                job.claim = self._tracer.claim
                self._tracer.watch(models=job.models, optimizers=job.optimizers.values())
                self._begin("making a first step")
                job.settle(self._sizes[0])
                traces, seconds = self._trace_sizes()
        files = [f"{number}.npz" for number in range(len(traces))]
        for file, traced in zip(files, traces, strict=True):
            traced.save(self._folder / file)
        return {
            "files": files,
            "trace_seconds": seconds,
            "build_seconds": build_seconds,
            **_facts(job),
        }

    def _build(self) -> Job:
        request = self._request
        self._begin("importing the factory")
        factory = building.load_factory(request["factory"])
        self._begin("building the model")
        built = building.call_factory(request["factory"], factory, size=self._sizes[0])
        options = {name: request[name] for name in ("gradient_accumulation_steps", "recompute")}
        return Job(built, self._device, **options)

    def _trace_sizes(self) -> tuple[list[Trace], list[float]]:
        """Return a trace of each size that is asked for, and how long it took."""
        traces, seconds = [], []
        for size in self._sizes:
            self._begin(f"tracing a step of {size} samples")
            begun = time.perf_counter()
            traces.append(self._trace(size))
            seconds.append(time.perf_counter() - begun)
        traces[-1] = dataclasses.replace(
            traces[-1], assumptions=(*traces[-1].assumptions, *_growth(traces[-1]))
        )
        return traces, seconds

    def _trace(self, size: int) -> Trace:
        self._job.step(size)  # leaves what such a step leaves; the very first in another order
        with self._tracer.recording():
            self._job.step(size)
        return self._tracer.trace(
            micro_batch_size=size,
            precision=self._request["precision"],
            route=self._request["route"],
            blocks=tuple(name for name, _ in self._job.blocks),
            assumptions=(*self._job.assumptions, *self._device.assumptions),
        )


def _growth(traced: Trace) -> tuple[Assumption, ...]:
    if traced.growth_bytes <= live_peak(traced) * _SHARE_OF_GROWTH:
        return ()
    what = (
        f"a step of {traced.micro_batch_size} samples leaves {traced.growth_bytes} bytes behind"
        " that the next one does not free: a plan holds for one step, and a run needs more with"
        " each"
    )
    return (Assumption(what=what),)


def _facts(job: Job) -> dict[str, Any]:
    parameters = {id(p): p for model in job.models.values() for p in model.parameters()}.values()
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "accumulates": job.accumulates,
        "casts": job.casts,
        "host_bytes": _host_bytes(),
    }


def _host_bytes() -> int:
    # Not what getrusage says: that begins with what the process held which has started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)  # nothing is computed, but each thread has memory
    main(Path(sys.argv[1]))
