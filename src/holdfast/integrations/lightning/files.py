"""Checkpoint files of Lightning that are whole or not there, that verify, and of which a good one
is always left.

Beside ``name.ckpt`` lies ``name.ckpt.manifest.json`` with its digest, which is written last.

Does not: decide when to save or what (Lightning's ``ModelCheckpoint`` and ``Trainer`` do).
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
from holdfast.integrations.protocol import Emit, attempt_save, load, log_event

load("lightning.pytorch")
from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402

NAME = re.compile(r"[^.].*\.ckpt")


def folder_of(trainer: Any) -> Path | None:
    """Return where the trainer's ``ModelCheckpoint`` saves; None without one."""
    folders = [
        each.dirpath for each in trainer.checkpoint_callbacks if getattr(each, "dirpath", None)
    ]
    return Path(folders[0]) if folders else None


def save_stopped(trainer: Any) -> None:
    """Save ``stopped-step=N.ckpt``, before Lightning ends after the batch at SIGTERM."""
    folder = folder_of(trainer) or Path(trainer.default_root_dir, "checkpoints")
    trainer.save_checkpoint(folder / f"stopped-step={trainer.global_step}.ckpt")


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Writes and reads Lightning's checkpoints.

    Local files only, others are Lightning's own affair.

    A save of weights or optimizer state with NaN or Inf is refused, and one that the disk refuses
    does not end training: both are said in the log. A file that does not verify is not loaded; the
    newest one beside it that does is taken instead. The last file that verifies is never removed.

    Args:
        emit: Called with each event, such as ``guard.emit``; None: they are logged.

    Example:
        ``Trainer(plugins=[VerifiedCheckpointIO()])``; a `HoldfastStrategy` has one already.
    """

    def __init__(self, emit: Emit | None = None) -> None:
        self.emit = emit

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a file, flush it, and seal it."""
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        bad = _spoiled(checkpoint)
        if bad:
            why = f"{len(bad)} tensor(s) hold NaN or Inf: {', '.join(bad[:5])}"
            (self.emit or log_event)(run_events.SaveRefused(checkpoint=target.name, why=why))
            return
        draft, plain = (
            target.with_name(f".tmp-{target.name}-{os.getpid()}"),
            super().save_checkpoint,
        )
        step = int(checkpoint.get("global_step", 0))

        def write() -> None:
            plain(checkpoint, draft)
            seal(draft, global_step=step, unix_seconds=time.time())
            manifest_beside(target).unlink(missing_ok=True)  # without one it was never finished
            for source, final in (
                (draft, target),
                (manifest_beside(draft), manifest_beside(target)),
            ):
                source.replace(final)
                fsync_path(target.parent)

        def undo() -> None:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
                manifest_beside(draft).unlink(missing_ok=True)

        attempt_save(write, target.name, None if target.name.startswith(".") else self.emit, undo)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load `verified`."""
        found: dict[str, Any] = super().load_checkpoint(self.verified(path), *args, **kwargs)
        return found

    def verified(self, path: Any) -> Any:
        """Return a file if it verifies, or the newest beside it that does.

        H307, if one cannot be read now.

        H312, if there is none, or if it is a link to a disk that is not there.
        """
        target = _local(path)
        if target is not None and (target.is_file() or target.is_symlink()):
            given = target.resolve() if target.is_file() else target

            def refused(each: Path, why: str) -> None:
                (self.emit or log_event)(
                    run_events.CheckpointDamaged(checkpoint=each.name, why=why)
                )

            good = newest_good([given, *_others(given)], refused)
            if good is not None and good != given:
                (self.emit or log_event)(
                    run_events.CheckpointInstead(checkpoint=good.name, of=target.name)
                )
            path = good
        return path

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file, unless it is the last one that verifies.

        Hidden ones are for the moment and always go.
        """
        target = _local(path)
        if target is None or not target.is_file() or target.is_symlink():
            super().remove_checkpoint(path)
            return
        passing = target.name.startswith(".")  # of Lightning's Tuner, which goes back to it once
        if not passing and is_sealed(target) and not any(map(_verifies, _others(target))):
            kept = run_events.CheckpointKept(
                checkpoint=target.name, why="no other in its folder verifies"
            )
            (self.emit or log_event)(kept)
            return
        super().remove_checkpoint(path)
        manifest_beside(target).unlink(missing_ok=True)


def _others(path: Path) -> list[Path]:
    """Return the other sealed checkpoints in a folder, newest first."""
    found = [
        each
        for each in path.parent.iterdir()
        if NAME.fullmatch(each.name) and each != path and not each.is_symlink() and is_sealed(each)
    ]
    return sorted(found, key=lambda each: each.stat().st_mtime_ns, reverse=True)


def _verifies(path: Path) -> bool:
    try:
        verify(path)
    except HoldfastError:
        return False
    return True


def _local(path: Any) -> Path | None:
    text = os.fspath(path)
    return None if "://" in text else Path(text)


def _spoiled(checkpoint: dict[str, Any]) -> list[str]:
    # A state dict does not say which are buffers, and masks and minima among them may be infinite
    # on purpose.
    weights = {
        name: each
        for name, each in checkpoint.get("state_dict", {}).items()
        if isinstance(each, torch.Tensor)
    }
    bad, _ = nonfinite_tensors(weights.items(), most=len(weights))
    moments, _ = nonfinite_tensors(_moments_of(checkpoint))
    return [*(name for name in bad if bool(torch.isnan(weights[name]).any())), *moments]


def _moments_of(checkpoint: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        for parameter, state in optimizer.get("state", {}).items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {number}: {key} of parameter {parameter}", value
