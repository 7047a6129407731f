"""Checkpoint files of Lightning that are whole or not there, that verify, and of which a good one is always left.

Beside ``name.ckpt`` lies ``name.ckpt.sha256``, which ``sha256sum -c`` reads too; it is written last.

Does not: decide when to save or what (Lightning's ``ModelCheckpoint`` and ``Trainer`` do).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.sealing import extents_of
from holdfast.core.durable import fsync_path, replace_file
from holdfast.core.errors import CheckpointError
from holdfast.integrations.frameworks import load, tell

load("lightning.pytorch")
from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402

_SEAL = ".sha256"


def save_when_stopped(trainer: Any, exception: BaseException) -> None:
    """Save a checkpoint if this exception is Lightning's way to end after SIGTERM; the batch was finished by then.

    It lies beside those of the trainer's ``ModelCheckpoint``, as ``stopped-step=N.ckpt``.

    Args:
        trainer: Its state is saved.
        exception: That ends training.
    """
    if isinstance(exception, SIGTERMException):
        folders = [each.dirpath for each in trainer.checkpoint_callbacks if getattr(each, "dirpath", None)]
        folder = Path(folders[0] if folders else Path(trainer.default_root_dir, "checkpoints"))
        trainer.save_checkpoint(folder / f"stopped-step={trainer.global_step}.ckpt")


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Writes and reads Lightning's checkpoints; local files only, others are Lightning's own affair.

    A save of weights or optimizer state with NaN or Inf is refused, and one that the disk refuses does not end
    training: both are said in the log. A file that does not verify is not loaded; the newest one beside it that does
    is taken instead. The last file that verifies is never removed.

    Args:
        note: Called with each event, such as ``guard.note``.

    Example:
        ``Trainer(plugins=[VerifiedCheckpointIO()])``; a `HoldfastStrategy` has one already.
    """

    def __init__(self, note: Callable[..., None] | None = None) -> None:
        self.note = note

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, flush it, and seal it.

        Args:
            checkpoint: As Lightning gathered it.
            path: Where to.
            storage_options: As Lightning has it.
        """
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        bad = _spoiled(checkpoint)
        if bad:
            why = f"{len(bad)} tensor(s) hold NaN or Inf: {', '.join(bad[:5])}"
            tell(self.note, "save_refused", checkpoint=target.name, why=why)
            return
        draft = target.with_name(f".tmp-{target.name}-{os.getpid()}")
        try:
            super().save_checkpoint(checkpoint, draft)
            _publish(draft, target)
            if self.note is not None and not target.name.startswith("."):
                self.note("saved", checkpoint=target.name)
        except OSError as error:
            tell(self.note, "save_failed", checkpoint=target.name, error=f"{type(error).__name__}: {error}"[:500])
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file that verifies, or the newest beside it that does.

        Raises:
            CheckpointError: H311, if there is none.
        """
        target = _local(path)
        if target is not None and target.is_file():
            why = damage_of(target)
            if why is not None:
                path = self._older(target, why)
        found: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file, unless it is the last one that verifies; hidden ones are for the moment and always go."""
        target = _local(path)
        if target is None or not target.is_file() or target.is_symlink():
            super().remove_checkpoint(path)
            return
        passing = target.name.startswith(".")  # of Lightning's Tuner, which goes back to it once
        if not passing and is_sealed(target) and not any(damage_of(each) is None for each in _others(target)):
            tell(self.note, "checkpoint_kept", checkpoint=target.name, why="no other in its folder verifies")
            return
        super().remove_checkpoint(path)
        _seal_of(target).unlink(missing_ok=True)

    def _older(self, target: Path, why: str) -> Path:
        tell(self.note, "checkpoint_damaged", checkpoint=target.name, why=why)
        for each in _others(target):
            if damage_of(each) is None:
                tell(self.note, "checkpoint_instead", checkpoint=each.name, of=target.name)
                return each
        raise CheckpointError(
            f"checkpoint {target.name}: {why}",
            limit="a checkpoint is loaded only if every byte verifies, and no other in its folder does",
            fix="copy it again from where it came, or start without ckpt_path.",
            rule="H311",
        )


def is_sealed(path: Path) -> bool:
    """Return whether a checkpoint file was sealed; of a link, the file that it leads to."""
    return _seal_of(path.resolve()).is_file()


def damage_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint file, or None. One that was never sealed cannot be judged.

    Cost: reads the file.
    """
    real = path.resolve()
    try:
        digest = _seal_of(real).read_text().split()[0]
    except FileNotFoundError:
        return None if not any(map(is_sealed, _siblings(real))) else "it was never finished"
    except (OSError, IndexError, UnicodeDecodeError) as error:
        return f"its digest cannot be read ({error})"
    try:
        found = _digest_of(real)
    except OSError as error:
        return f"it cannot be read ({error})"
    return (
        None
        if found == digest
        else f"it has sha256 {found[:12]}... on disk and {digest[:12]}... in {real.name}{_SEAL}"
    )


def _publish(draft: Path, target: Path) -> None:
    """Let a whole file take its name, and write its digest last: without one it was never finished."""
    fsync_path(draft)
    digest = _digest_of(draft)
    _seal_of(target).unlink(missing_ok=True)
    draft.replace(target)
    fsync_path(target.parent)
    replace_file(_seal_of(target), f"{digest}  {target.name}\n".encode())


def _digest_of(path: Path) -> str:
    return extents_of(path)["file"].sha256


def _seal_of(path: Path) -> Path:
    return path.with_name(path.name + _SEAL)


def _siblings(path: Path) -> list[Path]:
    found = (each for each in path.parent.glob("*.ckpt") if not each.name.startswith("."))
    return [each for each in found if each.resolve() != path.resolve()]


def _others(path: Path) -> list[Path]:
    """Return the other sealed checkpoints in a folder, newest first."""
    found = [each for each in _siblings(path) if not each.is_symlink() and is_sealed(each)]
    return sorted(found, key=lambda each: each.stat().st_mtime_ns, reverse=True)


def _local(path: Any) -> Path | None:
    text = os.fspath(path)
    return None if "://" in text else Path(text)


def _spoiled(checkpoint: dict[str, Any]) -> list[str]:
    """Return what must not be saved: moments that are not finite, weights and buffers with NaN.

    A state dict does not tell buffers from weights, and masks and minima among them may be infinite on purpose.
    """
    weights = {
        name: each for name, each in checkpoint.get("state_dict", {}).items() if isinstance(each, torch.Tensor)
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
