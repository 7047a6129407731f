"""Run the programs of a case, and explain what they left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from tests.prepared import WITHOUT_HOLDFAST, Prepared

from evals.failures.record import without_places
from evals.fixes import PROGRAMS, Case, Run
from evals.verdicts import judged

TIMEOUT_SECONDS = 200
_LINES_KEPT = 12  # of the end of an output

# What a process has imported from which a program is forked, by what the program imports.
_FRAMEWORKS = {
    "transformers": "transformers.trainer",
    "lightning": "lightning.pytorch",
    "accelerate": "accelerate",
}

# Functions that the commands in cases.yaml use.
#   with_tmpfs FOLDER SIZE COMMAND...  run a command that sees a file system of that size there
#   with_read_only FOLDER COMMAND...   run a command that cannot write there
#   with_memory MIB COMMAND...         run a command in a control group with that much memory
SHELL_FUNCTIONS = """
with_tmpfs() {
  mkdir -p "$1"
  unshare --user --map-root-user --mount bash -c '
    mount -t tmpfs -o size="$2" tmpfs "$1"; shift 2; exec "$@"' bash "$@"
}
with_read_only() {
  mkdir -p "$1"
  unshare --user --map-root-user --mount bash -c '
    mount -t tmpfs -o ro tmpfs "$1"; shift 1; exec "$@"' bash "$@"
}
with_memory() {
  group=/sys/fs/cgroup/memory$(grep :memory: /proc/self/cgroup | cut -d: -f3)/fixes-$$
  mkdir "$group"
  echo $(($1 << 20)) > "$group/memory.limit_in_bytes"
  shift
  bash -c 'echo $$ > "$0/cgroup.procs"; "$@"; exit $?' "$group" "$@"
  status=$?
  rmdir "$group"
  return $status
}
"""


def run_command(case: Case, command: str) -> Run:
    """Run one command of a case in a copy of its folder, and explain what it left."""
    with tempfile.TemporaryDirectory(prefix="fix-") as temporary:
        folder = Path(temporary, "work")
        shutil.copytree(PROGRAMS / case.name, folder)
        log = folder / "output.log"
        with log.open("wb") as output:
            status = _run(command, folder, output)
        text = log.read_text(encoding="utf-8", errors="replace")
        if case.explain == "output.log":
            cause, title, family = _explain_log(text, status, silent=case.silent)
        else:
            cause, title, family = _explain_run(folder / case.explain)
    return Run(output=_end_of(text, folder), status=status, cause=cause, title=title, family=family)


def _end_of(text: str, folder: Path) -> str:
    """Return the last lines of an output, without the paths of this machine."""
    text = without_places(text, str(folder))
    for place in (Path(sys.prefix).resolve(), Path(sys.prefix).parent):
        text = text.replace(str(place), "/home/user/holdfast")
    # The frames of the process that a program is forked from are not those of the program.
    text = text.rpartition('File "<frozen runpy>", line 88, in _run_code\n')[2]
    return "\n".join(text.splitlines()[-_LINES_KEPT:])


def _run(command: str, folder: Path, output: IO[bytes]) -> int:
    """Run a command in a folder, and return its exit status; 124 if it had to be killed."""
    with _start(command, folder, output) as process:
        try:
            return process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _start(command: str, folder: Path, output: IO[bytes]) -> subprocess.Popen[Any]:
    """Start a command.

    One that only starts a program is forked from a process that has imported torch, because the
    import takes longer than everything else.
    """
    options = {
        "cwd": folder,
        "env": _environment(),
        "stdin": subprocess.DEVNULL,
        "stdout": output,
        "stderr": subprocess.STDOUT,
        "start_new_session": True,
    }
    plain = re.fullmatch(r"python (\w+\.py)", command)
    if plain is None or not (folder / plain[1]).exists():
        return subprocess.Popen(["bash", "-c", SHELL_FUNCTIONS + command], **options)
    text = (folder / plain[1]).read_text(encoding="utf-8")
    frameworks = tuple(
        modules
        for name, modules in _FRAMEWORKS.items()
        if re.search(rf"^(?:from|import) {name}\b", text, re.MULTILINE)
    )
    return Prepared([folder / plain[1]], loaded=(*WITHOUT_HOLDFAST, *frameworks), **options)


def _environment() -> dict[str, str]:
    """Return the environment of the programs: one thread, and the commands of this Python."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _explain_log(text: str, status: int, *, silent: bool) -> tuple[str, str, str]:
    """Return cause, title and family of the verdict on a log.

    A failure must be recognized from the output alone and with the exit status: if these verdicts
    differ, the one that is returned is not the signature of the case.
    """
    verdict = judged(text, status)
    if status != 0 and not silent:
        bare = judged(text)
        if bare.cause != verdict.cause:
            return f"{bare.cause}, with the status {verdict.cause}", bare.title, bare.family
    return verdict.cause, verdict.title, verdict.family


def _explain_run(run: Path) -> tuple[str, str, str]:
    """Return cause, title and family of the verdict on a run directory."""
    answer = subprocess.run(
        [sys.executable, "-m", "holdfast", "explain", run, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    verdict = json.loads(answer.stdout)
    return verdict["cause"], verdict["title"], verdict["family"]
