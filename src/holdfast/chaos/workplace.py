"""The workplace of a trial, which is a fresh copy of the working directory.

The command runs only in such copies, so that it does not change the user's files.
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

# A larger working directory is an error unless the user names the paths that the script writes to,
# because every trial would copy the whole directory.
MAX_COPIED_BYTES = 512 << 20
# If the user names these paths, other files and folders larger than this are linked, not copied.
MAX_BYTES_TO_COPY = 1 << 20
# Folders that are often large and that no script writes to. They are always linked.
LINKED_FOLDERS = frozenset({".git", ".hg", ".venv", "venv", "node_modules"})
# Caches, which are neither copied nor linked, because programs can recreate them.
CACHE_FOLDERS = frozenset({"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
UNCOPIED_FOLDERS = LINKED_FOLDERS | CACHE_FOLDERS


class Workplace:
    """Makes copies of a working directory, one at a time, always at the same path.

    All copies are made from a first copy, so that the user can edit the original in the meantime.
    Without `writes`, everything is copied, up to a total of `MAX_COPIED_BYTES`. With `writes`, only
    these paths and small files and folders are copied, and everything else is linked.

    Args:
        origin: The working directory, which is never changed.
        writes: The paths that the script writes to. A path outside of `origin` must not exist yet.

    Raises:
        PolicyError: H730 if the working directory is too large, or if a path in `writes` that is
            outside of it already exists.
    """

    def __init__(self, origin: Path, writes: Sequence[Path]) -> None:
        self.origin = origin.resolve()
        paths = [(self.origin / path).resolve() for path in writes]
        self._written_inside = [path for path in paths if path.is_relative_to(self.origin)]
        self._written_elsewhere = [path for path in paths if not path.is_relative_to(self.origin)]
        self._links_large_files = bool(paths)
        self._check_paths_elsewhere()
        if not writes:
            self._check_size()
        self.scratch = Path(tempfile.mkdtemp(prefix="holdfast-chaos-")).resolve()
        self.work = self.scratch / "work"
        self.temporary = self.scratch / "tmp"
        self.first_copy = self.scratch / "first"
        # The folders (or files) that the script may write to.
        self.writable_folders = (self.work, self.temporary, *self._written_elsewhere)
        # The Unix time at which the current trial began.
        self.began = 0.0

    def _check_paths_elsewhere(self) -> None:
        for path in self._written_elsewhere:
            if path.exists():
                raise PolicyError(
                    f"{str(path)!r} already exists",
                    limit="files that the command writes outside of the working directory are"
                    " removed between trials",
                    fix="let the command write to a path that does not exist yet, or to the"
                    " working directory.",
                    rule="H730",
                )

    def _check_size(self) -> None:
        if _total_size(self.origin) > MAX_COPIED_BYTES:
            raise PolicyError(
                f"the working directory {str(self.origin)!r} is larger than"
                f" {MAX_COPIED_BYTES >> 20} MiB",
                limit="each trial runs in a copy of it, so that your files are not changed",
                fix="pass the paths that the command writes to, as in `--writes runs/`; other large"
                " files are then linked.",
                rule="H730",
            )

    def renew(self) -> None:
        """Replace the current copy with a fresh copy of the working directory for a new trial."""
        self.began = time.time()
        for path in self.writable_folders:
            _remove(path)
        self.temporary.mkdir()
        if not self.first_copy.exists():
            self._copy_folder(self.origin, self.first_copy)
        shutil.copytree(self.first_copy, self.work, symlinks=True)

    def word(self, word: str) -> str:
        """Return a word of the command as it must be when the command runs in the copy.

        An absolute path into the working directory becomes the corresponding path in the copy. Any
        other word is returned unchanged.
        """
        path = Path(word)
        if not path.is_absolute():
            return word
        # Resolve links only in the parents: a link in the last component is copied as a link.
        real_path = Path(os.path.realpath(path.parent), path.name)
        path_in_copy = self._path_in_copy(real_path)
        if path_in_copy is None:
            return word
        return str(path_in_copy)

    def original(self, path: Path) -> Path | None:
        """Return the first copy's version of a file, or None if the script created the file."""
        if not path.is_relative_to(self.work):
            return None
        original = self.first_copy / path.relative_to(self.work)
        return original if original.exists() else None

    def files(self) -> dict[Path, os.stat_result]:
        """Return all files in the folders that the script may write to, each with its status."""
        files = {}
        for top in self.writable_folders:
            for path in _files_below(top):
                # A leftover process may have removed the file in the meantime.
                with suppress(OSError):
                    files[path] = path.lstat()
        return files

    def close(self) -> None:
        """Remove the copies, and everything that the script has written to other paths."""
        for path in (self.scratch, *self._written_elsewhere):
            _remove(path)

    def _copy_folder(self, source: Path, target: Path) -> None:
        """Copy a folder without its caches, and link the entries that `_is_copied` excludes."""
        target.mkdir()
        for entry in os.scandir(source):
            path = Path(entry.path)
            if entry.name in CACHE_FOLDERS or path == self.scratch:
                continue
            target_path = target / entry.name
            if entry.is_symlink():
                self._copy_link(path, target_path)
            elif not entry.is_dir() and not entry.is_file():
                # Sockets, pipes and devices cannot be copied, so they are left out.
                continue
            elif not self._is_copied(entry):
                target_path.symlink_to(path.resolve())
            elif entry.is_dir():
                self._copy_folder(path, target_path)
            else:
                shutil.copy2(path, target_path)

    def _is_copied(self, entry: os.DirEntry[str]) -> bool:
        """Return whether a file or folder is copied rather than linked."""
        path = Path(entry.path)
        if entry.is_dir() and entry.name in LINKED_FOLDERS:
            return False
        if not self._links_large_files:
            return True
        if any(path.is_relative_to(written) for written in self._written_inside):
            return True
        if entry.is_file():
            return entry.stat().st_size <= MAX_BYTES_TO_COPY
        holds_written = any(written.is_relative_to(path) for written in self._written_inside)
        return holds_written or _total_size(path) <= MAX_BYTES_TO_COPY

    def _copy_link(self, path: Path, target: Path) -> None:
        """Create a copy of the symbolic link `path` at `target`.

        A link to a path in the working directory becomes a link into the copy. Other links keep
        their destination.
        """
        destination = Path(os.path.realpath(path))
        target.symlink_to(self._path_in_copy(destination) or destination)

    def _path_in_copy(self, path: Path) -> Path | None:
        """Return the path of the copy of a file, or None if the file is not copied."""
        if not path.is_relative_to(self.origin):
            return None
        relative_path = path.relative_to(self.origin)
        if UNCOPIED_FOLDERS.intersection(relative_path.parts):
            return None
        return self.work / relative_path


def _files_below(top: Path) -> Iterator[Path]:
    """Yield all files below a folder except links, or the path itself if it is a file."""
    if top.is_file():
        yield top
    for folder, subfolders, names in os.walk(top):
        subfolders[:] = [name for name in subfolders if name not in UNCOPIED_FOLDERS]
        for name in names:
            path = Path(folder) / name
            if not path.is_symlink():
                yield path


def _total_size(top: Path) -> int:
    return sum(path.lstat().st_size for path in _files_below(top))


def _remove(path: Path) -> None:
    """Remove a file or folder, unless a file system is mounted on it or below it.

    Raises:
        PolicyError: H730 if a file system is mounted on the path or below it.
    """
    _check_not_mounted(path)
    if path.is_dir() and not path.is_symlink():
        _make_folders_accessible(path)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _check_not_mounted(path: Path) -> None:
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        mount_point = Path(line.split()[4])
        if mount_point.is_relative_to(path):
            raise PolicyError(
                f"the command has left a file system mounted on {mount_point}",
                limit="the files of a trial are removed when it ends, and the mounted files may be"
                " yours",
                fix=f"unmount it and remove {path}. Then change the command so that it unmounts"
                " the file system before it ends, or mounts none.",
                rule="H730",
            )


def _make_folders_accessible(top: Path) -> None:
    """Make all folders below `top` accessible and writable, so that they can be removed."""
    for folder, subfolders, _ in os.walk(top):
        for name in subfolders:
            path = Path(folder) / name
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o700)
