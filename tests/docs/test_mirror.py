"""The script of `docs/how-to/mirror.md` continues on a machine with an empty disk."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.docs.pages import DOCS, blocks
from tests.prepared import Prepared

(SCRIPT,) = [
    block.text for block in blocks(DOCS / "how-to" / "mirror.md") if block.title == "train.py"
]


def run(folder: Path, mirror: Path, epochs: int) -> list[str]:
    """Run the script up to some epoch in a folder that is a machine, and return what it prints."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.replace("max_epochs=4", f"max_epochs={epochs}"))
    with Prepared(["train.py", mirror], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    return output.splitlines()


def test_the_next_machine_continues_from_the_mirror(tmp_path: Path) -> None:
    """The first machine ends after two epochs of 30 steps, and takes its disk with it."""
    mirror = tmp_path / "mirror"
    assert run(tmp_path / "first", mirror, 2)[-1] == "ended at step 60"
    shutil.rmtree(tmp_path / "first")
    assert run(tmp_path / "second", mirror, 4) == ["continues at step 60", "ended at step 120"]
