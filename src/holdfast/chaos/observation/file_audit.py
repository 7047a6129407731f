"""Record which files a process reads and writes, through Python's audit events."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.chaos.observation.shield import ScriptShield
from holdfast.chaos.observation.trace_writer import TraceWriter

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR

# The audit events of functions that change a folder, with the positions of the changed paths among
# the event's arguments. The event's last argument is either a descriptor of the folder to which the
# path is relative, or one of the values in `NO_FOLDER_DESCRIPTOR`.
PATHS_CHANGED = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "shutil.rmtree": (0,),
    "os.symlink": (1,),
    "os.link": (1,),
    "os.mkdir": (0,),
}
NO_FOLDER_DESCRIPTOR = (-1, None)


class FileAudit:
    """Records those accesses to files that matter to a trial.

    The following kinds of records are written to the trace:

    - ``outside``: a path outside of the workplace was written to (once for each path).
    - ``read``: before its first step, the script read a file that was written in this trial, such
      as a checkpoint to resume from (once for each path).
    - ``moved``: a saved checkpoint was renamed.

    Args:
        writable_folders: The folders that the script may write to.
        trial_began: The Unix time at which the trial began. Newer files were written in this trial.
        trace: The trace of this process.
        shield: Runs the observer's code without disturbing the script.
    """

    def __init__(
        self,
        writable_folders: Sequence[str],
        trial_began: float,
        trace: TraceWriter,
        shield: ScriptShield,
    ) -> None:
        self._writable_folders = tuple(f"{folder}/" for folder in writable_folders)
        self._trial_began = trial_began
        self._trace = trace
        self._shield = shield
        self.restart()

    def restart(self) -> None:
        """Forget all recorded paths. This method is called in a newly forked process."""
        self._written: set[str] = set()
        self._read: set[str] = set()
        self._saved: set[str] = set()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event. Python calls this hook for every audit event in this process."""
        if event == "open":
            self._on_open(*arguments)
        elif event == "os.truncate":
            self._on_change(arguments[0])
        elif event in PATHS_CHANGED and arguments[-1] in NO_FOLDER_DESCRIPTOR:
            # A path relative to a folder descriptor is ignored, because the path of that folder was
            # recorded when the folder was opened.
            if event == "os.mkdir" and os.path.isdir(arguments[0]):  # noqa: PTH112 - may be bytes
                return
            for position in PATHS_CHANGED[event]:
                self._on_change(arguments[position])
            if event == "os.rename":
                self._on_rename(arguments[0], arguments[1])

    def note_save(self, path: str) -> None:
        """Record that a checkpoint was saved to a path, even if no audit event has shown it."""
        self._saved.add(path)
        self._note_write(path)

    def _on_open(self, path: Any, _mode: Any, flags: Any) -> None:
        if isinstance(flags, int) and flags & WRITE_FLAGS:
            self._on_change(path)
        elif self._trace.steps_made == 0 and isinstance(path, (str, os.PathLike)):
            self._on_read(os.fspath(path))

    def _on_change(self, path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            self._shield.run(self._note_write, os.fsdecode(path))

    def _on_read(self, path: Any) -> None:
        may_be_in_workplace = not os.path.isabs(path) or path.startswith(self._writable_folders)  # noqa: PTH117
        if may_be_in_workplace and path not in self._read:
            self._shield.run(self._note_read, path)

    def _on_rename(self, source: Any, target: Any) -> None:
        source = os.path.realpath(source)
        if source in self._saved:
            target = os.path.realpath(target)
            self._saved.add(target)
            self._shield.run(self._trace.write, "moved", path=target, source=source)

    def _note_write(self, path: str) -> None:
        path = os.path.realpath(path)
        if path in self._written or f"{path}/".startswith(self._writable_folders):
            return
        self._written.add(path)
        self._trace.write("outside", path=path)

    def _note_read(self, path: Any) -> None:
        self._read.add(path)
        file = Path(os.path.realpath(path))
        if file.is_file() and file.stat().st_mtime > self._trial_began:
            self._trace.write("read", path=str(file))
