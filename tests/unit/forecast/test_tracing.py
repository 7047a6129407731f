"""Traces of small jobs through real child processes, and what is said when one cannot be traced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from holdfast.core.errors import BatchError, OutOfMemoryError, PolicyError
from holdfast.forecast.job.time_limits import TimeLimits
from holdfast.forecast.job.tracing import TraceRequest, TraceResult, trace_job
from holdfast.forecast.trace.events import OWNERS, live_peak
from holdfast.supervise.process_tree import read_process, read_table

FACTORIES = Path(__file__).with_name("forecast_factories.py")


def traced(name: str, **options: Any) -> TraceResult:
    return trace_job(TraceRequest(factory=f"{FACTORIES}:{name}", **options))


def bytes_of(trace: Any, owner: str) -> int:
    return int(
        trace.size_bytes[: len(trace.resident)][
            trace.owner[: len(trace.resident)] == OWNERS.index(owner)
        ].sum()
    )


def test_a_small_job_is_traced_on_the_fake_accelerator() -> None:
    """Two traces come back whose parameters, state and growth with the batch are those of the
    job.
    """
    said: list[str] = []
    request = TraceRequest(factory=f"{FACTORIES}:mlp", sizes=(2, 4, 6))
    # What this process holds is no part of what the job takes
    assert len(bytearray(b"x") * 2**30) == 2**30
    result = trace_job(request, said.append)
    assert result.route == "privateuse1"
    assert result.parameters == result.trainable_parameters == 64 * 256 + 256 + 256 * 10 + 10
    assert result.host_bytes < 2**30
    assert [trace.micro_batch_size for trace in result.traces] == [2, 4, 6]
    small, middle, large = result.traces
    for trace in result.traces:
        assert bytes_of(trace, "parameters") == 4 * result.parameters
        assert bytes_of(trace, "optimizer state") == 2 * 4 * result.parameters
        assert trace.growth_bytes == 0
        assert (trace.blocks, trace.route, trace.precision) == (("0", "3"), "privateuse1", "fp32")
    assert np.array_equal(small.events, large.events), "the same events at every size"
    assert np.array_equal(
        middle.size_bytes - small.size_bytes, large.size_bytes - middle.size_bytes
    )
    born = small.size_bytes[small.events[small.events > 0] - 1].tolist()
    assert born[2:6] == [
        2048,
        2048,
        512,
        2048,
    ], "linear, ReLU, and a dropout's mask before its result"
    assert "factory" in said[0]
    assert "6 samples (fp32)" in said[-1]


JOBS = ("mlp", "transformer", "lstm", "gan", "gan_by_guard")
RETURNED = ("own_step_of_a_size", "prints", "checkpointed")  # own batches, output and stdin


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
@pytest.mark.parametrize(
    ("name", "route", "precision"),
    [
        *((name, "privateuse1", "fp32") for name in (*JOBS, *RETURNED)),
        *((name, "cpu", "fp32") for name in ("lstm", "gan_by_guard")),
        *((name, "privateuse1", "bf16") for name in ("transformer", "lstm", "gan_by_guard", "gan")),
        *(("transformer", route, "fp16") for route in ("privateuse1", "cpu")),
    ],
)
def test_every_kind_of_job_is_traced_on_both_routes(name: str, route: str, precision: str) -> None:
    """Each job runs through, leaves nothing behind, and has the same events at every size."""
    result = traced(name, precision=precision, route=route)
    small, large = result.traces
    assert (result.route, small.growth_bytes, large.growth_bytes) == (route, 0, 0)
    assert np.array_equal(small.events, large.events)
    assert bytes_of(small, "parameters") == 4 * result.parameters
    assert live_peak(large) > live_peak(small)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
@pytest.mark.parametrize(
    ("name", "rule", "said"),
    yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())["jobs"],
)
def test_bad_input_is_refused_with_the_users_own_line(name: str, rule: str, said: str) -> None:
    """Each kind of mistake gives its own rule, and names what was found and where."""
    kinds = {"is_killed": OutOfMemoryError, "detached_loss": BatchError}
    with pytest.raises(kinds.get(name, PolicyError)) as caught:
        traced(name)
    assert caught.value.rule == rule
    assert said in caught.value.what


@pytest.mark.parametrize(
    ("name", "limits", "said"),
    [
        ("sleeps", {"idle_seconds": 1}, "for 1 s while building"),
        (
            "waits_for_a_child_that_sleeps",
            {"idle_seconds": 1},
            "for 1 s while building",
        ),
        ("computes", {"cpu_seconds": 1}, "1 s of CPU time"),
    ],
)
def test_a_child_that_takes_too_long_is_ended(name: str, limits: dict[str, Any], said: str) -> None:
    """A build that never returns is ended, there is no second attempt, and no process is left."""
    before = children_of(os.getpid())  # such as multiprocessing's resource tracker

    with pytest.raises(PolicyError) as caught:
        trace_job(TraceRequest(factory=f"{FACTORIES}:{name}"), **limits)

    assert caught.value.rule == "H415"
    assert said in caught.value.what
    assert set(children_of(os.getpid())) <= set(before)


class Watched:
    """A process whose time limits are looked at until it ends or exceeds them."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def exceeded(self, *, looks: int, **limits: float) -> str | None:
        time_limits = TimeLimits(self.process.pid, **limits)
        for _ in range(looks):
            time.sleep(0.1)
            if self.process.poll() is not None or (exceeded := time_limits.exceeded()) is not None:
                return exceeded
        return None


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Watched]]:
    """Return a function that starts a program; the limits are looked at more often than usual."""
    monkeypatch.setattr("holdfast.forecast.job.time_limits._INTERVAL_SECONDS", 0.05)
    programs: list[Watched] = []

    def start(code: str) -> Watched:
        programs.append(Watched(code))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import time; time.sleep(60)", id="it gets no CPU"),
        pytest.param("input()", id="it waits for data"),
    ],
)
def test_time_that_a_child_did_not_compute_is_not_cpu_time(watched: Any, code: str) -> None:
    """On a busy machine minutes pass while a trace computes for seconds: it may go on."""
    assert watched(code).exceeded(looks=10, cpu_seconds=0.3, idle_seconds=600) is None


def test_a_child_whose_own_child_computes_is_not_idle(watched: Any) -> None:
    """As a build that compiles an extension and waits for the compiler."""
    computes = "while True: pass"
    parent = watched(
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {computes!r}], timeout=60)"
    )
    try:
        assert parent.exceeded(looks=20, cpu_seconds=600, idle_seconds=1) is None
    finally:
        for pid in children_of(parent.process.pid):
            os.kill(pid, signal.SIGKILL)


def test_a_break_of_the_parent_does_not_end_its_child(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z stops both for an hour: when they go on, the child was not idle."""
    child = watched("import time; time.sleep(60)")
    limits = TimeLimits(child.process.pid, cpu_seconds=600, idle_seconds=600)
    now = time.monotonic()

    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)

    assert limits.exceeded() is None


def test_the_child_dies_with_its_parent() -> None:
    """A parent that is killed leaves no tracing process behind, even one that is stuck in user
    code.
    """
    code = (
        "import sys; from holdfast.forecast.job.tracing import TraceRequest, trace_job\n"
        "trace_job(TraceRequest(factory=sys.argv[1]), lambda doing: print(doing, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, f"{FACTORIES}:sleeps"], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if b"building" in line:
                break
        (child,) = children_of(parent.pid)
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not is_running(child):
            break
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    found = read_process(pid)
    return found is not None and found.state not in "ZX"


def children_of(pid: int) -> list[int]:
    return [
        each.pid for each in read_table().values() if each.ppid == pid and each.state not in "ZX"
    ]
