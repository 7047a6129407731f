"""Seal SpeechBrain's checkpoints when they are complete, and verify them before loading.

SpeechBrain writes ``CKPT.yaml`` first and the other files after it, so an interrupted save looks
complete. This module marks each folder as unfinished before SpeechBrain writes it, and seals it
afterwards. A folder that fails verification is renamed to ``damaged-CKPT+...``.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from holdfast.checkpoint.seal import begin, check, is_unfinished, seal
from holdfast.core.files import remove
from holdfast.guard.hosted import HostedGuard
from holdfast.integrations.hosting import Framework
from holdfast.integrations.saving import (
    Emit,
    attempt_save,
    checkpoints_in,
    newest_checkpoint,
    should_save,
)

CHECKPOINT_NAME = re.compile(r"CKPT.*")
# SpeechBrain keeps only one checkpoint within an epoch. Keeping two provides a fallback if the
# newest checkpoint is damaged.
_FEWEST_KEPT = 2


class SealedCheckpoints(Framework):  # type: ignore[misc]
    """Mixin for SpeechBrain's ``Checkpointer`` that seals checkpoints and verifies them."""

    checkpoints_dir: Path
    # The run's guard, or None while no guard is open.
    holdfast_guard: HostedGuard | None = None
    # Whether the newest save was refused or failed.
    _newest_save_failed = False

    def _holdfast_emit(self) -> Emit | None:
        """Return the function that records events, or None if events should be logged."""
        return None if self.holdfast_guard is None else self.holdfast_guard.emit

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save and seal a checkpoint. Return the checkpoint, or None if it was not saved.

        If the training state is not finite, roll back instead of saving. A disk error does not end
        training.
        """
        folders_before = set(self.folders())
        save_plain = super().save_checkpoint
        checkpoint: Any = None

        def write() -> None:
            nonlocal checkpoint
            checkpoint = save_plain(*args, **kwargs)
            # SpeechBrain does not count steps, so pass the checkpoint's number instead of the step.
            number = len(folders_before)
            seal(Path(checkpoint.path), global_step=number, unix_seconds=time.time())

        def undo() -> None:
            for draft in set(self.folders()) - folders_before:
                remove(draft)

        saved = should_save(self.holdfast_guard) and attempt_save(
            write, "CKPT", self._holdfast_emit(), undo
        )
        self._newest_save_failed = not saved
        return checkpoint if saved else None

    def delete_checkpoints(self, **kwargs: Any) -> None:
        """Delete checkpoints as SpeechBrain does, but keep at least two where it would keep one.

        All checkpoints are kept if the newest save was refused or failed.
        """
        if self._newest_save_failed:
            return
        num_to_keep = kwargs.get("num_to_keep", 1)
        if num_to_keep:
            num_to_keep = max(_FEWEST_KEPT, num_to_keep)
        kwargs["num_to_keep"] = num_to_keep
        super().delete_checkpoints(**kwargs)

    def find_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Return the best checkpoint that passes verification, or None if none was ever completed.

        Better checkpoints that fail verification are moved aside.

        Raises:
            CheckpointError: H312 if there is a complete checkpoint but none passes verification,
                or if a checkpoint is a broken link.
            RunDirectoryError: H307 if a checkpoint cannot be read at the moment.
        """
        # `find_checkpoints` does not list these folders, but they have to be moved aside or
        # reported too.
        incomplete = [
            folder for folder in self.folders() if is_unfinished(folder) or not folder.exists()
        ]
        candidates = {
            Path(candidate.path): candidate for candidate in self.find_checkpoints(*args, **kwargs)
        }
        best = newest_checkpoint([*incomplete, *candidates], self._holdfast_emit())
        return None if best is None else candidates[best]

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Verify a checkpoint and load it. A checkpoint written without holdfast is not verified.

        Raises:
            CheckpointError: H311 if the checkpoint fails verification.
        """
        check(Path(checkpoint.path))
        super().load_checkpoint(checkpoint)

    def _new_checkpoint_dirpath(self) -> Path:
        folder: Path = super()._new_checkpoint_dirpath()
        begin(folder)
        return folder

    def _custom_checkpoint_dirpath(self, name: str) -> Path:
        folder: Path = super()._custom_checkpoint_dirpath(name)
        begin(folder)
        return folder

    def _list_checkpoint_dirs(self) -> list[Path]:
        # Leave out unfinished folders. A truncated ``CKPT.yaml`` would make every search fail.
        return [path for path in super()._list_checkpoint_dirs() if not is_unfinished(path)]

    def folders(self) -> list[Path]:
        """Return the folders of all checkpoints, regardless of their contents."""
        return checkpoints_in(Path(self.checkpoints_dir), CHECKPOINT_NAME)


def seal_and_verify(checkpointer: Any) -> None:
    """Make an existing checkpointer seal and verify its checkpoints from now on.

    Recipes create checkpointers in YAML, where users cannot choose our class. Therefore, the class
    of the object is replaced with a subclass.
    """
    plain_class = type(checkpointer)
    if not issubclass(plain_class, SealedCheckpoints):
        checkpointer.__class__ = type(
            f"Sealed{plain_class.__name__}", (SealedCheckpoints, plain_class), {}
        )
