"""SpeechBrain's checkpointer, with folders that are sealed when they are whole and verified before they are loaded.

SpeechBrain writes ``CKPT.yaml`` first and the files after it, so an interrupted save looks like a finished one. Here
the folder is marked as unfinished before that, and a manifest with digests comes last; a folder that does not verify
is renamed to ``damaged-CKPT+...``, where SpeechBrain does not look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.checkpoint.sealing import begin, check, is_unfinished, newest_good, remove_draft, seal, set_aside
from holdfast.checkpoint.store import paths_in
from holdfast.integrations.frameworks import tell


class SealedCheckpoints:
    """What is put before ``speechbrain.utils.checkpoints.Checkpointer`` among the bases."""

    checkpoints_dir: Path
    why_not: Callable[[], str | None] = staticmethod(lambda: None)
    """Says why the present state must not be saved, or None."""
    note: Callable[..., None] | None = None
    """Takes events."""
    _refused = False

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save and seal; a state that is not finite is refused, and a disk that refuses does not end training."""
        why = self.why_not()
        self._refused = why is not None
        if why is not None:
            tell(self.note, "save_refused", why=why)
            return None
        there = set(self._folders())
        try:
            found = super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]
            seal(Path(found.path), global_step=len(there), unix_seconds=time.time())
        except (OSError, RuntimeError) as error:  # torch's writer wraps what the disk said
            self._refused = True
            for draft in set(self._folders()) - there:
                remove_draft(draft)
            tell(self.note, "save_failed", error=f"{type(error).__name__}: {error}"[:500])
            return None
        if self.note is not None:
            self.note("saved", checkpoint=Path(found.path).name)
        return found

    def delete_checkpoints(self, **kwargs: Any) -> None:
        """Delete as asked, unless the save that this makes room for came to nothing; of those to keep, two at least.

        SpeechBrain keeps one within an epoch: were it damaged, there would be none to go back to.
        """
        if not self._refused:
            kwargs["num_to_keep"] = kwargs.get("num_to_keep", 1) and max(2, kwargs.get("num_to_keep", 1))
            super().delete_checkpoints(**kwargs)  # type: ignore[misc]

    def find_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Return the best checkpoint that verifies; those before it that do not are set aside.

        Raises:
            CheckpointError: H312, if one was whole and none verifies.
        """
        unfinished = [path for path in self._folders() if is_unfinished(path)]
        candidates = {Path(each.path): each for each in self.find_checkpoints(*args, **kwargs)}  # type: ignore[attr-defined]
        good, refused = newest_good([*unfinished, *candidates])
        for path, why in refused:
            tell(self.note, "checkpoint_damaged", why=why, kept=set_aside(path).name)
        return None if good is None else candidates[good]

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load a checkpoint, verified unless it was written without holdfast.

        Raises:
            CheckpointError: H311.
        """
        check(Path(checkpoint.path))
        super().load_checkpoint(checkpoint)  # type: ignore[misc]

    def _new_checkpoint_dirpath(self) -> Path:
        return self._begun(super()._new_checkpoint_dirpath())  # type: ignore[misc]

    def _custom_checkpoint_dirpath(self, name: str) -> Path:
        return self._begun(super()._custom_checkpoint_dirpath(name))  # type: ignore[misc]

    def _begun(self, folder: Path) -> Path:
        begin(folder)
        return folder

    def _list_checkpoint_dirs(self) -> list[Path]:
        # Half of a ``CKPT.yaml`` cannot be read, and would end every search.
        return [path for path in super()._list_checkpoint_dirs() if not is_unfinished(path)]  # type: ignore[misc]

    def _folders(self) -> list[Path]:
        return [
            path for path in paths_in(Path(self.checkpoints_dir)) if path.name.startswith("CKPT") and path.is_dir()
        ]


def sealed(checkpointer: Any) -> Any:
    """Let a checkpointer that exists seal and verify from now on, as recipes make theirs in YAML.

    Args:
        checkpointer: Of ``speechbrain.utils.checkpoints.Checkpointer`` or a class derived from it; it is changed.

    Returns:
        The same object.
    """
    kind = type(checkpointer)
    if not issubclass(kind, SealedCheckpoints):
        checkpointer.__class__ = type(f"Sealed{kind.__name__}", (SealedCheckpoints, kind), {})
    return checkpointer
