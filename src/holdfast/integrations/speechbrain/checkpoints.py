"""SpeechBrain's checkpointer, with folders that are sealed when they are whole and verified before
they are loaded.

SpeechBrain writes ``CKPT.yaml`` first and the files after it, so an interrupted save looks like a
finished one. Here the folder is marked as unfinished before that; one that does not verify becomes
``damaged-CKPT+...``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.checkpoint.seal import begin, check, is_unfinished, seal
from holdfast.core.files import remove
from holdfast.integrations.protocol import (
    Emit,
    Framework,
    attempt_save,
    checkpoints_in,
    newest_checkpoint,
)

NAME = re.compile(r"CKPT.*")


class SealedCheckpoints(Framework):  # type: ignore[misc]
    """What is put before ``speechbrain.utils.checkpoints.Checkpointer`` among the bases."""

    checkpoints_dir: Path
    may_save: Callable[[], bool] = staticmethod(lambda: True)
    """Whether the present state may be saved."""
    emit: Emit | None = None
    """Takes events."""
    _refused = False

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save and seal; a state that is not finite is refused, and a disk that refuses does not
        end training.
        """
        there, found = set(self.folders()), []
        plain = super().save_checkpoint

        def write() -> None:
            found.append(plain(*args, **kwargs))
            seal(Path(found[0].path), global_step=len(there), unix_seconds=time.time())

        def undo() -> None:
            for draft in set(self.folders()) - there:
                remove(draft)

        self._refused = not self.may_save() or not attempt_save(write, "CKPT", self.emit, undo)
        return None if self._refused else found[0]

    def delete_checkpoints(self, **kwargs: Any) -> None:
        """Delete as asked, unless the newest save came to nothing; of those to keep, two at least.

        SpeechBrain keeps one within an epoch: were it damaged, there would be none to go back to.
        """
        if not self._refused:
            kwargs["num_to_keep"] = kwargs.get("num_to_keep", 1) and max(
                2, kwargs.get("num_to_keep", 1)
            )
            super().delete_checkpoints(**kwargs)

    def find_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Return the best checkpoint that verifies; those before it that do not are moved aside.

        Raises:
            CheckpointError: H312, if one was whole and none verifies, or if one is a link that
                leads nowhere.
            RunDirectoryError: H307, if one cannot be read now.
        """
        others = [path for path in self.folders() if is_unfinished(path) or not path.exists()]
        candidates = {Path(each.path): each for each in self.find_checkpoints(*args, **kwargs)}
        good = newest_checkpoint([*others, *candidates], self.emit)
        return None if good is None else candidates[good]

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load a checkpoint, verified (H311) unless it was written without holdfast."""
        check(Path(checkpoint.path))
        super().load_checkpoint(checkpoint)

    def _new_checkpoint_dirpath(self) -> Path:
        return self._begun(super()._new_checkpoint_dirpath())

    def _custom_checkpoint_dirpath(self, name: str) -> Path:
        return self._begun(super()._custom_checkpoint_dirpath(name))

    def _begun(self, folder: Path) -> Path:
        begin(folder)
        return folder

    def _list_checkpoint_dirs(self) -> list[Path]:
        # Half of a ``CKPT.yaml`` cannot be read, and would end every search.
        return [path for path in super()._list_checkpoint_dirs() if not is_unfinished(path)]

    def folders(self) -> list[Path]:
        """Return the folders of checkpoints, whatever is in them."""
        return checkpoints_in(Path(self.checkpoints_dir), NAME)


def sealed(checkpointer: Any) -> Any:
    """Let a checkpointer that exists seal and verify from now on, as recipes make theirs in
    YAML; return it.
    """
    kind = type(checkpointer)
    if not issubclass(kind, SealedCheckpoints):
        checkpointer.__class__ = type(f"Sealed{kind.__name__}", (SealedCheckpoints, kind), {})
    return checkpointer
