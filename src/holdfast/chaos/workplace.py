"""A place for each trial.

A fresh copy of the working directory, so that nothing of the user's is ever changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.core.errors import PolicyError

MOST_BYTES = 512 << 20
_LINKED_BYTES = 1 << 20
_LINKED = {".git", ".hg", ".venv", "venv", "node_modules"}
_CACHES = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
_NOT_COPIED = _LINKED | _CACHES


class Workplace:
    """Copies of a working directory, one at a time, always at the same path.

    With `writes`, only these paths, and files and folders of up to 1 MiB, are copied, and all else
    is linked; without, everything is copied, up to `MOST_BYTES`.

    All are made of one first copy, so that an edit meanwhile is in none of them.

    Args:
        origin: The working directory. It is read only.
        writes: What the training writes: paths in `origin`, or paths elsewhere that do not exist
            yet.

    Raises:
        PolicyError: H730 if there is too much to copy, or a path elsewhere is there already.
    """

    def __init__(self, origin: Path, writes: Sequence[Path]) -> None:
        self.origin = origin.resolve()
        paths = [(self.origin / each).resolve() for each in writes]
        self._inside = [each for each in paths if each.is_relative_to(self.origin)]
        self.elsewhere = [each for each in paths if not each.is_relative_to(self.origin)]
        self._links = bool(paths)
        for each in filter(Path.exists, self.elsewhere):
            raise PolicyError(
                f"{str(each)!r} exists",
                rule="H730",
                limit=(
                    "what a training writes outside of the working directory is removed between its"
                    " trials"
                ),
                fix=(
                    "let the command write to a path that does not exist yet, or into the working"
                    " directory."
                ),
            )
        if not writes and _size(self.origin) > MOST_BYTES:
            raise PolicyError(
                f"the working directory {str(self.origin)!r} holds more than"
                f" {MOST_BYTES >> 20} MiB",
                rule="H730",
                limit="each trial runs in a copy of it, so that nothing of yours is changed",
                fix=(
                    "name what the training writes, as in `--writes runs/`: then what else is large"
                    " is linked."
                ),
            )
        self.scratch = Path(tempfile.mkdtemp(prefix="holdfast-chaos-")).resolve()
        self.work, self.temporary, self.first = (
            self.scratch / name for name in ("work", "tmp", "first")
        )
        self.tops = (self.work, self.temporary, *self.elsewhere)

    def renew(self) -> None:
        """Make everything as it was before the first trial."""
        self.since = time.time()
        for path in self.tops:
            _remove(path)
        self.temporary.mkdir()
        if not self.first.exists():
            self._copy(self.origin, self.first)
        shutil.copytree(self.first, self.work, symlinks=True)

    def _copy(self, source: Path, target: Path) -> None:
        target.mkdir()
        for entry in os.scandir(source):
            path = Path(entry.path)
            written = any(path.is_relative_to(each) for each in self._inside)
            above = any(each.is_relative_to(path) for each in self._inside)
            if entry.name in _CACHES or path == self.scratch:
                continue
            if entry.is_symlink():
                self._link(path, target / entry.name)
            elif (
                entry.is_dir(follow_symlinks=False)
                and entry.name not in _LINKED
                and (written or above or not self._links or _size(path) <= _LINKED_BYTES)
            ):
                self._copy(path, target / entry.name)
            elif entry.is_file(follow_symlinks=False) and (
                written or not self._links or entry.stat().st_size <= _LINKED_BYTES
            ):
                shutil.copy2(path, target / entry.name)
            elif entry.is_dir() or entry.is_file():
                (target / entry.name).symlink_to(path.resolve())

    def _link(self, path: Path, target: Path) -> None:
        """Make a link as it was.

        One within the directory leads to the copy, any other still to its place.
        """
        place = Path(os.path.realpath(path))
        if place.is_relative_to(self.origin) and not _NOT_COPIED.intersection(
            place.relative_to(self.origin).parts
        ):
            place = self.work / place.relative_to(self.origin)
        target.symlink_to(place)

    def word(self, word: str) -> str:
        """Return a word of the command.

        What it names in the directory by its whole path is in the copy.
        """
        place = Path(os.path.realpath(Path(word).parent), Path(word).name)
        if not Path(word).is_absolute() or not place.is_relative_to(self.origin):
            return word
        within = place.relative_to(self.origin)
        return str(self.work / within) if _NOT_COPIED.isdisjoint(within.parts) else word

    def files(self) -> dict[Path, tuple[int, int]]:
        """Return size and time of change (ns) of each file that may have been written, temporary
        ones too.
        """
        found = {}
        for path in (path for top in self.tops for path in _files(top)):
            with suppress(OSError):
                found[path] = (path.lstat().st_size, path.lstat().st_mtime_ns)
        return found

    def close(self) -> None:
        """Remove every copy."""
        for path in (self.scratch, *self.elsewhere):
            _remove(path)


def _files(top: Path) -> Iterator[Path]:
    if top.is_file():
        yield top
    for folder, folders, names in os.walk(top):
        folders[:] = [each for each in folders if each not in _NOT_COPIED]
        yield from (path for name in names if not (path := Path(folder) / name).is_symlink())


def _size(top: Path) -> int:
    return sum(path.lstat().st_size for path in _files(top))


def _remove(path: Path) -> None:
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        if (mounted := Path(line.split()[4])).is_relative_to(path):
            raise PolicyError(
                f"the command has mounted something on {mounted}, and left it so",
                rule="H730",
                limit=(
                    "what it writes is removed between its trials, and what is mounted there might"
                    " be yours"
                ),
                fix=(
                    f"unmount it, remove {path}, and let the command unmount what it mounts, or"
                    " mount nothing."
                ),
            )
    if path.is_dir() and not path.is_symlink():
        for folder, folders, _ in os.walk(path):
            for each in (Path(folder) / name for name in folders):
                if not each.is_symlink():
                    with suppress(OSError):
                        each.chmod(0o700)  # or one that may not be entered would stay
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
