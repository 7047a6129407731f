"""The lock of a file, as its holder and as others see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.lock import FileLock, LockHeldError, find_holder, is_locked

_TRY = """
import sys
from pathlib import Path
from holdfast.core.lock import FileLock, LockHeldError, is_locked

print(is_locked(Path(sys.argv[1])))
try:
    FileLock(Path(sys.argv[1])).acquire()
    print("taken")
except LockHeldError as error:
    print(error.holder.partition(" on ")[0])
"""


def _tried_by_another(path: Path) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", _TRY, str(path)], capture_output=True, text=True, check=True
    )
    return ended.stdout.splitlines()


def test_whoever_asks_its_own_process_for_the_lock_does_not_lose_it(tmp_path: Path) -> None:
    """Closing any descriptor of the file would release a POSIX lock.

    The holder is asked without opening it.
    """
    path = tmp_path / "lock"
    assert (is_locked(path), find_holder(path)) == (False, None)
    lock = FileLock(path)
    lock.acquire()
    with pytest.raises(LockHeldError):
        FileLock(path).acquire()
    assert is_locked(path)
    assert find_holder(path) is not None
    lock.hold()
    shown = _tried_by_another(path)
    assert shown[0] == "True"
    assert shown[1].startswith("process ")
    path.open().close()  # as a copy of the whole directory does
    assert _tried_by_another(path) == ["False", "taken"]  # another run, from its start to its end
    with pytest.raises(LockHeldError):
        lock.hold()
    lock.release()
    assert is_locked(path) is False
    assert _tried_by_another(path) == ["False", "taken"]
