"""Seal the checkpoint folders of a Hugging Face Trainer, and verify them before a resume.

The Trainer writes a folder such as ``checkpoint-500`` in place. This module marks the folder as
unfinished before the Trainer writes it, and seals it afterwards. A folder that fails verification
is renamed to ``damaged-checkpoint-500``, so that the Trainer does not find it.
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
# The file in each checkpoint folder that holds the carried state (see ``hosting``).
_STATE_FILE = "holdfast_state.json"

# --- Resuming -------------------------------------------------------------------------------------


def last_good_checkpoint(
    folder: str | os.PathLike[str], run_dir: str | os.PathLike[str] | None = None
) -> str | None:
    """Return the newest checkpoint in an output directory that passes verification.

    Newer checkpoints that fail verification are moved aside. Use this function in place of
    ``transformers.trainer_utils.get_last_checkpoint``, which returns the checkpoint with the
    highest number even if that checkpoint is damaged. Do not call this function while another
    process is training in the directory.

    Args:
        folder: The output directory (``TrainingArguments.output_dir``).
        run_dir: The run directory. Defaults to ``holdfast`` in the output directory.

    Returns:
        The path of the checkpoint, or None if no save was ever completed.

    Raises:
        CheckpointError: H312 if a checkpoint was completed, according to its files or to the
            recording, but none can be found and verified.
        RunDirectoryError: H307 if a checkpoint cannot be read at the moment.
    """
    if run_dir is None:
        run_dir = Path(folder, "holdfast")
    checkpoint = newest_checkpoint(_newest_first(Path(folder)), run_dir=Path(run_dir))
    return None if checkpoint is None else str(checkpoint)


def verified_checkpoint(trainer: Any, requested: Any, run_dir: str | None = None) -> Any:
    """Return the checkpoint that the Trainer should resume from.

    All ranks must call this function.

    Args:
        trainer: The Trainer.
        requested: The argument ``resume_from_checkpoint``: a path, True for the newest checkpoint,
            or a false value for a new run.
        run_dir: The run directory. Defaults to ``holdfast`` in the output directory.

    Returns:
        The path of the requested checkpoint if it passes verification, otherwise that of the newest
        older checkpoint that does. None if training has to start from scratch. A path that does not
        exist is returned unchanged, because the Trainer raises an error for it.
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
        # Return the path unchanged, since the Trainer raises an error for it.
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
    """Warn that training starts from scratch because there is no checkpoint.

    The plain Trainer would raise an error. With a warning instead, the same script can start a run
    and resume it.
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
    """Let the Trainer write a checkpoint, seal the checkpoint, and return whether it was saved.

    All processes must call this function, and write their parts of the checkpoint. The first
    process marks the folder as unfinished beforehand and seals it afterwards. Older checkpoints are
    deleted only once the new one is sealed.

    Args:
        trainer: The Trainer.
        folder: The checkpoint folder.
        write: The Trainer's own function that writes this process's part of the checkpoint.
        carried: The carried state to save for `read_carried_state`, or None.
        emit: Function that records events. If None, events are logged.
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

    # If the limit stayed set, the Trainer would delete older checkpoints before this one is sealed.
    trainer.args.save_total_limit = None
    try:
        return attempt_save(save, folder.name, emit, undo)
    finally:
        trainer.args.save_total_limit = keep_at_most


def read_carried_state(checkpoint: Any) -> dict[str, Any] | None:
    """Return the carried state of a checkpoint.

    Args:
        checkpoint: The path of the checkpoint. Any value that is not a string means that there is
            no checkpoint.

    Returns:
        The carried state, or None if there is no checkpoint or it was written without holdfast.
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
        CheckpointError: H311 if the checkpoint fails verification.
    """
    if state.best_model_checkpoint is not None:
        check(Path(state.best_model_checkpoint))
