"""What it costs an unmodified script to run under ``holdfast run``.

CPU time of a step, and start-up.

How: a training loop on torch's loader with clipping and AdamW runs in one observed process; blocks
of steps alternate with the observer's hooks in place and taken away, in random order within each
pair, and CPU time is compared within each pair, so that noise from elsewhere hits both. The batch
is sized so that a plain step takes about 5 ms or 50 ms. A tiny model shows the fixed cost of a
step.

What the supervisor takes while a script trains is the CPU time of a long run beyond that of a short
one, without that of the script itself, for each second that the long one is longer.

Start-up: an interpreter that does nothing, and one that imports torch, with and without
observation, in turns; and the whole command ``holdfast run -- python`` against ``python``, from its
start until the first line of the script, by the clock and by CPU time.

To reach: median ratio <= 1.01 at 50 ms and <= 1.03 at 5 ms, start-up <= 0.3 s before user code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results_file import Result, read_options
from holdfast.supervise.launch.commands import make_observed_environment

_TIMED = (("mlp", 50.0, 1.01), ("conv", 50.0, 1.01), ("mlp", 5.0, 1.03), ("conv", 5.0, 1.03))
_STARTUP_SECONDS = 0.3
_SHORT_SECONDS = 4.0
_ROOT = Path(__file__).parents[1]
# When the first line of a script runs, and what was computed until then: by itself and, if asked,
# by its parent.
_NOW = """
import os, sys, time
now, used = time.monotonic(), time.process_time()
if sys.argv[1:]:
    fields = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()
    used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
print(now, used)
"""
# Steps of a known length: a supervisor reads boards and samples, whatever the model is.
_LOOP = """
import sys, time, torch
torch.set_num_threads(1)
layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
ends = time.monotonic() + float(sys.argv[1])
while time.monotonic() < ends:
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
used = time.process_time()
print("SCRIPT", used)
"""


def environment(run: Path | None) -> dict[str, str]:
    """Return the environment of a child, observed or not."""
    plain = {**os.environ, "OMP_NUM_THREADS": "1"}
    return plain if run is None else make_observed_environment(plain, run, 0)


def measure_steps(
    result: Result, run: Path, kind: str, milliseconds: float, pairs: int
) -> list[tuple[float, float]]:
    """Return the CPU seconds of plain and observed steps."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.run_overhead_script",
        kind,
        str(milliseconds),
        str(pairs),
    ]
    ended = subprocess.run(
        command,
        env=environment(run),
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    name = kind if kind == "tiny" else f"{kind}, {milliseconds:g} ms"
    result.parameters[name] = {"batch_size": found["batch_size"], "pairs": pairs}
    return [(plain, observed) for plain, observed in found["pairs"]]


def used_by(command: list[str], variables: Mapping[str, str], cwd: Path) -> tuple[float, str]:
    """Return the CPU seconds of a command and of all that it waited for, and what it printed."""
    before = os.times()
    ended = subprocess.run(
        command, env=variables, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True
    )
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return used, ended.stdout


def measure_startup(result: Result, folder: Path, pairs: int) -> None:
    for what, code in (
        ("an interpreter", "pass"),
        ("an interpreter that imports torch", "import torch"),
    ):
        added = []
        for _ in range(pairs):
            plain, _ = used_by([sys.executable, "-c", code], environment(None), folder)
            observed, _ = used_by([sys.executable, "-c", code], environment(folder), folder)
            added.append(1000 * (observed - plain))
        result.add_samples(
            f"start-up of {what}: CPU time added",
            "ms",
            added,
            at_most=1000 * _STARTUP_SECONDS,
            digits=1,
        )


def command_of_run(folder: Path, name: str) -> list[str]:
    """Return the beginning of a ``holdfast run`` command."""
    program = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run"]
    return [*program, "--run-dir", str(folder / name), "--quiet", "--"]


def measure_command(result: Result, folder: Path, pairs: int) -> None:
    """Measure the time until user code."""
    waits, computed = [], []
    for number in range(pairs):
        found = []
        for before, asks in (([], []), (command_of_run(folder, f"start{number}"), ["parent"])):
            started = time.monotonic()
            _, output = used_by(
                [*before, sys.executable, "-c", _NOW, *asks], environment(None), folder
            )
            now, used = map(float, output.split())
            found.append((now - started, used))
        waits.append(1000 * (found[1][0] - found[0][0]))
        computed.append(1000 * (found[1][1] - found[0][1]))
    most = 1000 * _STARTUP_SECONDS
    result.add_samples(
        "holdfast run: time added before user code", "ms", waits, at_most=most, digits=1
    )
    result.add_samples("holdfast run: CPU time added before user code", "ms", computed, digits=1)


def measure_supervisor(result: Result, folder: Path, pairs: int, seconds: float) -> None:
    """Measure what the supervisor computes while a script trains, and besides."""
    script = folder / "loop.py"
    script.write_text(_LOOP)
    shares, fixed = [], []
    for number in range(pairs):
        used = []
        for length in (_SHORT_SECONDS, seconds):
            name = f"loop{number}-{length:g}"
            command = [*command_of_run(folder, name), sys.executable, str(script), str(length)]
            total, output = used_by(command, environment(None), folder)
            line = next(line for line in output.splitlines() if line.startswith("SCRIPT"))
            used.append(total - float(line.split()[1]))
        share = (used[1] - used[0]) / (seconds - _SHORT_SECONDS)
        shares.append(100 * share)
        fixed.append(1000 * (used[0] - share * _SHORT_SECONDS))
    result.add_samples(
        "holdfast run: CPU time of the supervisor while a script trains", "%", shares, digits=2
    )
    result.add_samples(
        "holdfast run: CPU time of the supervisor for start, end and verdict", "ms", fixed, digits=1
    )


def main() -> None:
    options = read_options("run_overhead", __doc__ or "")
    pairs = 5 if options.quick else 100
    result = Result(options=options, parameters={"pairs": pairs})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        added = [
            1e6 * (observed - plain)
            for plain, observed in measure_steps(result, folder, "tiny", 0, pairs)
        ]
        result.add_samples("tiny: added to a step", "us", added, digits=1)
        for kind, milliseconds, at_most in _TIMED[:: 3 if options.quick else 1]:
            found = measure_steps(result, folder, kind, milliseconds, pairs)
            ratios = [observed / plain for plain, observed in found]
            title = f"{kind}, {milliseconds:g} ms"
            result.add_samples(
                f"{title}: CPU time of observed over plain", "ratio", ratios, at_most=at_most
            )
            result.add_samples(f"{title}: plain step", "ms", [1000 * plain for plain, _ in found])
        measure_startup(result, folder, 3 if options.quick else 20)
        measure_command(result, folder, 2 if options.quick else 12)
        measure_supervisor(
            result, folder, 1 if options.quick else 3, 10.0 if options.quick else 60.0
        )
    result.write()


if __name__ == "__main__":
    main()
