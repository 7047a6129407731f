"""The programs of `docs/how-to/unusual-loops.md` end with the same weights after two kills."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, blocks
from tests.prepared import Prepared

from holdfast.checkpoint.store import Store

FILES = {
    block.title: block.text for block in blocks(DOCS / "how-to" / "unusual-loops.md") if block.title
}
PROGRAMS = [
    ("two_loaders.py", "zipped"),
    ("two_loaders.py", "alternating"),
    ("growing_batch.py", ""),
    ("lookahead.py", ""),
    ("sam.py", ""),
]
SAVE_EVERY = 7


def start(folder: Path, name: str, argument: str) -> subprocess.Popen[str]:
    return Prepared(
        [name, *argument.split()],
        cwd=folder,
        env={
            **os.environ,
            "HOLDFAST_SAVE_INTERVAL_STEPS": str(SAVE_EVERY),
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint of the run in a folder, or 0."""
    steps = [
        entry.global_step
        for run in folder.glob("runs/*/checkpoints")
        for entry in Store(run).entries()
    ]
    return max(steps, default=0)


def kill_after_saving(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Kill a process with SIGKILL once it has saved a step, which must be before its end."""
    while newest_step(folder) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    output, _ = process.communicate(timeout=300)
    assert output == ""


def final_line(process: subprocess.Popen[str]) -> str:
    """Return the last line of a run, which has its steps and the sum of its weights."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return output.splitlines()[-1]


def slowed(text: str) -> str:
    """Return a program that is slow enough to be killed between two saves."""
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if line.startswith("for batch in guard.batches("):
            lines.append("    __import__('time').sleep(0.02)")
    assert len(lines) == len(text.splitlines()) + 1
    return "\n".join(lines) + "\n"


def killed_and_undisturbed(tmp_path: Path, name: str, argument: str, text: str) -> tuple[str, str]:
    """Return the last lines of a run that was killed twice, and of one that was not."""
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    (whole / name).write_text(text)
    (killed / name).write_text(slowed(text))

    expected = final_line(start(whole, name, argument))
    for step in (2 * SAVE_EVERY, 6 * SAVE_EVERY):
        kill_after_saving(start(killed, name, argument), killed, step)
    return final_line(start(killed, name, argument)), expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), PROGRAMS)
def test_a_program_that_is_killed_twice_ends_as_if_undisturbed(tmp_path, name, argument):
    """The sum of all weights is the same, digit for digit."""
    found, expected = killed_and_undisturbed(tmp_path, name, argument, FILES[name])

    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "argument", "right", "wrong"),
    [
        ("two_loaders.py", "zipped", 'state={"labelled": labelled},', ""),
        ("lookahead.py", "", "        self.steps = state", "        state"),
    ],
)
def test_a_program_that_leaves_a_part_out_ends_with_other_weights(
    tmp_path, name, argument, right, wrong
):
    """The comparison finds a part that the page says is needed, when that part is left out."""
    assert right in FILES[name]
    text = FILES[name].replace(right, wrong)

    found, expected = killed_and_undisturbed(tmp_path, name, argument, text)

    assert found != expected


@pytest.mark.slow
def test_a_sampler_whose_order_depends_on_the_process_is_refused(tmp_path):
    """The resumed run would read other batches, which is H604 before the first of them."""
    name = "growing_batch.py"
    text = slowed(FILES[name]).replace("self.seed + self.epoch", "__import__('os').getpid()")
    (tmp_path / name).write_text(text)
    kill_after_saving(start(tmp_path, name, ""), tmp_path, 6 * SAVE_EVERY)

    refused = start(tmp_path, name, "")

    assert "[H604]" in refused.communicate(timeout=300)[1]
    assert refused.returncode == 1
