"""Record a failure.

Run a program in an empty directory, and add what it left to ``recorded.jsonl``.

    python -m evals.failures.record shapes.head_of_another_size H965 --author F program.py

The program must end by its failure. It runs in a fresh process with `RLIMIT_DATA` of 4 GiB and
without core dumps. Paths of this machine are replaced by those of a user: ``/home/user/train.py``,
``/home/user/.venv``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from evals.failures import RECORDED, all_failures
from holdfast.explain.signatures import all_signatures

_MOST_BYTES = 4 << 30
_LONGEST_PROGRAM = 15  # lines that are kept beside its output
_MOST_OF_A_LOG = 16_000  # characters; of a longer one the beginning and the end


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="family and what fails, such as shapes.head_of_another_size")
    parser.add_argument("cause", help="id of the right signature; H1608: the exception itself")
    parser.add_argument("program", type=Path)
    parser.add_argument("--author", required=True, help="a letter")
    parser.add_argument(
        "--held-out", action="store_true", help="the author has not seen the signatures"
    )
    parser.add_argument(
        "--exception", default="", help="of H1608: the first line of the exception, if not the last"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    options = parser.parse_args()
    if options.cause not in all_signatures():
        parser.error(f"there is no signature {options.cause}")
    if any(each.name == options.name for each in all_failures()):
        parser.error(f"{options.name} is recorded already")
    log, status = run_program(options.program, timeout=options.timeout)
    if not status:
        parser.error("the program ended with status 0, so it did not fail")
    text = options.program.read_text(encoding="utf-8").strip()
    row = {
        "name": options.name,
        "author": options.author,
        "held_out": options.held_out,
        "cause": options.cause,
        **({"exception": options.exception} if options.exception else {}),
        "status": status,
        **({"program": text} if text.count("\n") < _LONGEST_PROGRAM else {}),
        "log": log,
    }
    with RECORDED.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(log)


def run_program(program: Path, *, timeout: float) -> tuple[str, int]:
    """Return what a program printed, without paths of this machine, and its exit code, negative for
    a signal.

    Raises:
        TimeoutError: it did not end in time, and was killed with its children.
    """
    with (
        tempfile.TemporaryDirectory(prefix="failure-") as folder,
        tempfile.TemporaryFile() as output,
    ):
        script = Path(folder, "train.py")
        script.write_bytes(program.read_bytes())
        child = subprocess.Popen(
            [sys.executable, script],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_limit,
        )
        try:
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{program} ran for {timeout:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        output.seek(0)
        return without_places(output.read().decode(errors="replace"), folder), status


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))


def without_places(log: str, folder: str) -> str:
    """Return a log with neutral paths in the place of those of this machine, and cut in its middle
    if it is long.

    Args:
        log: What the program printed.
        folder: In which it ran.
    """
    places = {
        folder: "/home/user",
        sys.prefix: "/home/user/.venv",
        sysconfig.get_path("stdlib"): "/usr/lib/python3.11",
        str(Path.home()): "/home/user",
    }
    for place, neutral in places.items():
        log = log.replace(place, neutral)
    if len(log) <= _MOST_OF_A_LOG:
        return log
    begin, end = (
        log[: _MOST_OF_A_LOG // 2].rpartition("\n")[0],
        log[-_MOST_OF_A_LOG // 2 :].partition("\n")[2],
    )
    return f"{begin}\n{end}"


if __name__ == "__main__":
    main()
