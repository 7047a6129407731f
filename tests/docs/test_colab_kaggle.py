"""The cells of `docs/how-to/colab-kaggle.md` continue a run in a real Jupyter kernel."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import DOCS, blocks

pytest.importorskip("ipykernel")
client = pytest.importorskip("jupyter_client")

CELLS = {block.title: block.text for block in blocks(DOCS / "how-to" / "colab-kaggle.md")}
SECONDS = 300
DIGEST = """
import hashlib
state = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
print(hashlib.sha256(state).hexdigest())
"""
# Something to wait for, and time to interrupt.
SLOWER = """
import pathlib, time
step = guard.step
def slow(*arguments):
    step(*arguments)
    pathlib.Path("step").write_text(str(guard.global_step))
    time.sleep(0.05)
guard.step = slow
"""


class Kernel:
    """A kernel in a folder; `run` executes a cell and returns what it printed and raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager: Any = client.KernelManager(kernel_name="python3")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["HOLDFAST_SAVE_INTERVAL_STEPS"] = "10"
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(SECONDS)

    def run(self, code: str, disturb: Callable[[], None] | None = None) -> tuple[str, str]:
        """Return the output and the name of the error, ``"dead"`` if the kernel has died."""
        message = self.client.execute(code)
        if disturb is not None:
            self.wait_for_step(15)
            disturb()
        output = ""
        error = ""
        while True:
            if not self.manager.is_alive():
                return output, "dead"
            try:
                reply = self.client.get_iopub_msg(timeout=0.2)
            except Exception:  # noqa: BLE001 - nothing was printed meanwhile
                continue
            content = reply["content"]
            if reply["parent_header"].get("msg_id") != message:
                continue
            if reply["msg_type"] == "stream" and content["name"] == "stdout":
                output += content["text"]
            elif reply["msg_type"] == "error":
                error = content["ename"]
            elif content.get("execution_state") == "idle":
                return output, error

    def wait_for_step(self, step: int) -> None:
        for _ in range(SECONDS * 100):
            file = self.folder / "step"
            if file.exists() and int(file.read_text() or 0) >= step:
                return
            time.sleep(0.01)
        raise TimeoutError(f"step {step} was never made")

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def interrupt_twice(self) -> None:
        self.interrupt()
        # Signals within 0.1 s count as one.
        time.sleep(0.2)
        self.interrupt()

    def kill(self) -> None:
        os.kill(self.manager.provisioner.pid, signal.SIGKILL)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[Callable[[], Kernel]]:
    """Start kernels in one folder, and end them after the test."""
    started: list[Kernel] = []

    def start() -> Kernel:
        started.append(Kernel(tmp_path))
        return started[-1]

    yield start
    for kernel in started:
        kernel.close()


def undisturbed(kernel: Kernel) -> str:
    """Return the digest of the weights of a run that nothing disturbs."""
    kernel.run("RUN = 'runs/undisturbed'")
    for cell in ("cell 2", "cell 3", "cell 4"):
        _, error = kernel.run(CELLS[cell])
        assert error == ""
    return kernel.run(DIGEST)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells", [["cell 4"], ["cell 3", "cell 4"], ["cell 2", "cell 3", "cell 4"]]
)
def test_an_interrupted_run_continues_when_its_cells_are_run_again(kernels, cells):
    """One interrupt loses no step, whichever of the cells are run again."""
    kernel = kernels()
    expected = undisturbed(kernel)
    kernel.run("RUN = 'runs/interrupted'")
    kernel.run(CELLS["cell 2"])
    kernel.run(CELLS["cell 3"] + SLOWER)

    output, error = kernel.run(CELLS["cell 4"], kernel.interrupt)
    assert error == "KeyboardInterrupt"
    step = int(kernel.run("print(guard.global_step)")[0])
    assert 15 <= step < 120

    for cell in cells:
        output, error = kernel.run(CELLS[cell])
        assert error == ""
        if cell == "cell 3":
            assert output == f"continues at step {step}\n"
    assert output == "ended at step 120\n"
    assert kernel.run(DIGEST)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("cells", [["cell 4"], ["cell 2", "cell 3", "cell 4"]])
def test_a_second_interrupt_ends_the_loop_and_not_the_kernel(kernels, cells):
    """The kernel keeps its variables, and the run still ends with the undisturbed weights."""
    kernel = kernels()
    expected = undisturbed(kernel)
    kernel.run("RUN = 'runs/twice'")
    kernel.run(CELLS["cell 2"])
    # The second interrupt arrives in the body of the loop, which no boundary ends by then.
    kernel.run(CELLS["cell 3"] + SLOWER.replace("0.05", "0.05 if guard.global_step < 15 else 30"))

    _, error = kernel.run(CELLS["cell 4"], kernel.interrupt_twice)
    assert error == "KeyboardInterrupt"

    kernel.run("guard.step = step")
    for cell in cells:
        output, error = kernel.run(CELLS[cell])
        assert error == ""
    assert output == "ended at step 120\n"
    assert kernel.run(DIGEST)[0] == expected


@pytest.mark.slow
def test_a_killed_kernel_and_a_copied_run_continue_in_a_new_kernel(kernels):
    """After SIGKILL all cells are run again, with the copy that Kaggle gives as an input."""
    kernel = kernels()
    expected = undisturbed(kernel)
    kernel.run("RUN = 'input'")
    kernel.run(CELLS["cell 2"])
    kernel.run(CELLS["cell 3"] + SLOWER)
    assert kernel.run(CELLS["cell 4"], kernel.kill)[1] == "dead"

    kernel = kernels()
    first = CELLS["cell 1, Kaggle"]
    first = first.replace("/kaggle/working/runs", "runs")
    first = first.replace("/kaggle/input/my-notebook/runs/digits", "input")
    output = []
    for cell in (first, CELLS["cell 2"], CELLS["cell 3"], CELLS["cell 4"]):
        output += kernel.run(cell)
    assert int(output[4].split()[-1]) in (10, 20, 30)
    assert output[5:] == ["", "ended at step 120\n", ""]
    assert kernel.run(DIGEST)[0] == expected


@pytest.mark.slow
def test_the_cell_of_the_guard_may_be_run_twice(kernels):
    """The open guard that its variable still refers to gives way; in a loop it does not."""
    kernel = kernels()
    kernel.run("RUN = 'runs/again'")
    kernel.run(CELLS["cell 2"])
    assert kernel.run(CELLS["cell 3"]) == ("continues at step 0\n", "")
    assert kernel.run(CELLS["cell 3"]) == ("continues at step 0\n", "")

    assert kernel.run("batches = guard.batches(max_epochs=1); batch = next(batches)")[1] == ""
    assert kernel.run(CELLS["cell 3"])[1] == "RunDirectoryError"
