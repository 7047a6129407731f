"""`holdfast attach PID`.

Where a training that was started without holdfast stands, and whether it moves.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import CHECK_FAILED, Json, failing_clearly, print_json, working
from holdfast.core.control_groups import fields_of, memory_available_bytes
from holdfast.core.errors import PolicyError
from holdfast.core.text import as_json_value, size
from holdfast.explain.evidence import is_own_code
from holdfast.explain.hangs.blame import Diagnosis, describe_frame, diagnose_hang
from holdfast.explain.hangs.classification import thread_to_blame
from holdfast.explain.hangs.evidence import Examined
from holdfast.explain.hangs.frames import is_in_backward, user_frame
from holdfast.supervise.process_tree import descendants, read_table
from holdfast.supervise.watch.process_evidence import is_python
from holdfast.supervise.watch.stacks import Stacks, Subject, describe, find_py_spy, is_same

Rows = list[dict[str, Any]]
_cannot = partial(PolicyError, rule="H741")
_WORKER = "makes batches"
# A wait: one that polls was seen to use up to 225,000 each time, a small step 1,000,000
_WORK_NANOSECONDS = 400_000
_IMPORT = "<frozen importlib"
_IMPORTING = re.compile(rf'(?:  File "{_IMPORT}.*\n)+')
_PHASES = {  # by what is on the stack of the main thread; the first that is there
    _WORKER: r":_worker_loop$",
    "data wait": r"/torch/utils/data/dataloader\.py:|/holdfast/loader/",
    "saving": (
        r"/torch/serialization\.py:|/torch/distributed/checkpoint/|/safetensors/|/holdfast/checkpoint/"
    ),
    "optimizer": r"/torch/optim/",
    "forward/backward": r"/torch/(?:autograd|nn)/|/torch/_tensor\.py:(?:\w+\.)?backward$",
}


def run(
    pid: Annotated[
        int, typer.Argument(min=1, help="Of a running training; what it has started is shown too.")
    ],
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Between the two looks.")] = 3.0,
    as_json: Json = False,
) -> None:
    """Show where a training stands that was started without holdfast.

    Stacks, memory, and why if it stands still.

    It is only looked at: not stopped, and not changed. Exit code 1: it stood still between the two
        looks.
    """
    with failing_clearly(as_json=as_json):
        subjects = _subjects(pid, seconds)
        heads = [each.about.pid for each in subjects if each.about.judged]
        worked = set[int]()  # threads

        def pause(_: float) -> None:  # what is counted in it is of nobody who looks
            before = {thread: counts for each in heads for thread, counts in _counts(each).items()}
            time.sleep(seconds)
            after = {thread: counts for each in heads for thread, counts in _counts(each).items()}
            worked.update(
                each for each in before.keys() & after if _has_worked(before[each], after[each])
            )

        with working(f"looking twice at process {pid}"), tempfile.TemporaryDirectory() as folder:
            found = Stacks(Path(folder), pause=pause).take(subjects).processes
        judged = [each for each in found if each.judged]
        if not judged:
            raise _cannot(
                f"process {pid} has ended",
                limit="nothing is left to look at",
                fix="see its own output.",
            )
        diagnosis, rows = diagnose_hang(found, judged[0].pid), _rows(found)
        # A loop that mostly waits is found in the same wait twice; what it has done meanwhile
        # tells.
        trains = {thread_to_blame(each).tid for each in judged if not is_in_backward(each)} | set(
            heads
        )
        fetches = any(
            each.io_rate > 0
            for each, row in zip(found, rows, strict=True)
            if row["phase"] == _WORKER
        )
        same = all(is_same(each, lambda frame: frame) for each in judged)
        moves = bool(worked & trains) or fetches or diagnosis.moving or not same
    if as_json:
        verdict = {
            "kind": diagnosis.kind,
            "pid": diagnosis.process.pid,
            "frame": describe_frame(diagnosis.frame),
            "sentence": diagnosis.sentence,
            "confidence": diagnosis.confidence,
        }
        said = {
            "pid": pid,
            "moves": moves,
            "verdict": None if moves else verdict,
            "processes": rows,
        }
        print_json(as_json_value(said))
    else:
        _print(found, rows, diagnosis, None if moves else seconds)
    raise typer.Exit(0 if moves else CHECK_FAILED)


def _print(
    found: Sequence[Examined], rows: Rows, diagnosis: Diagnosis, still: float | None
) -> None:
    """Print the verdict, all of a process that is judged or to blame, and a line of each other."""
    if still is None:
        typer.echo("It moves.\n")
    else:
        typer.echo(
            f"It stands still. {diagnosis.sentence} [{diagnosis.kind}, {diagnosis.confidence:.0%}]"
        )
        typer.echo(
            f"A step that takes longer than {still:g} s looks the same: --seconds {10 * still:g}"
            " tells more."
        )
        typer.echo()
    for each, row in zip(found, rows, strict=True):
        device = f", {size(row['device_bytes'])} on the device" if row["device_bytes"] else ""
        facts = f"{row['phase']}, {size(row['resident_bytes'])} in memory{device}"
        if each.judged or (still and each.pid == diagnosis.process.pid):
            stacks = _IMPORTING.sub("  (imports)\n", describe(each))
            typer.echo(f"{stacks}\nprocess {each.pid}: {facts}\n")
        else:
            typer.echo(
                f"process {each.pid}: {facts}, at"
                f" {describe_frame(user_frame(each.last.main.frames))}"
            )
    left = memory_available_bytes()
    typer.echo(
        "memory left on this machine or in this container:"
        f" {'unknown' if left is None else size(left)}"
    )


def _subjects(pid: int, seconds: float) -> list[Subject]:
    """Return the process and what it has started, of Python.

    Those whose progress counts are `judged`.
    """
    table = read_table()
    if pid not in table or table[pid].state in "ZX":
        raise _cannot(
            f"process {pid} is not there",
            limit="one that runs has stacks",
            fix="`ps aux` lists them.",
        )
    try:
        Path(f"/proc/{pid}/mem").open("rb").close()
    except PermissionError as error:
        fix = (
            "run this as its user or with sudo; in a container, start that with --cap-add"
            " SYS_PTRACE."
        )
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        fix += (
            " `sudo sysctl kernel.yama.ptrace_scope=0` allows it to all." if scope.exists() else ""
        )
        raise _cannot(
            f"no right to trace process {pid}", limit="its stack lies in its memory", fix=fix
        ) from error
    if not find_py_spy():
        fix = 'install the extra: pip install "torch-holdfast[stacks]".'
        raise _cannot(
            "py-spy is not installed", limit="it reads the stack of another process", fix=fix
        )
    pids = [each for each in (pid, *sorted(descendants(table, [pid]))) if is_python(each)]
    if not pids:
        name, fix = (
            Path(f"/proc/{pid}/comm").read_text().strip(),
            "`pgrep -af python` lists those that are.",
        )
        raise _cannot(
            f"process {pid} ({name}) is not Python", limit="nor is one that it has started", fix=fix
        )
    ranks = {each: rank for each in pids if (rank := _rank(each)) is not None}
    # What only starts others has it not
    torch = [each for each in pids if b"libtorch" in _proc(each, "maps")]
    heads = [each for each in ranks if ranks.get(table[each].ppid) != ranks[each]]
    heads = heads or [each for each in torch if table[each].ppid not in torch] or pids[:1]
    about = (
        Examined(
            pid=each,
            ppid=table[each].ppid,
            role="unobserved",
            rank=ranks.get(each),
            seconds=seconds if each in heads else 0.0,
            judged=each in heads,
        )
        for each in pids
    )
    return [Subject(about=each, observed=True) for each in about]


def _rank(pid: int) -> int | None:
    """Return the rank that a launcher gave a process, or None."""
    found = re.search(rb"(?:^|\0)RANK=(\d{1,9})\0", _proc(pid, "environ"))
    return int(found[1]) if found else None


def _proc(pid: int, name: str) -> bytes:
    """Return what the kernel says of a process; nothing of one that is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _counts(pid: int) -> dict[int, tuple[int, int, int]]:
    """Return what each thread of a process has read and written so far, its waits, and its CPU
    nanoseconds.
    """
    found = {}
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        moved, used = fields_of(folder / "io"), _proc(pid, f"task/{folder.name}/schedstat").split()
        waits = fields_of(folder / "status").get("voluntary_ctxt_switches", 0)
        found[int(folder.name)] = (
            moved.get("rchar", 0) + moved.get("wchar", 0),
            waits,
            int(used[0]) if used else 0,
        )
    return found


def _has_worked(before: Sequence[int], after: Sequence[int]) -> bool:
    """Say whether a thread did something between its waits.

    A lock has none, and one that polls just looks.
    """
    moved, waits, nanoseconds = (now - then for then, now in zip(before, after, strict=True))
    return moved != 0 or (waits > 1 and nanoseconds > _WORK_NANOSECONDS * waits)


def _rows(found: Sequence[Examined]) -> Rows:
    rows: Rows = []
    device = _device_bytes()
    for each in found:
        frames = each.last.main.frames
        places = [f"{frame.file}:{frame.function}" for frame in frames]
        called = takewhile(lambda frame: not is_own_code(frame), reversed(frames))
        found_in = [
            name
            for name, pattern in _PHASES.items()
            if any(re.search(pattern, place) for place in places)
        ]
        if any(_IMPORT in frame.file for frame in called):  # whatever it was that imports
            found_in.insert(0, "starting")
        rows.append(
            {
                "pid": each.pid,
                "rank": each.rank,
                "state": each.last.state,
                "cpu_share": round(each.cpu_share, 3),
                "phase": next(
                    iter(found_in), "in code of its own" if places else "phase not known"
                ),
                "stack": [describe_frame(frame) for frame in reversed(each.last.main.frames)],
                "resident_bytes": (
                    1024 * fields_of(Path(f"/proc/{each.pid}/status")).get("VmRSS", 0)
                ),
                "device_bytes": device.get(each.pid),
            }
        )
    return rows


def _device_bytes() -> dict[int, int]:
    """Return what each process holds on NVIDIA's devices, as far as nvidia-smi says it."""
    found = Counter[int]()
    for line in nvidia_smi("--query-compute-apps=pid,used_memory", ",nounits"):
        with suppress(ValueError):  # "[N/A]", in a container
            pid, mib = map(int, line.split(","))
            found[pid] += mib << 20
    return found


def nvidia_smi(query: str, form: str = "") -> list[str]:
    """Return the lines that the driver's program answers.

    None where there is no such program, or no device.
    """
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", query, f"--format=csv,noheader{form}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603 - ours
        return done.stdout.splitlines()
    return []
