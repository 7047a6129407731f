"""Failures that only the end of the process tells: signals from outside and within, statuses without a word.

Those with a signature that looks at the status have nothing in their log that says why.
"""

from __future__ import annotations

from benchmarks.failures import failure


@failure("H1602", author="D", silent=True)
def killed_by_a_neighbour_while_training() -> None:
    import os
    import subprocess

    import torch

    killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {os.getpid()}"])
    model = torch.nn.Linear(4, 1)
    while True:
        model(torch.randn(8, 4)).square().mean().backward()
        killer.poll()


@failure("H1602", author="D", silent=True)
def kills_itself_from_a_thread() -> None:
    import os
    import signal
    import threading
    import time

    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(1_000):
        print(f"step {step} loss 0.5")
        time.sleep(0.05)


@failure("H1603", author="D", silent=True)
def stopped_by_a_scheduler_during_a_step() -> None:
    import os
    import subprocess
    import time

    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -TERM {os.getpid()}"])
    while True:
        print("epoch 1 loss 0.25")
        time.sleep(0.1)


@failure("H1603", author="D", silent=True)
def handler_of_sigterm_that_restores_the_default() -> None:
    import os
    import signal

    def handler(number: int, _: object) -> None:
        print("saving before the end")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)


@failure("H1613", author="D", silent=True)
def terminal_was_closed() -> None:
    import os
    import signal

    print("epoch 3 loss 0.1")
    os.kill(os.getpid(), signal.SIGHUP)


@failure("H1606", author="D", silent=True)
def memory_map_of_a_file_that_was_cut() -> None:
    import mmap
    import os
    from pathlib import Path

    with Path("features.bin").open("wb+") as file:
        file.write(bytes(1 << 20))
        file.flush()
        data = mmap.mmap(file.fileno(), 1 << 20)
        os.ftruncate(file.fileno(), 0)
        print(data[1 << 19])


@failure("H1606", author="D", silent=True, needs="numpy")
def array_of_a_data_set_that_is_written_anew() -> None:
    import os

    import numpy as np

    np.save("samples.npy", np.zeros((512, 512)))
    samples = np.load("samples.npy", mmap_mode="r")
    os.truncate("samples.npy", 128)
    print(samples.sum())


@failure("H1607", author="D", silent=True)
def error_is_swallowed_and_the_status_is_3() -> None:
    import sys

    try:
        {}["model"]
    except KeyError:
        sys.exit(3)


@failure("H1607", author="D", silent=True)
def leaves_at_once_without_a_word() -> None:
    import os

    print("epoch 1 done")
    os._exit(5)


@failure("H1607", author="D", silent=True)
def check_of_a_result_that_only_returns_a_status() -> None:
    import sys

    import torch

    loss = torch.nn.functional.mse_loss(torch.zeros(3), torch.ones(3))
    sys.exit(0 if loss < 0.5 else 1)


@failure("H1614", author="D", silent=True)
def processor_time_is_used_up() -> None:
    import resource

    import torch

    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 2, resource.RLIM_INFINITY))
    while True:
        torch.randn(64, 64) @ torch.randn(64, 64)


@failure("H1608", author="D")
def exception_of_the_programs_own() -> None:
    class CurriculumExhausted(Exception):  # noqa: N818 - as users name them
        pass

    class Curriculum:
        def next_lesson(self) -> str:
            raise CurriculumExhausted("lesson 4 follows lesson 3, but there are 3")

    Curriculum().next_lesson()


@failure("H1608", author="D")
def contract_of_a_library_is_broken() -> None:
    class VocabularyMismatch(LookupError):  # noqa: N818
        def __str__(self) -> str:
            return f"tokenizer says {self.args[0]}, model says {self.args[1]}"

    raise VocabularyMismatch(32_000, 32_064)
