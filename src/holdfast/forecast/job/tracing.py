"""Trace a training step in a child process, and return the traces.

A child process is used for three reasons: the fake device cannot be unregistered, user code may
crash on that device, and the calling process may itself be training. This module does not import
torch. The code that runs in the child process is in `child`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from holdfast.core import errors
from holdfast.core.errors import HoldfastError, OutOfMemoryError, PolicyError
from holdfast.forecast.job.time_limits import MOST_CPU_SECONDS, MOST_IDLE_SECONDS, TimeLimits
from holdfast.forecast.trace.events import Assumption, Trace

Route = Literal["privateuse1", "cpu"]
# The value of an argument that the factory is called with.
Argument = bool | int | float | str

# The files below are in a folder that the parent and the child share. The parent writes its request
# to this file.
REQUEST_FILE = "request.json"
# The child appends a line to this file for each stage of its work.
PROGRESS_FILE = "progress"
# The child writes its answer or an error to this file.
ANSWER_FILE = "answer.json"
# This file receives the child's standard output and standard error, including user code's output.
_OUTPUT_FILE = "stderr"
# How often the progress file is polled. The child's exit is noticed immediately.
_POLL_SECONDS = 0.2
# An error message quotes at most this many lines of the child's output.
_MOST_LAST_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A job to trace, and how to run its steps.

    Args:
        factory: The factory, as ``"module:function"`` or ``"file.py:function"``. `building`
            describes what it may return.
        arguments: Arguments for the factory, keyed by the name of the parameter.
        precision: ``"bf16"`` or ``"fp16"`` to run the step under autocast with this dtype, or
            ``"fp32"`` to run it without autocast.
        sizes: The micro-batch sizes to trace, in samples, each at least 1.
        route: The fake device: ``"privateuse1"`` represents a GPU, and ``"cpu"`` represents a host
            without CUDA, for comparison with real runs.
        recompute: The paths of the modules whose activations are recomputed, from `Trace.blocks`.
        gradient_accumulation_steps: The number of micro-batches per optimizer step. Ignored if the
            batch cannot be split; see `TraceResult.accumulates`.
        traces_evaluation: Whether to trace the evaluation as well, if the factory returns one.
    """

    factory: str
    arguments: dict[str, Argument] = field(default_factory=dict)
    precision: str = "fp32"
    sizes: tuple[int, ...] = (2, 4)
    route: Route = "privateuse1"
    recompute: tuple[str, ...] = ()
    gradient_accumulation_steps: int = 1
    traces_evaluation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """The traces of a job, and facts about the job.

    Args:
        traces: One trace for each size in `TraceRequest.sizes`, in the same order.
        route: The fake device; see `TraceRequest.route`.
        parameters: The total number of elements in all parameters.
        trainable_parameters: The number of elements in parameters that require gradients.
        accumulates: Whether a batch can be split into micro-batches. This requires a loss function
            and a sample batch.
        host_bytes: The peak resident memory of the child process, in bytes.
        build_seconds: How long it took to import the factory and build the job, in seconds.
        trace_seconds: How long it took to record each trace, in seconds.
        assumptions: The assumptions behind all traces.
        casts: Whether the job's own code uses autocast, which overrides the requested precision.
        only_evaluates: Whether the job trains nothing. A step is then an evaluation of one batch.
        evaluation: The trace of evaluating one batch, if an evaluation trace was requested and the
            factory returns an evaluation.
    """

    traces: tuple[Trace, ...]
    route: str
    parameters: int
    trainable_parameters: int
    accumulates: bool
    host_bytes: int
    build_seconds: float
    trace_seconds: tuple[float, ...]
    assumptions: tuple[Assumption, ...]
    casts: bool = False
    only_evaluates: bool = False
    evaluation: Trace | None = None


def trace_job(
    request: TraceRequest,
    on_progress: Callable[[str], object] = lambda _: None,
    *,
    cpu_seconds: float = MOST_CPU_SECONDS,
    idle_seconds: float = MOST_IDLE_SECONDS,
) -> TraceResult:
    """Trace one training step of a user's job at several sizes.

    Args:
        request: The job to trace.
        on_progress: Called with a description of each stage of the work when it begins.
        cpu_seconds: The CPU time that the child may use; see `TimeLimits`.
        idle_seconds: How long the child may be idle; see `TimeLimits`.

    Raises:
        PolicyError: H410 if the factory needs CUDA, H411 if it cannot be imported or called, H412
            if it returns no valid job, H414 if the step raises, H415 if the child crashed or
            exceeded its limits, H422 to H427 if the code cannot be traced for a forecast.
        BatchError: H413 if the sample batch cannot be resized, H201 to H203 if `Guard` does not
            support the loss.
        OutOfMemoryError: H415 if the child was killed, probably because the host ran out of memory.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-forecast-") as name:
        exchange = _Exchange(Path(name), on_progress)
        return exchange.run_child(request, cpu_seconds=cpu_seconds, idle_seconds=idle_seconds)


class _Exchange:
    """Runs one child process and exchanges files with it.

    Args:
        folder: An empty folder for the files.
        on_progress: Called with each line of the progress file.
    """

    def __init__(self, folder: Path, on_progress: Callable[[str], object]) -> None:
        self._folder = folder
        self._on_progress = on_progress
        self._stage = "starting"
        self._stages_read = 0

    def run_child(
        self, request: TraceRequest, *, cpu_seconds: float, idle_seconds: float
    ) -> TraceResult:
        """Run a child process that traces the request, and return its answer.

        Raises:
            HoldfastError: The error that the child reported, or H415 if it exited without an
                answer or exceeded its limits.
        """
        (self._folder / REQUEST_FILE).write_text(json.dumps(asdict(request)))
        (self._folder / PROGRESS_FILE).touch()
        output = self._folder / _OUTPUT_FILE
        with output.open("wb") as printed, _child(self._folder, printed) as child:
            limits = TimeLimits(child.pid, cpu_seconds=cpu_seconds, idle_seconds=idle_seconds)
            while child.poll() is None:
                exceeded = limits.exceeded()
                if exceeded is not None:
                    raise self._died(exceeded)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_SECONDS)
                self._read_progress()
            status = child.returncode
        answer_file = self._folder / ANSWER_FILE
        if status == 0 and answer_file.exists():
            message = json.loads(answer_file.read_bytes())
            if "error" in message:
                raise _error_of_child(message["error"])
            return self._read_answer(message["answer"])
        if status == -signal.SIGKILL:
            raise self._killed()
        if status < 0:
            raise self._died(f"was ended by {signal.Signals(-status).name}")
        raise self._died(f"exited with code {status}")

    def _read_answer(self, answer: dict[str, Any]) -> TraceResult:
        """Convert the child's answer to a result, loading the trace files that it names."""
        traces = tuple(Trace.load(self._folder / file) for file in answer.pop("files"))
        evaluation_file = answer.pop("evaluation_file")
        evaluation = None
        if evaluation_file is not None:
            evaluation = Trace.load(self._folder / evaluation_file)
        assumptions = [assumption for trace in traces for assumption in trace.assumptions]
        return TraceResult(
            traces=traces,
            evaluation=evaluation,
            trace_seconds=tuple(answer.pop("trace_seconds")),
            assumptions=tuple(dict.fromkeys(assumptions)),
            **answer,
        )

    def _read_progress(self) -> None:
        # Ignore the text after the last newline: the child is still writing that line.
        lines = (self._folder / PROGRESS_FILE).read_text().split("\n")[:-1]
        for line in lines[self._stages_read :]:
            self._stage = line
            self._on_progress(line)
        self._stages_read = len(lines)

    def _killed(self) -> HoldfastError:
        """Return the error for a child that was killed by SIGKILL.

        The most likely sender is the kernel, because the host ran out of memory.
        """
        return OutOfMemoryError(
            f"the tracing process was killed while {self._stage}{self._last_lines()}",
            limit="the host must have enough memory for build(), which may load real weights",
            fix=(
                "free memory on this machine, or let build() create the model from a config instead"
                " of loading weights."
            ),
            rule="H415",
        )

    def _died(self, how: str) -> HoldfastError:
        return PolicyError(
            f"the tracing process {how} while {self._stage}{self._last_lines()}",
            limit="build() and the step must run to their end within the time limits",
            fix=(
                "read the last lines of its output, and run build() and one step in a Python"
                " process of your own. With PYTHONFAULTHANDLER=1, a crash prints its location."
            ),
            rule="H415",
        )

    def _last_lines(self) -> str:
        output = (self._folder / _OUTPUT_FILE).read_text(errors="replace").strip()
        lines = output.splitlines()[-_MOST_LAST_LINES:]
        if not lines:
            return ""
        return ". Its last lines:\n" + "".join(f"    {line}\n" for line in lines)


@contextlib.contextmanager
def _child(folder: Path, printed: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child that reads its request from `folder`, and kill it when the block ends.

    Args:
        folder: The folder with the request.
        printed: The file that receives the child's output.
    """
    child = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "holdfast.forecast.job.child", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=printed,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _error_of_child(message: dict[str, str]) -> HoldfastError:
    """Recreate the error that a child process has reported in its answer file."""
    kind = getattr(errors, message["kind"], PolicyError)
    error = kind(message["what"], limit=message["limit"], fix=message["fix"], rule=message["rule"])
    assert isinstance(error, HoldfastError)
    return error
