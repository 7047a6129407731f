"""A process that reads from a loader with workers and is killed, or ends in a way that a script may
end.

    loader_parent.py MODE

MODE is what workers or the process do, after "served" for workers of a forkserver, or "threaded"
for a loader that is read in a thread. Prints the process ids of its workers once these are where
MODE wants them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

import torch

from holdfast.loader.loader import DataLoader

_QUIET = 8


class Samples:
    """Those behind the first few do what the mode says."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        what = self.mode.rpartition(" ")[2]
        if index >= _QUIET and what in {"looping", "sleeping", "stopped", "locked"}:
            time.sleep(0.2)  # until earlier batches are on their way
            if what == "looping":
                while True:
                    pass
            if what == "sleeping":
                time.sleep(1e6)
            if what == "locked":
                ctypes.PyDLL(None).sleep(10**6)  # no other thread of the worker runs meanwhile
            if what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
        return torch.zeros(3)


def main() -> None:
    mode = sys.argv[1]
    method = "forkserver" if mode.startswith("served") else "fork"
    iterator = iter(
        DataLoader(Samples(mode), batch_size=2, num_workers=2, multiprocessing_context=method)
    )
    next(iterator)
    # Later one that is stopped may be lost
    workers = [process.pid for process in multiprocessing.active_children()]
    for _ in range(_QUIET // 2 - 1):
        next(iterator)
    time.sleep(0.4)
    print(*workers, flush=True)
    if mode == "raising":
        raise ValueError("a mistake in the training loop")
    if mode == "leaving":
        # It is collected when the interpreter is on its way out
        globals()["left_behind"] = iterator
        return
    while True:
        time.sleep(1e6)


if __name__ == "__main__":
    if sys.argv[1].startswith("threaded"):
        thread = threading.Thread(target=main)
        thread.start()
        thread.join()  # Python 3.12 refuses to fork once the main thread has ended
    else:
        main()
