"""Have a training step traced in a process of its own, and get the traces back.

A process, since the fake device is registered for good, since user code that meets it may abort,
and since the process that asks may itself be training. Torch is not imported here.
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

_LOOK_SECONDS = 0.2  # between looks at what a child is doing; its end is seen at once
_LAST_LINES = 6  # of what the child has written to stderr, in an error
REQUEST, DOING, ANSWER = "request.json", "doing", "answer.json"
"""Files in the folder of a child.

What is asked, what it does, line by line, and what it has found or failed with.
"""

_FACTS = (
    "parameters",
    "trainable_parameters",
    "accumulates",
    "host_bytes",
    "build_seconds",
    "casts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """What is to be traced.

    Args:
        factory: ``"module:function"`` or ``"file.py:function"``; see ``jobs`` for what it may
            return.
        sizes: Micro-batch sizes, in samples, at least 1.
        route: The fake device: an accelerator's, or the CPU as it is, without CUDA, to be compared
            with real runs.
        recompute: Names of the modules whose activations are recomputed, as in `Trace.blocks`.
        gradient_accumulation_steps: Micro-batches of an optimizer step, where a loss function is
            given.
    """

    factory: str
    precision: str = "fp32"
    sizes: tuple[int, ...] = (2, 4)
    route: Route = "privateuse1"
    recompute: tuple[str, ...] = ()
    gradient_accumulation_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """What came back.

    Args:
        traces: One for each of `TraceRequest.sizes`, in that order.
        route: The fake device, ``"privateuse1"`` or ``"cpu"``.
        accumulates: Whether a larger batch can be cut into micro-batches; not where the step runs
            backward itself.
        host_bytes: Most memory that the child had resident.
        assumptions: What had to be taken for granted, in all traces.
        casts: Whether the job has an autocast of its own, which overrides the precision that was
            asked for.
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

    `on_progress` is called with what is being done.

    The child is ended when it exceeds its `TimeLimits`: CPU time, or a time in which it does
        nothing.

    H410 for a factory that needs CUDA, H411 for one that cannot be imported or run, H412 for one
    that returns something else, H413 for a sample batch without a batch dimension, H414 for a step
    that raises, H415 for a child that died, exceeded its limits, or was killed, most probably since
    the host's memory was short.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-forecast-") as name:
        folder = Path(name)
        limits = {"cpu_seconds": cpu_seconds, "idle_seconds": idle_seconds}
        answer = _answer(asdict(request), folder, on_progress, limits)
        traces = tuple(Trace.load(folder / file) for file in answer["files"])
    return TraceResult(
        traces=traces,
        route=request.route,
        assumptions=tuple(
            dict.fromkeys(assumption for trace in traces for assumption in trace.assumptions)
        ),
        trace_seconds=tuple(answer["trace_seconds"]),
        **{name: answer[name] for name in _FACTS},
    )


def _answer(
    asked: dict[str, Any],
    folder: Path,
    on_progress: Callable[[str], object],
    limits: dict[str, float],
) -> dict[str, Any]:
    """Run a child and return what it answers; raise what it says, or that it died."""
    done = ["starting"]

    def follow() -> None:
        for doing in (folder / DOING).read_text().split("\n")[len(done) - 1 : -1]:
            done.append(doing)
            on_progress(doing)

    (folder / REQUEST).write_text(json.dumps(asked))
    (folder / DOING).touch()
    with (folder / "stderr").open("wb") as printed, _child(folder, printed) as child:
        time_limits = TimeLimits(child.pid, **limits)
        while child.poll() is None:
            if (exceeded := time_limits.exceeded()) is not None:
                raise _died(exceeded, done[-1], folder)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_SECONDS)
            follow()
        status = child.returncode
    if status == 0 and (folder / ANSWER).exists():
        message = json.loads((folder / ANSWER).read_bytes())
        if "error" in message:
            raise _error_of(message["error"])
        return dict(message["answer"])
    how = (
        f"was ended by {signal.Signals(-status).name}"
        if status < 0
        else f"ended with exit code {status}"
    )
    if status == -signal.SIGKILL:
        raise _died("was killed", done[-1], folder, killed=True)
    raise _died(how, done[-1], folder)


@contextlib.contextmanager
def _child(folder: Path, printed: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child that finds its request in a folder, and let nothing of it remain."""
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


def _error_of(message: dict[str, str]) -> HoldfastError:
    error = getattr(errors, message.pop("kind"), PolicyError)(message.pop("what"), **message)
    assert isinstance(error, HoldfastError)
    return error


def _died(how: str, doing: str, folder: Path, *, killed: bool = False) -> HoldfastError:
    # Nothing but a lack of memory, or a person, kills it
    kind = OutOfMemoryError if killed else PolicyError
    return kind(
        f"the process that traces {how} while {doing}{_last_lines(folder)}",
        limit="it must live until the step is traced",
        fix=(
            "free memory here, or let build() make its model from a config instead of loading its"
            " weights."
            if killed
            else (
                "look at its last lines, and try build() and one step in a Python of your own; with"
                " a debugger's `faulthandler` on (PYTHONFAULTHANDLER=1) a crash says where it was."
            )
        ),
        rule="H415",
    )


def _last_lines(folder: Path) -> str:
    said = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    return (
        "" if not said else ". Its last lines:\n" + "\n".join(f"    {line}" for line in said) + "\n"
    )
