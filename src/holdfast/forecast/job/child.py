"""The process that traces: reads one request from stdin, traces, and answers in lines of JSON on what was stdout.

What user code prints goes to stderr, which the parent keeps. The process ends when its stdin is closed, so that it
does not outlive its parent. It is never used twice: the fake device is there for good.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from holdfast.core.control_groups import fields_of
from holdfast.core.errors import HoldfastError, OutOfMemoryError, PolicyError
from holdfast.forecast.fake.device import ForecastDevice, forecast_device
from holdfast.forecast.fake.guesses import TAKEN
from holdfast.forecast.job import building
from holdfast.forecast.job.building import Built
from holdfast.forecast.job.jobs import Job, StepOptions
from holdfast.forecast.kernels import scratch, scratch_cpu
from holdfast.forecast.trace.events import Assumption, Trace, live_peak
from holdfast.forecast.trace.tracer import Tracer
from holdfast.memory.host_memory import available_bytes

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHARE_OF_MEMORY = (
    0.9  # that real weights may take of what is available, so that it is this process that gets an error
)
_MOST_QUESTIONS = 3  # of which both answers are traced: each costs two more steps
_WORTH_TRACING = 0.01  # more of the peak: below that the margin covers it
_SHARE_OF_GROWTH = 0.01  # of the peak, that a step may leave behind without a word: small histories do
Say = Callable[[dict[str, Any]], None]


def main() -> None:
    """Do what the request asks for."""
    request, say = _take_over()
    try:
        answer = trace(request, Steps(say, request))
    except HoldfastError as error:
        words = {"what": error.what, "limit": error.limit, "fix": error.fix, "rule": error.rule}
        say({"error": {"kind": type(error).__name__, **words}})
    else:
        say({"answer": answer})
    sys.stderr.flush()
    os._exit(0)  # what user code has started does not hold it up


def _take_over() -> tuple[dict[str, Any], Say]:
    """Keep stdin and stdout for the parent, and give user code stderr and an empty stdin instead."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    request: dict[str, Any] = json.loads(asked.readline())
    threading.Thread(target=_end_with, args=(asked,), daemon=True).start()

    def say(told: dict[str, Any]) -> None:
        answers.write(json.dumps(told).encode() + b"\n")
        answers.flush()

    return request, say


def _end_with(parent: Any) -> NoReturn:
    while parent.read(1):
        pass
    os._exit(1)


class Steps:
    """Tells the parent what is being done.

    Args:
        say: Sends a line.
        request: What was asked for.
    """

    def __init__(self, say: Say, request: dict[str, Any]) -> None:
        self._say = say
        self._done = 0
        self._total = 3 + len(request["points"])
        self._precision = request["precision"]

    def begin(self, text: str) -> None:
        """Say what comes next."""
        self._say({"text": f"{text} ({self._precision})", "done": self._done, "total": self._total})
        self._done += 1


def trace(request: dict[str, Any], steps: Steps) -> dict[str, Any]:
    """Trace a job in this process.

    Args:
        request: The fields of a `TraceRequest`, its ``points``, and ``weights`` and ``folder``.
        steps: Says how far it is.

    Returns:
        The fields of a `TraceResult` that are known here, and the names of the files of the traces in the folder.
    """
    options = StepOptions(
        gradient_accumulation_steps=request["gradient_accumulation_steps"],
        max_grad_norm=request["max_grad_norm"],
        recompute=tuple(request["recompute"]),
    )
    points = [(size, length) for size, length in request["points"]]
    with forecast_device(request["route"], request["precision"], as_cuda=request["route"] != "cpu") as device:
        device.guesses.give(dict(request["answers"]))
        begun = time.perf_counter()
        job = _built(request, device, options, points, steps)
        build_seconds = time.perf_counter() - begun
        scratch_of = scratch_cpu.scratch_of if device.route == "cpu" else scratch.scratch_of
        with Tracer(device.device, scratch=scratch_of, uncalibrated=device.uncalibrated) as tracer:
            job.claim = tracer.claim
            tracer.watch(models=job.models, optimizers=job.optimizers.values(), blocks=job.blocks)
            steps.begin("making a first step")
            points = request["points"] = _settled(job, points)
            tracing = _Tracing(job, tracer, device, request, steps)
            traces, seconds = tracing.points()
            # A single point is a plan that is checked: what its alternatives need was said before.
            if len(points) > 1:
                traces = tracing.with_other_answers(traces)
    files = [f"{number}.npz" for number in range(len(traces))]
    for file, traced in zip(files, traces, strict=True):
        traced.save(Path(request["folder"]) / file)
    told = {"files": files, "answers": device.guesses.given, "trace_seconds": seconds, "build_seconds": build_seconds}
    return {**_facts(job), **told}


def _built(
    request: dict[str, Any],
    device: ForecastDevice,
    options: StepOptions,
    points: list[tuple[int, int | None]],
    steps: Steps,
) -> Job:
    steps.begin("importing the factory")
    if request["weights"] == "fake":
        return Job(*_called(request, points, steps, device), device, options)
    _limit_memory()
    try:
        with device.suspended():
            built, batches = _called(request, points, steps, device)
    except HoldfastError as error:
        if isinstance(error.__cause__, MemoryError) or "can't allocate memory" in error.what:
            raise _too_large(error) from error
        raise
    job = Job(built, batches, device, options)
    taken = _host_bytes() / 2**30
    job.assumptions.append(
        Assumption(what=f"build ran with real weights and took up to {taken:.2f} GiB of host memory")
    )
    return job


def _called(
    request: dict[str, Any], points: list[tuple[int, int | None]], steps: Steps, device: ForecastDevice
) -> tuple[Built, dict[int | None, Any]]:
    """Return what the factory returned, and its sample batches by the length that it was told.

    A factory that takes a length is called for each, the longest first: that model is kept.
    """
    name = request["factory"]
    factory = building.load_factory(name)
    steps.begin("building the model")
    size = points[0][0]
    asked = sorted({length for _, length in points if length is not None}, reverse=True)
    lengths: list[int | None] = [*asked] if building.takes_length(factory) and asked else [None]
    built = building.call_factory(name, factory, size=size, length=lengths[0], loading=device.suspended)
    batches = {lengths[0]: built.batch} if built.has_batch else {}
    for length in lengths[1:] if built.has_batch else ():
        other = building.call_factory(name, factory, size=size, length=length, loading=device.suspended)
        batches[length] = other.batch
    return built, batches


def _settled(job: Job, points: list[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Make the first step; one that takes no small batches is made with the sample batch, and its multiples.

    Returns:
        The points to trace.
    """
    smallest = points[0][0]
    try:
        job.settle(*points[0])
    except PolicyError as error:
        whole = None if job.sample is None else job.sample.size
        if error.rule != "H414" or len(points) == 1 or whole is None or whole <= smallest:
            raise
        larger = [(size * whole // smallest, length) for size, length in points]
        try:
            job.settle(*larger[0])
        except HoldfastError:
            raise error from None
        sizes = " and ".join(str(size) for size in sorted({size for size, _ in larger}))
        what = f"batches of {sizes} samples were traced, since with {smallest} {' '.join(error.what.split())}"
        job.assumptions.append(Assumption(what=what))
        return larger
    return points


class _Tracing:
    """Makes steps of a job and traces them."""

    def __init__(
        self, job: Job, tracer: Tracer, device: ForecastDevice, request: dict[str, Any], steps: Steps
    ) -> None:
        self._job, self._tracer, self._device, self._request, self._steps = job, tracer, device, request, steps

    def points(self) -> tuple[list[Trace], list[float]]:
        """Return a trace of each point that is asked for, and how long it took."""
        traces, seconds = [], []
        for size, length in self._request["points"]:
            self._steps.begin(f"tracing a step of {size} samples" + (f" of length {length}" if length else ""))
            begun = time.perf_counter()
            self._job.step(size, length)  # leaves what such a step leaves; the very first in another order
            traces.append(self._traced(size, length))
            seconds.append(time.perf_counter() - begun)
        traces[-1] = dataclasses.replace(traces[-1], assumptions=(*traces[-1].assumptions, *_growth(traces[-1])))
        return traces, seconds

    def _traced(self, size: int, length: int | None) -> Trace:
        with self._tracer.recording():
            self._job.step(size, length)
        return self._tracer.trace(
            micro_batch_size=size,
            length=length,
            precision=self._request["precision"],
            route=self._request["route"],
            assumptions=(*self._job.assumptions, *self._device.assumptions),
        )

    def with_other_answers(self, traces: list[Trace]) -> list[Trace]:
        """Return the traces to plan with: a plan is to hold whichever way a step goes that depends on values.

        The other answer to each ``bool(tensor)`` is tried, and those that need more are given to all traces.
        """
        size, length = self._request["points"][-1]
        guesses = self._device.guesses
        given, asked = dict(guesses.given), dict(guesses.asked)
        peak = live_peak(traces[-1])
        said: dict[str, str] = {}
        heavier: dict[str, bool] = {}
        for line, answer in [each for each in asked.items() if each[0] not in given][:_MOST_QUESTIONS]:
            guesses.give({**given, line: not answer})
            try:
                self._job.step(size, length)
                more = live_peak(self._traced(size, length)) / peak - 1
                how = f"needs {abs(more):.2%} {'less' if more < 0 else 'more'}"
                if more > _WORTH_TRACING:
                    heavier[line] = not answer
            except HoldfastError as error:
                how = f"does not run ({' '.join(error.what.split())})"
            said[line] = f"{answer}; {not answer} {how}"
        guesses.give({**given, **heavier})
        if heavier:
            try:
                traces, _ = self.points()
                for line, answer in heavier.items():
                    said[line] = f"{answer}, the answer that needs more ({said[line]})"
            except HoldfastError:  # alone each of them ran; all of them together need not
                guesses.give(given)
        return [dataclasses.replace(each, assumptions=_worded(each.assumptions, said)) for each in traces]


def _worded(assumptions: Iterable[Assumption], said: Mapping[str, str]) -> tuple[Assumption, ...]:
    """Return assumptions with what is known of the other answers."""
    return tuple(
        Assumption(what=TAKEN + said[each.line], line=each.line)
        if each.line in said and each.what.startswith(TAKEN)
        else each
        for each in assumptions
    )


def _growth(traced: Trace) -> tuple[Assumption, ...]:
    if traced.growth_bytes <= live_peak(traced) * _SHARE_OF_GROWTH:
        return ()
    what = (
        f"a step of {traced.micro_batch_size} samples leaves {traced.growth_bytes} bytes behind that the next one"
        " does not free: a plan holds for one step, and a run needs more with each"
    )
    return (Assumption(what=what),)


def _facts(job: Job) -> dict[str, Any]:
    parameters = {id(p): p for model in job.models.values() for p in model.parameters()}.values()
    return {
        "optimizers": {name: type(optimizer).__name__ for name, optimizer in job.optimizers.items()},
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "accumulates": job.accumulates,
        "casts": job.casts,
        "sample_size": None if job.sample is None else job.sample.size,
        "sample_length": None if job.sample is None else job.sample.length,
        "host_bytes": _host_bytes(),
    }


def _host_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _limit_memory() -> None:
    """Let an allocation that this machine cannot bear fail here, before the kernel has to kill something."""
    available = available_bytes()
    used = fields_of(Path("/proc/self/status")).get("VmData")
    if available is not None and used is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + int(available * _SHARE_OF_MEMORY), hard))


def _too_large(error: HoldfastError) -> OutOfMemoryError:
    return OutOfMemoryError(
        error.what,
        limit="build() could be run with real weights only, and they do not fit this machine",
        fix="let build() make its model from a config instead of loading its weights: then none takes memory.",
        rule="H415",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # nothing is computed, but each thread has memory
    main()
