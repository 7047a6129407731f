"""Seal the checkpoint folders of a Hugging Face Trainer, and verify them before a resume.

The Trainer writes ``checkpoint-500`` in place. Here the folder is first marked as unfinished, and
sealed afterwards. One that does not verify is renamed to ``damaged-checkpoint-500``, which the
Trainer does not look for.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.seal import begin, check, seal
from holdfast.core.durable import write_file
from holdfast.core.files import remove
from holdfast.integrations.refusals import load
from holdfast.integrations.saving import (
    Emit,
    attempt_save,
    checkpoints_in,
    newest_checkpoint,
    on_all_ranks,
)

_log = logging.getLogger("holdfast")

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
# The carried state (see ``hosting``), in each checkpoint folder.
_STATE_FILE = "holdfast_state.json"

# --- Resuming -------------------------------------------------------------------------------------


def last_good_checkpoint(
    folder: str | os.PathLike[str], run_dir: str | os.PathLike[str] | None = None
) -> str | None:
    """Return the newest checkpoint of an output directory that verifies.

    Newer ones that do not verify are moved aside. Use it in place of
    ``transformers.trainer_utils.get_last_checkpoint``, which returns the highest number regardless
    of the folder's contents. Do not call it while another process is training in the folder.

    Args:
        folder: ``TrainingArguments.output_dir``.
        run_dir: Where holdfast records. None: ``holdfast`` in the output directory.

    Returns:
        The path of the checkpoint, or None if no checkpoint was ever finished.

    Raises:
        CheckpointError: H312 if one was complete, or was saved according to the recording, and none
            verifies or can be reached.
        RunDirectoryError: H307 if one cannot be read now.
    """
    if run_dir is None:
        run_dir = Path(folder, "holdfast")
    checkpoint = newest_checkpoint(_newest_first(Path(folder)), run_dir=Path(run_dir))
    return None if checkpoint is None else str(checkpoint)


def verified_checkpoint(trainer: Any, requested: Any, run_dir: str | None = None) -> Any:
    """Return the checkpoint that the Trainer should resume from.

    Args:
        trainer: The Trainer, on every rank.
        requested: Its ``resume_from_checkpoint``: a path, True for the newest, or a false value.
        run_dir: Where holdfast records. None: ``holdfast`` in the output directory.

    Returns:
        The requested checkpoint if it verifies, otherwise the newest older one that does, or None
        for a new start. A path that does not exist is returned unchanged, and the Trainer reports
        it.
    """
    if not requested:
        return requested

    def choose() -> Any:
        return _choose_checkpoint(requested, trainer.args.output_dir, run_dir)

    if trainer.is_world_process_zero():
        return on_all_ranks(choose)
    # The first process moves damaged checkpoints aside, so the others wait until it is done.
    on_all_ranks(lambda: None)
    return choose()


def _choose_checkpoint(requested: Any, output_dir: str, run_dir: str | None) -> Any:
    if requested is True:
        checkpoint = last_good_checkpoint(output_dir, run_dir)
        if checkpoint is None:
            _warn_of_new_start(output_dir)
        return checkpoint
    path = Path(requested)
    if not path.is_dir() and not path.is_symlink():
        # The Trainer reports what is wrong with it.
        return requested
    older = [
        checkpoint
        for checkpoint in _newest_first(path.parent)
        if _step_number(checkpoint) < _step_number(path)
    ]
    newest = newest_checkpoint([path, *older])
    if newest is None:
        _warn_of_new_start(requested)
        return None
    if newest != path:
        _log.warning("resuming from %s", newest)
    return str(newest)


def _warn_of_new_start(folder: str) -> None:
    """Warn that training starts from scratch, in a case in which the Trainer would raise an error.

    The same script can therefore start and resume a run.
    """
    _log.warning("no checkpoint in %s: starting a new run", folder)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(checkpoints_in(folder, CHECKPOINT_NAME), key=_step_number, reverse=True)


def _step_number(path: Path) -> int:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


# --- Saving and loading ---------------------------------------------------------------------------


def save_sealed(
    trainer: Any,
    folder: Path,
    write: Callable[[], None],
    carried: Mapping[str, Any] | None,
    emit: Emit | None,
) -> bool:
    """Let a Trainer write a checkpoint, seal it, and return whether it was saved.

    All processes write their part. The first one marks the folder as unfinished beforehand, seals
    it afterwards, and only then deletes older checkpoints.

    Args:
        trainer: The Trainer, on every rank.
        folder: The checkpoint folder.
        write: Writes this process's part, as the Trainer does.
        carried: The carried state, for `read_carried_state`, or None.
        emit: Records events. None: they are logged.
    """
    keep_at_most = trainer.args.save_total_limit
    best_before = trainer.state.best_model_checkpoint
    is_first = trainer.is_world_process_zero()

    def save() -> None:
        on_all_ranks(mark_as_unfinished)
        on_all_ranks(write)
        on_all_ranks(finish)

    def mark_as_unfinished() -> None:
        if is_first:
            begin(folder)

    def finish() -> None:
        if not is_first:
            return
        if carried is not None:
            write_file(folder / _STATE_FILE, json.dumps(carried).encode())
        seal(folder, global_step=trainer.state.global_step, unix_seconds=time.time())
        load("transformers.trainer_utils").rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=keep_at_most,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )

    def undo() -> None:
        trainer.state.best_model_checkpoint = best_before
        if is_first:
            remove(folder)

    # The Trainer would delete older checkpoints before this one is sealed.
    trainer.args.save_total_limit = None
    try:
        return attempt_save(save, folder.name, emit, undo)
    finally:
        trainer.args.save_total_limit = keep_at_most


def read_carried_state(checkpoint: Any) -> dict[str, Any] | None:
    """Return the carried state of a checkpoint.

    Args:
        checkpoint: Its path. Any other value means that there is no checkpoint.

    Returns:
        None if there is no checkpoint, or it was written without holdfast.
    """
    if not isinstance(checkpoint, str):
        return None
    path = Path(checkpoint, _STATE_FILE)
    if not path.is_file():
        return None
    carried: dict[str, Any] = json.loads(path.read_bytes())
    return carried


def check_best_checkpoint(state: Any) -> None:
    """Verify the checkpoint of the best model, unless it was written without holdfast.

    Raises:
        CheckpointError: H311 if it does not verify.
    """
    if state.best_model_checkpoint is not None:
        check(Path(state.best_model_checkpoint))
