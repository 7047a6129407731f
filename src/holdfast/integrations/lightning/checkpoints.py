"""Seal and verify Lightning's checkpoint files, and never remove the last good file.

Each file ``name.ckpt`` has a manifest, ``name.ckpt.manifest.json``, which contains the file's
digest. The manifest is written last, so a file without a manifest is incomplete. Lightning's
``ModelCheckpoint`` and ``Trainer`` decide when to save and what to save.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.manifest import manifest_beside
from holdfast.checkpoint.newest import newest_good
from holdfast.checkpoint.seal import is_sealed, seal
from holdfast.checkpoint.verify import verify
from holdfast.core.durable import fsync_path
from holdfast.core.errors import HoldfastError
from holdfast.core.events import run_events
from holdfast.core.text import counted
from holdfast.integrations.refusals import load
from holdfast.integrations.saving import Emit, attempt_save, emit_or_log

load("lightning.pytorch")
from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402

CHECKPOINT_NAME = re.compile(r"[^.].*\.ckpt")
# The maximum number of non-finite tensors that an event names.
_MOST_NAMES = 5


def checkpoint_folder(trainer: Any) -> Path | None:
    """Return the folder where the trainer's ``ModelCheckpoint`` saves, or None if there is none."""
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if folder:
            return Path(folder)
    return None


def save_stopped(trainer: Any) -> None:
    """Save ``stopped-step=N.ckpt`` before Lightning ends training because of a signal."""
    folder = checkpoint_folder(trainer) or Path(trainer.default_root_dir, "checkpoints")
    trainer.save_checkpoint(folder / f"stopped-step={trainer.global_step}.ckpt")


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Checkpoint plugin that seals and verifies Lightning's checkpoints on local disks.

    - Weights or optimizer state with NaN or Inf are not saved, and a disk error does not end
      training. An event reports either case.
    - A file that fails verification is not loaded. The newest file in the same folder that passes
      is loaded instead.
    - The last file that passes verification is never removed.

    Remote paths are left to Lightning.

    Args:
        emit: Function that records events, such as ``guard.emit``. If None, events are logged.

    Example:
        ``Trainer(plugins=[VerifiedCheckpointIO()])``. A `HoldfastStrategy` includes this plugin.
    """

    def __init__(self, emit: Emit | None = None) -> None:
        self.emit = emit

    # --- Writing ---

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint file, flush it to disk and seal it, unless its state is not finite."""
        target = _local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        damaged = _nonfinite_names(checkpoint)
        if damaged:
            names = ", ".join(damaged[:_MOST_NAMES])
            why = f"{counted(len(damaged), 'tensor')} with NaN or Inf: {names}"
            emit_or_log(self.emit, run_events.SaveRefused(checkpoint=target.name, why=why))
            return
        draft = target.with_name(f".tmp-{target.name}-{os.getpid()}")
        write_plain = super().save_checkpoint

        def write() -> None:
            write_plain(checkpoint, draft)
            step = int(checkpoint.get("global_step", 0))
            seal(draft, global_step=step, unix_seconds=time.time())
            _publish(draft, target)

        def undo() -> None:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
                manifest_beside(draft).unlink(missing_ok=True)

        emit = None if _is_temporary(target) else self.emit
        attempt_save(write, target.name, emit, undo)

    # --- Reading ---

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the file, or a replacement if it fails verification; see `verified`."""
        return self.load_verified(self.verified(path), *args, **kwargs)

    def load_verified(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file without verifying it, because `verified` has returned it."""
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return checkpoint

    def verified(self, path: Any) -> Any:
        """Return a file if it passes verification, otherwise the newest in its folder that does.

        A path that is remote or does not exist is returned unchanged.

        Raises:
            CheckpointError: H312 if no file passes verification, or if the path is a broken link.
            RunDirectoryError: H307 if a file cannot be read at the moment.
        """
        target = _local_path(path)
        if target is None:
            return path
        if target.is_file():
            requested = target.resolve()
        elif target.is_symlink():
            requested = target
        else:
            return path

        def report_refused(checkpoint: Path, why: str) -> None:
            event = run_events.CheckpointDamaged(checkpoint=checkpoint.name, why=why)
            emit_or_log(self.emit, event)

        newest = newest_good([requested, *_other_checkpoints(requested)], report_refused)
        if newest is not None and newest != requested:
            event = run_events.CheckpointInstead(checkpoint=newest.name, of=target.name)
            emit_or_log(self.emit, event)
        return newest

    # --- Removing ---

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file, unless it is the last one in its folder that passes verification."""
        target = _local_path(path)
        if target is None or not target.is_file() or target.is_symlink():
            super().remove_checkpoint(path)
            return
        if _is_last_good(target):
            event = run_events.CheckpointKept(
                checkpoint=target.name, why="no other checkpoint in its folder passes verification"
            )
            emit_or_log(self.emit, event)
            return
        super().remove_checkpoint(path)
        manifest_beside(target).unlink(missing_ok=True)


def _publish(draft: Path, target: Path) -> None:
    """Rename a sealed draft to its final name, and then its manifest."""
    # A crash between the two renames is harmless, since a file without a manifest counts as
    # unfinished.
    manifest_beside(target).unlink(missing_ok=True)
    draft.replace(target)
    fsync_path(target.parent)
    manifest_beside(draft).replace(manifest_beside(target))
    fsync_path(target.parent)


def _is_temporary(path: Path) -> bool:
    """Return whether a file is hidden, as the temporary checkpoint of Lightning's ``Tuner`` is."""
    return path.name.startswith(".")


def _is_last_good(path: Path) -> bool:
    """Return whether a file may be the only checkpoint in its folder that passes verification.

    The file itself is not verified. It only has to be sealed.
    """
    if _is_temporary(path) or not is_sealed(path):
        return False
    return not any(map(_verifies, _other_checkpoints(path)))


def _other_checkpoints(path: Path) -> list[Path]:
    """Return the other sealed checkpoints in the same folder, newest first."""
    others = [
        file
        for file in path.parent.iterdir()
        if CHECKPOINT_NAME.fullmatch(file.name)
        and file != path
        and not file.is_symlink()
        and is_sealed(file)
    ]
    return sorted(others, key=lambda file: file.stat().st_mtime_ns, reverse=True)


def _verifies(path: Path) -> bool:
    try:
        verify(path)
    except HoldfastError:
        return False
    return True


def _local_path(path: Any) -> Path | None:
    """Return a path or URL as a local path, or None if it is a URL."""
    text = os.fspath(path)
    return None if "://" in text else Path(text)


# --- Health ---------------------------------------------------------------------------------------


def _nonfinite_names(checkpoint: dict[str, Any]) -> list[str]:
    """Return the names of tensors whose values must not be saved.

    These are weights and buffers with NaN, and optimizer state with NaN or Inf. Inf is allowed in
    the module's state dict because it may be intended there: the state dict also contains buffers,
    such as masks and running minimums.
    """
    weights = {
        name: value
        for name, value in checkpoint.get("state_dict", {}).items()
        if isinstance(value, torch.Tensor)
    }
    nonfinite_weights, _ = nonfinite_tensors(weights.items(), most=len(weights))
    names = [name for name in nonfinite_weights if bool(torch.isnan(weights[name]).any())]
    nonfinite_moments, _ = nonfinite_tensors(_optimizer_tensors(checkpoint))
    return [*names, *nonfinite_moments]


def _optimizer_tensors(checkpoint: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in the states of all optimizers, with a readable name."""
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        for parameter, state in optimizer.get("state", {}).items():
            if not isinstance(state, dict):
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {number}: {key} of parameter {parameter}", value
