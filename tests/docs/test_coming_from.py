"""The programs of `docs/how-to/coming-from.md` run as they stand.

Both sides of each diff, and what is put inside.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, Block, blocks
from tests.prepared import FRAMEWORKS, run_prepared

pytestmark = pytest.mark.slow  # the frameworks take seconds to import
PAGE = DOCS / "how-to" / "coming-from.md"
NEEDS = {
    "from_lightning.py": "lightning.pytorch",
    "from_trainer.py": "transformers",
    "from_accelerate.py": "accelerate",
}


def _diffs() -> dict[str, list[Block]]:
    """Return the diffs by the program that they are of.

    A whole one, then those that apply to what was before.
    """
    found: dict[str, list[Block]] = {}
    for block in blocks(PAGE):
        if block.language == "diff":
            found.setdefault(block.title, []).append(block)
    return found


def _side(diff: str, mark: str) -> str:
    """Return a diff without the lines of the other mark, and without marks."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in (" ", mark))


def _accuracy(program: str, folder: Path) -> float:
    """Run a program beside `digits.py`, and return what it prints at its end."""
    folder.mkdir()
    for block in blocks(PAGE):
        if block.title == "digits.py":
            (folder / "digits.py").write_text(block.text)
    (folder / "train.py").write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = run_prepared(
        [folder / "train.py"], loaded=FRAMEWORKS, timeout=240, cwd=folder, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    return float(re.findall(r"^accuracy (\S+)$", ended.stdout, re.MULTILINE)[-1])


@pytest.mark.parametrize("name", _diffs())
def test_both_sides_of_a_diff_train(name: str, tmp_path: Path) -> None:
    """What was before learns the digits, and so does what is shown instead.

    Of Composer only the latter is run.
    """
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    whole = _diffs()[name][0].text
    for mark in "+" if name == "from_composer.py" else "-+":
        assert (
            _accuracy(_side(whole, mark), tmp_path / ("after" if mark == "+" else "before")) > 0.85
        ), mark


@pytest.mark.parametrize("name", NEEDS)
def test_what_is_put_inside_a_framework_trains_as_the_framework_alone(
    name: str, tmp_path: Path
) -> None:
    """Each change applies to the program from before, at one place, and the accuracy stays the
    same.
    """
    pytest.importorskip(NEEDS[name])
    whole, *inside = _diffs()[name]
    assert inside
    before = after = _side(whole.text, "-")
    for hunk in (hunk for diff in inside for hunk in diff.text.split("@@\n")):
        old, new = _side(hunk, "-"), _side(hunk, "+")
        assert after.count(old) == 1, old
        after = after.replace(old, new)
    torch_first = "import torch\ntorch.manual_seed(1)\n"  # the order of the samples too
    alone = _accuracy(torch_first + before, tmp_path / "before")
    assert _accuracy(torch_first + after, tmp_path / "after") == alone
