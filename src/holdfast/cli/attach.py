"""`holdfast attach PID`: inspect a training process that was started without holdfast.

``supervise.watch.inspection`` performs the inspection; this module prints the result.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.nvidia_smi import nvidia_smi
from holdfast.cli.output import CHECK_FAILED, Json, failing_clearly, print_json, working
from holdfast.core.control_groups import memory_available_bytes, read_fields
from holdfast.core.text import as_json_value, counted, size
from holdfast.explain.hangs.blame import describe_frame
from holdfast.explain.hangs.frames import frame_to_show
from holdfast.supervise.watch.inspection import Inspection, inspect_process
from holdfast.supervise.watch.stack_phases import IMPORT_FILE, find_phase
from holdfast.supervise.watch.stack_text import describe_stacks
from holdfast.supervise.watch.stacks import stays_at_same_lines

# Matches consecutive frames of Python's import system. A stack may contain dozens of them, so they
# are printed as a single line.
_IMPORT_FRAMES = re.compile(rf'(?:  File "{IMPORT_FILE}.*\n)+')

_Pid = Annotated[
    int,
    typer.Argument(
        min=1,
        metavar="PID",
        help="PID of a running training process. Its child processes are inspected too.",
    ),
]
_Seconds = Annotated[
    float,
    typer.Option(min=1, max=600, metavar="SECONDS", help="Seconds between the two observations."),
]


def run(pid: _Pid, seconds: _Seconds = 3.0, as_json: Json = False) -> None:
    """Inspect a running training process: stack traces, memory and, if it hangs, the likely cause.

    The process is never changed. Exit code 1: the process did nothing between two observations.
    """
    with failing_clearly(as_json=as_json), tempfile.TemporaryDirectory() as folder:
        with working(f"observing process {pid} for {seconds:g} s"):
            inspection = inspect_process(pid, seconds, Path(folder))
        rows = _rows(inspection)
    if as_json:
        print_json(_as_json(pid, inspection, rows))
    else:
        _print_conclusion(inspection, seconds)
        _print_processes(inspection, rows)
        left_bytes = memory_available_bytes()
        left = "unknown" if left_bytes is None else size(left_bytes)
        typer.echo(f"memory available on this machine or in this container: {left}")
    raise typer.Exit(0 if inspection.is_moving else CHECK_FAILED)


def _rows(inspection: Inspection) -> list[dict[str, Any]]:
    """Return one row per process with its rank, state, CPU share, phase, stack and memory use."""
    device_bytes = _read_device_bytes()
    return [
        {
            "pid": process.pid,
            "rank": process.rank,
            "state": process.newest.state,
            "cpu_share": round(process.cpu_share, 3),
            "phase": find_phase(process),
            "stack": [
                describe_frame(frame) for frame in reversed(process.newest.main_thread.frames)
            ],
            "resident_bytes": _read_resident_bytes(process.pid),
            "device_bytes": device_bytes.get(process.pid),
        }
        for process in inspection.processes
    ]


def _read_resident_bytes(pid: int) -> int:
    kibibytes = read_fields(Path(f"/proc/{pid}/status")).get("VmRSS", 0)
    return 1024 * kibibytes


def _read_device_bytes() -> dict[int, int]:
    """Return the NVIDIA GPU memory that each process uses, in bytes, keyed by PID."""
    device_bytes = Counter[int]()
    for line in nvidia_smi("--query-compute-apps=pid,used_memory", ",nounits"):
        # In a container, the driver prints "[N/A]" instead of a number.
        with suppress(ValueError):
            pid, mebibytes = map(int, line.split(","))
            device_bytes[pid] += mebibytes << 20
    return device_bytes


def _as_json(pid: int, inspection: Inspection, rows: list[dict[str, Any]]) -> Any:
    verdict = None
    if _has_verdict(inspection):
        diagnosis = inspection.diagnosis
        verdict = {
            "kind": diagnosis.kind,
            "pid": diagnosis.process.pid,
            "frame": describe_frame(diagnosis.frame),
            "sentence": diagnosis.sentence,
            "certainty": diagnosis.certainty,
        }
    return as_json_value(
        {
            "pid": pid,
            "moves": inspection.is_moving,
            "activity": inspection.activity,
            "steps": inspection.steps,
            "verdict": verdict,
            "processes": rows,
        }
    )


def _has_verdict(inspection: Inspection) -> bool:
    """Return whether there is something to explain, because no progress was seen."""
    return inspection.activity in ("computing", "starved", "none")


def _print_conclusion(inspection: Inspection, seconds: float) -> None:
    """Print what the process did, and no more than two observations can show."""
    diagnosis = inspection.diagnosis
    certainty = f"[{diagnosis.kind}, {diagnosis.certainty}]"
    longer = f"--seconds {10 * seconds:g}"
    advice = ""
    match inspection.activity:
        case "recorded":
            conclusion = f"It is making progress: {_describe_progress(inspection, seconds)}."
        case "working":
            conclusion = f"It is working: {_describe_work(inspection, seconds)}."
        case "computing":
            conclusion = f"It is computing, but at one place. {diagnosis.explanation} {certainty}"
            advice = (
                "An endless loop and a long computation look the same; use"
                f" {longer} to see whether it gets any further."
            )
        case "starved":
            conclusion = (
                "It is waiting for a CPU, so whether it makes progress is not known."
                f" {diagnosis.explanation} {_describe_load()}"
            )
            advice = f"Use {longer} to observe it for longer."
        case "none":
            conclusion = f"It is doing nothing. {diagnosis.sentence} {certainty}"
            advice = (
                f"A step that waits longer than {seconds:g} s looks like a hang; use"
                f" {longer} to be sure."
            )
            if diagnosis.kind == "stopped":
                advice = f"`kill -CONT {diagnosis.process.pid}` continues it."
    typer.echo(f"{conclusion}\n{advice}".rstrip() + "\n")


def _describe_progress(inspection: Inspection, seconds: float) -> str:
    if inspection.steps:
        return f"{counted(inspection.steps, 'step')} in {seconds:g} s"
    newest = min(inspection.judged, key=lambda process: process.seconds)
    where = f" in the phase {newest.phase!r}" if newest.phase else ""
    return f"its records advance{where}, at step {newest.step}"


def _describe_work(inspection: Inspection, seconds: float) -> str:
    """Return what the processes used and moved, and when progress was last recorded."""
    cpu_seconds = seconds * sum(process.cpu_share for process in inspection.processes)
    words = f"{cpu_seconds:.1f} s of CPU time in {seconds:g} s"
    if not all(stays_at_same_lines(process) for process in inspection.judged):
        words += ", and its stack changes"
    recorded = [process for process in inspection.judged if process.phase]
    if recorded:
        oldest = max(recorded, key=lambda process: process.seconds)
        words += (
            f"; it last recorded progress {oldest.seconds:.0f} s ago, in the phase"
            f" {oldest.phase!r}, at step {oldest.step}"
        )
    return words


def _describe_load() -> str:
    cpus = len(os.sched_getaffinity(0))
    return f"The load average of this machine is {os.getloadavg()[0]:.1f}, with {cpus} CPUs."


def _print_processes(inspection: Inspection, rows: list[dict[str, Any]]) -> None:
    """Print the stacks of the judged processes and of the process that caused the hang, if any.

    The judged processes are those whose progress decides whether training makes progress. Every
    other process is described on a single line.
    """
    blamed_pid = inspection.diagnosis.process.pid if _has_verdict(inspection) else None
    for process, row in zip(inspection.processes, rows, strict=True):
        facts = _describe_facts(row)
        if process.judged or process.pid == blamed_pid:
            stacks = _IMPORT_FRAMES.sub("  (imports)\n", describe_stacks(process))
            typer.echo(f"{stacks}\nprocess {process.pid}: {facts}\n")
        else:
            frame = describe_frame(frame_to_show(process.newest.main_thread.frames))
            typer.echo(f"process {process.pid}: {facts}, at {frame}")


def _describe_facts(row: dict[str, Any]) -> str:
    facts = f"{row['phase']}, {size(row['resident_bytes'])} in memory"
    if row["device_bytes"]:
        facts += f", {size(row['device_bytes'])} on the device"
    return facts
