"""A training step of a language model of 6.7 billion parameters, forecast on this machine.

Seconds and memory.

How: `forecast_transformers.llama_7b`, built from a config in bf16 with AdamW, samples of 2048
tokens. Traced are one and two samples; seconds are wall time on whatever else the machine does,
memory is the most that the tracing process had resident. Then the command `holdfast plan` makes its
whole table for one device, traces included.

To reach: a step traced in at most 10 s with at most 1 GiB of host memory on two cores, and a full
table in 60 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.forecast_transformers import find_transformers
from benchmarks.results_file import Result, read_options
from holdfast.core.errors import HoldfastError
from holdfast.forecast.job.tracing import TraceRequest, trace_job
from holdfast.forecast.trace.events import live_peak, owners_at_peak

_FACTORY = "benchmarks.forecast_transformers:llama_7b"
_QUICK_FACTORY = "benchmarks.forecast_models:encoder"
_DEVICE = "A100-80GB"
_MOST_TRACE_SECONDS, _MOST_HOST_GIB, _MOST_TABLE_SECONDS = 10.0, 1.0, 60.0
_ROOT = Path(__file__).parents[1]


def measure_traces(result: Result, factory: str, repetitions: int) -> None:
    """Trace one step in a fresh process, several times."""
    whole, of_trace, host = [], [], []
    for _ in range(repetitions):
        started = time.monotonic()
        found = trace_job(TraceRequest(factory=factory, sizes=(2,)))
        whole.append(time.monotonic() - started)
        of_trace.append(found.trace_seconds[0])
        host.append(found.host_bytes / 2**30)
    trace = found.traces[0]
    result.parameters |= {"parameters": found.parameters, "operations": len(trace.operation_name)}
    result.add_samples("one trace", "s", of_trace, at_most=_MOST_TRACE_SECONDS, digits=2)
    result.add_samples("the same with the start of the process and the build", "s", whole, digits=2)
    result.add_samples(
        "host memory of the tracing process", "GiB", host, at_most=_MOST_HOST_GIB, digits=3
    )
    held = {"all": live_peak(trace), **owners_at_peak(trace)}
    result.samples["GiB at the peak, 2 samples"] = {
        name: round(size / 2**30, 3) for name, size in held.items()
    }


def measure_table(result: Result, factory: str, repetitions: int) -> None:
    """Run the command that a user runs."""
    command = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "plan", factory]
    command += [
        "--device",
        _DEVICE,
        "--global-batch-size",
        "16",
        "--precision",
        "fp32,bf16",
        "--json",
    ]
    seconds, rows = [], 0
    for _ in range(repetitions):
        started = time.monotonic()
        ended = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False)
        seconds.append(time.monotonic() - started)
        rows = len(json.loads(ended.stdout).get("rows", ())) if ended.stdout.strip() else 0
    result.parameters |= {"device": _DEVICE, "rows of the table": rows}
    result.add_count("table with rows", int(rows > 0), 1, expected=1)
    result.add_samples("the whole table", "s", seconds, at_most=_MOST_TABLE_SECONDS, digits=1)


def main() -> None:
    """Measure and write the result."""
    options = read_options("forecast_large", __doc__ or "")
    repetitions = 1 if options.quick else 3
    factory = _QUICK_FACTORY if options.quick else _FACTORY
    result = Result(options=options, parameters={"factory": factory, "repetitions": repetitions})
    version, why = (None, "") if options.quick else find_transformers()
    result.notes += [f"transformers {version}"] if version is not None else [why] if why else []
    if not why:
        try:
            measure_traces(result, factory, repetitions)
            measure_table(result, factory, repetitions)
        except HoldfastError as error:
            result.notes.append(str(error))
            result.add_count("forecast", 0, 1, expected=1)
    result.write()


if __name__ == "__main__":
    main()
