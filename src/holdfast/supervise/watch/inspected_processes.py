"""Choose the processes that ``holdfast attach`` inspects, and refuse what cannot be inspected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from holdfast.core.errors import PolicyError
from holdfast.explain.hangs.process_samples import ExaminedProcess
from holdfast.supervise.process_tree import ProcessStat, descendants, read_table
from holdfast.supervise.watch.process_evidence import is_python, read_proc_file
from holdfast.supervise.watch.py_spy import find_py_spy
from holdfast.supervise.watch.stacks import Subject

cannot_inspect = partial(PolicyError, rule="H741")


def find_subjects(pid: int, seconds: float) -> list[Subject]:
    """Return the processes to inspect: a process and its descendants, if they run Python.

    `ExaminedProcess.judged` is set for the processes whose progress decides whether training makes
    progress.

    Args:
        pid: PID of the process.
        seconds: Time between the two observations, which is also reported as the time without
            progress.

    Raises:
        PolicyError: H741 if the process cannot be inspected.
    """
    table = read_table()
    _check_exists(pid, table)
    _check_traceable(pid)
    _check_py_spy()
    candidates = [pid, *sorted(descendants(table, [pid]))]
    pids = [candidate for candidate in candidates if is_python(candidate)]
    if not pids:
        program = Path(f"/proc/{pid}/comm").read_text().strip()
        raise cannot_inspect(
            f"process {pid} ({program}) does not run Python",
            limit="nor does any of its descendants",
            fix="`pgrep -af python` lists processes that do.",
        )
    judged = _choose_judged(pids, table)
    return [
        Subject(
            process=ExaminedProcess(
                pid=candidate,
                ppid=table[candidate].ppid,
                role="unobserved",
                rank=_read_rank(candidate),
                seconds=seconds if candidate in judged else 0.0,
                judged=candidate in judged,
            ),
            runs_python=True,
        )
        for candidate in pids
    ]


def _check_exists(pid: int, table: dict[int, ProcessStat]) -> None:
    if pid not in table or table[pid].state in "ZX":
        raise cannot_inspect(
            f"no process with PID {pid}",
            limit="only a running process can be inspected",
            fix="`ps aux` lists the processes.",
        )


def _check_traceable(pid: int) -> None:
    try:
        Path(f"/proc/{pid}/mem").open("rb").close()
    except PermissionError as error:
        fix = (
            "run this as the user of the process, or with sudo; in a container, start the container"
            " with --cap-add SYS_PTRACE."
        )
        if Path("/proc/sys/kernel/yama/ptrace_scope").exists():
            fix += " `sudo sysctl kernel.yama.ptrace_scope=0` allows it for all processes."
        raise cannot_inspect(
            f"no permission to trace process {pid}",
            limit="the stack is read from the memory of the process",
            fix=fix,
        ) from error


def _check_py_spy() -> None:
    if not find_py_spy():
        raise cannot_inspect(
            "py-spy is not installed",
            limit="py-spy reads the stacks of other processes",
            fix="pip install py-spy",
        )


def _choose_judged(pids: Sequence[int], table: dict[int, ProcessStat]) -> list[int]:
    """Return the PIDs of the judged processes: the ranks or, without ranks, the users of torch.

    The children of a judged process are not judged. Neither is a launcher, because it has no rank
    and does not use torch. If no process uses torch, the first process is judged.
    """
    return _topmost_ranks(pids, table) or _topmost_torch_users(pids, table) or list(pids[:1])


def _topmost_ranks(pids: Sequence[int], table: dict[int, ProcessStat]) -> list[int]:
    """Return the PIDs of the ranks, without processes that inherited the rank of their parent."""
    ranks = {pid: _read_rank(pid) for pid in pids}
    return [
        pid
        for pid, rank in ranks.items()
        if rank is not None and ranks.get(table[pid].ppid) != rank
    ]


def _topmost_torch_users(pids: Sequence[int], table: dict[int, ProcessStat]) -> list[int]:
    """Return the PIDs of the processes that use torch although their parent does not."""
    torch_users = [pid for pid in pids if b"libtorch" in read_proc_file(pid, "maps")]
    return [pid for pid in torch_users if table[pid].ppid not in torch_users]


def _read_rank(pid: int) -> int | None:
    """Return the value of ``RANK`` in the environment of a process, or None if it is not set."""
    match = re.search(rb"(?:^|\0)RANK=(\d{1,9})\0", read_proc_file(pid, "environ"))
    return int(match[1]) if match else None
