"""Trace a training step in a separate process, and return the traces.

The process is separate because the fake device cannot be unregistered, because it may crash user
code, and because the calling process may itself be training. torch is not imported here. The
child's side is in `child`.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from holdfast.core import errors
from holdfast.core.errors import HoldfastError, OutOfMemoryError, PolicyError
from holdfast.forecast.job.time_limits import MOST_CPU_SECONDS, MOST_IDLE_SECONDS, TimeLimits
from holdfast.forecast.trace.events import Assumption, Trace

Route = Literal["privateuse1", "cpu"]

# Files in the folder of a child: the request, its progress line by line, and its answer or error.
REQUEST_FILE = "request.json"
PROGRESS_FILE = "progress"
ANSWER_FILE = "answer.json"
# The output of the child and the user's code.
_OUTPUT_FILE = "stderr"
# Polling interval for the progress of a child. Its end is noticed at once.
_POLL_SECONDS = 0.2
# Lines of the child's output in an error.
_MOST_LAST_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A job to trace.

    Args:
        factory: ``"module:function"`` or ``"file.py:function"``; see `building` for what it may
            return.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` under autocast.
        sizes: Micro-batch sizes, in samples, at least 1.
        route: The fake device: ``"privateuse1"`` represents a GPU, ``"cpu"`` is the host without
            CUDA, for comparison with real runs.
        recompute: Paths of the modules whose activations are recomputed, as in `Trace.blocks`.
        gradient_accumulation_steps: Micro-batches per optimizer step, if the job has a loss
            function.
    """

    factory: str
    precision: str = "fp32"
    sizes: tuple[int, ...] = (2, 4)
    route: Route = "privateuse1"
    recompute: tuple[str, ...] = ()
    gradient_accumulation_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """The traces of a job, and facts about it.

    Args:
        traces: One for each of `TraceRequest.sizes`, in that order.
        route: The fake device.
        parameters: Number of parameters, in elements.
        trainable_parameters: Those that require a gradient.
        accumulates: Whether a larger batch can be split into micro-batches; not if the step runs
            backward itself.
        host_bytes: Peak resident memory of the child.
        build_seconds: Time to import the factory and to build the job.
        trace_seconds: Time for each trace.
        assumptions: The assumptions of all traces.
        casts: Whether the job has an autocast of its own, which overrides the requested precision.
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


def trace_job(
    request: TraceRequest,
    on_progress: Callable[[str], object] = lambda _: None,
    *,
    cpu_seconds: float = MOST_CPU_SECONDS,
    idle_seconds: float = MOST_IDLE_SECONDS,
) -> TraceResult:
    """Trace one training step of a user's job at several sizes.

    Args:
        request: What is to be traced.
        on_progress: Called with a description of each stage.
        cpu_seconds: CPU time that the child may use; see `TimeLimits`.
        idle_seconds: Time for which it may be idle.

    Raises:
        PolicyError: H410 for a factory that needs CUDA, H411 for one that cannot be imported or
            run, H412 for one that returns something else, H414 for a step that raises, H415 for a
            child that died or exceeded its limits, H422 to H427 for code that a forecast cannot
            trace.
        BatchError: H413 for a sample batch without a batch dimension; H201 to H203 for a loss that
            `Guard` does not take.
        OutOfMemoryError: H415 for a child that was killed, probably because the host ran out of
            memory.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-forecast-") as name:
        exchange = _Exchange(Path(name), on_progress)
        return exchange.run_child(request, cpu_seconds=cpu_seconds, idle_seconds=idle_seconds)


class _Exchange:
    """The exchange of files with one child, in a folder.

    Args:
        folder: An empty folder.
        on_progress: Called with each line of progress.
    """

    def __init__(self, folder: Path, on_progress: Callable[[str], object]) -> None:
        self._folder = folder
        self._on_progress = on_progress
        self._stage = "starting"
        self._stages_read = 0

    def run_child(
        self, request: TraceRequest, *, cpu_seconds: float, idle_seconds: float
    ) -> TraceResult:
        """Run a child and return its answer.

        Raises:
            HoldfastError: The error reported by the child, or H415 if it died.
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
        raise self._died(f"ended with exit code {status}")

    def _read_answer(self, answer: dict[str, Any]) -> TraceResult:
        """Return an answer, in which a child names the files with its traces."""
        traces = tuple(Trace.load(self._folder / file) for file in answer.pop("files"))
        assumptions = [assumption for trace in traces for assumption in trace.assumptions]
        return TraceResult(
            traces=traces,
            trace_seconds=tuple(answer.pop("trace_seconds")),
            assumptions=tuple(dict.fromkeys(assumptions)),
            **answer,
        )

    def _read_progress(self) -> None:
        # Text after the last newline belongs to a line that is still being written.
        lines = (self._folder / PROGRESS_FILE).read_text().split("\n")[:-1]
        for line in lines[self._stages_read :]:
            self._stage = line
            self._on_progress(line)
        self._stages_read = len(lines)

    def _killed(self) -> HoldfastError:
        """Return the error for a child that was killed.

        Either the kernel killed it because memory ran out, or a person did.
        """
        return OutOfMemoryError(
            f"the tracing process was killed while {self._stage}{self._last_lines()}",
            limit="it must run until the step is traced",
            fix=(
                "free memory on this machine, or let build() create the model from a config instead"
                " of loading weights."
            ),
            rule="H415",
        )

    def _died(self, how: str) -> HoldfastError:
        return PolicyError(
            f"the tracing process {how} while {self._stage}{self._last_lines()}",
            limit="it must run until the step is traced",
            fix=(
                "read its last lines of output, and run build() and one step in a Python process of"
                " your own; with PYTHONFAULTHANDLER=1 a crash reports its location."
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
    """Start a child that finds its request in a folder, and kill it at the end of the context."""
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
    """Return the error that a child has reported."""
    kind = getattr(errors, message["kind"], PolicyError)
    error = kind(message["what"], limit=message["limit"], fix=message["fix"], rule=message["rule"])
    assert isinstance(error, HoldfastError)
    return error
