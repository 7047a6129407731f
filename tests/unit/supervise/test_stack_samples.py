"""Which stack samples of a training loop count as Python code of the script."""

from __future__ import annotations

import pytest

from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.process_samples import ThreadSample
from holdfast.supervise.watch.loop_stacks import LoopStacks

SCRIPT = ("/home/me/train.py", 34, "train")
OWN_FUNCTION = ("/home/me/train.py", 12, "loss_fn")
GUARD = ("/env/lib/python3.11/site-packages/holdfast/guard/step/engine.py", 90, "step")
SAVE = ("/home/me/holdfast/src/holdfast/guard/saving/saves.py", 50, "save")
JSON = ("/usr/lib/python3.11/json/encoder.py", 200, "encode")


@pytest.mark.parametrize(
    ("stack", "is_of_the_script"),
    [
        ([SCRIPT], True),
        ([SCRIPT, JSON], True),
        ([SCRIPT, SAVE], False),
        ([SCRIPT, SAVE, JSON], False),
        ([SCRIPT, GUARD, OWN_FUNCTION], True),
    ],
)
def test_code_of_holdfast_is_not_blamed_on_the_script(
    stack: list[tuple[str, int, str]], is_of_the_script: bool
) -> None:
    """A save between two batches does not count, but a function that a guard calls does."""
    frames = tuple(Frame(file=file, line=line, function=name) for file, line, name in stack)
    stacks = LoopStacks(pid=1)

    stacks.add(ThreadSample(is_main=True, frames=frames, holds_gil=True))

    assert stacks.in_python == is_of_the_script
