"""Ranks that are forked from one process which has loaded torch, meet over gloo, and must end in
time.

Forking saves each rank the seconds that an import of torch takes. What a rank returns or raises
comes back by a file: a pipe that a forked process holds open would make everybody wait for it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.ports import unused_port

# A rank that lives longer hangs: on a busy machine none takes a fifth of it, and what waits in a
# collective waits for half an hour.
_LIMIT_SECONDS = 240.0


@dataclass(slots=True)
class Ended:
    """How one rank ended."""

    returned: Any = None
    raised: str | None = None  # the type and the text
    exit_code: int | None = None
    seconds: float = 0.0
    output: str = ""

    def __repr__(self) -> str:
        return (
            f"exit {self.exit_code} after {self.seconds:.1f} s,"
            f" {self.raised or self.returned}\n{self.output}"
        )


def run_ranks(function: Callable[..., Any], world_size: int, *given: Any) -> list[Ended]:
    """Call a function of a module on each rank, as ``function(rank, *given)``.

    A rank that hangs fails the test.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "asked"), Path(folder, "ends")
        asked.write_bytes(pickle.dumps((function, world_size, given)))
        forks = _forks()
        assert forks.stdin is not None
        forks.stdin.write(f"{asked}\n".encode())
        forks.stdin.flush()
        while not answered.exists():
            assert forks.poll() is None, "the process that forks the ranks has ended"
            time.sleep(0.02)
        ends: list[Ended] = pickle.loads(answered.read_bytes())
    hung = {rank: end for rank, end in enumerate(ends) if end.exit_code is None}
    assert not hung, f"ranks hung: {hung}"
    return ends


@cache
def _forks() -> subprocess.Popen[bytes]:
    """Return the process that forks ranks; it ends with its input."""
    return subprocess.Popen([sys.executable, "-m", "tests.ranks.harness"], stdin=subprocess.PIPE)


def all_returned(ends: list[Ended]) -> list[Any]:
    """Return what the ranks returned, none of which raised."""
    assert [end.exit_code for end in ends] == [0] * len(ends), ends
    return [end.returned for end in ends]


def _fork(asked: Path) -> None:
    function, world_size, given = pickle.loads(asked.read_bytes())
    context, folder, port = multiprocessing.get_context("fork"), asked.parent, unused_port()
    began = time.monotonic()
    ranks = [
        context.Process(target=_rank, args=(function, rank, world_size, port, given, folder))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    ends = [Ended() for _ in ranks]
    while time.monotonic() < began + _LIMIT_SECONDS and any(end.exit_code is None for end in ends):
        time.sleep(0.02)
        for rank, end in zip(ranks, ends, strict=True):
            if end.exit_code is None and rank.exitcode is not None:
                end.exit_code, end.seconds = rank.exitcode, time.monotonic() - began
    for number, (rank, end) in enumerate(zip(ranks, ends, strict=True)):
        if end.exit_code is None:
            rank.kill()
        rank.join()
        end.output = (folder / f"output{number}").read_text(errors="replace")[-20_000:]
        if (folder / f"end{number}").exists():
            end.returned, end.raised = pickle.loads((folder / f"end{number}").read_bytes())
    (folder / "written").write_bytes(pickle.dumps(ends))
    (folder / "written").rename(folder / "ends")


def _rank(
    function: Any,
    rank: int,
    world_size: int,
    port: int,
    given: Any,
    folder: Path,
) -> None:
    import torch
    from torch import distributed

    output = os.open(folder / f"output{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(_LIMIT_SECONDS - 1.0)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    returned = raised = None
    try:
        returned = function(rank, *given)
    except BaseException as error:  # noqa: BLE001 - it is what the test looks at
        raised = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        if not isinstance(error, Exception) or "uncaught" in str(error):
            sys.excepthook(type(error), error, error.__traceback__)
    (folder / f"end{rank}").write_bytes(pickle.dumps((returned, raised)))
    os._exit(0 if raised is None else 1)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    import holdfast

    assert holdfast.Guard
    # The first one imports what takes a second
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.freeze()  # else each collection in each rank looks through all of torch
    from tests.ranks import harness  # what is pickled there has the name of that module

    for line in sys.stdin.buffer:
        harness._fork(Path(line.decode().strip()))
