"""The checkpoint folders of a Hugging Face Trainer.

Sealed when they are written, verified before one is resumed.

The Trainer writes ``checkpoint-500`` in place. Here the folder is marked as unfinished before that,
and sealed afterwards. One that does not verify becomes ``damaged-checkpoint-500``, where the
Trainer does not look.
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
from holdfast.integrations.protocol import (
    Emit,
    attempt_save,
    checkpoints_in,
    load,
    newest_checkpoint,
    on_all,
)

_log = logging.getLogger("holdfast")
NAME = re.compile(r"checkpoint-(\d+)")
_STATE_FILE = "holdfast_state.json"


def _newest_first(folder: Path) -> list[Path]:
    return sorted(checkpoints_in(folder, NAME), key=_number, reverse=True)


def _number(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def last_good_checkpoint(
    folder: str | os.PathLike[str], run_dir: str | os.PathLike[str] | None = None
) -> str | None:
    """Return the newest checkpoint of an output directory that verifies.

    Those that do not are moved aside.

    It stands in for ``transformers.trainer_utils.get_last_checkpoint``, which takes the largest
    number whatever is in the folder. Not while another process trains there.

    Args:
        folder: ``TrainingArguments.output_dir``.
        run_dir: Where holdfast records; None: ``holdfast`` in the output directory.

    Returns:
        Its path, or None if there is none at all, or none that was ever finished.

    Raises:
        CheckpointError: H312, if one was whole, or is said to have been saved, and none verifies or
            is found.
        RunDirectoryError: H307, if one cannot be read now.
    """
    good = newest_checkpoint(
        _newest_first(Path(folder)), run_dir=Path(run_dir or Path(folder, "holdfast"))
    )
    return None if good is None else str(good)


def resumable(trainer: Any, asked: Any, run_dir: str | None = None) -> Any:
    """Return what the Trainer shall resume from, verified.

    It is asked for as ``resume_from_checkpoint``.
    """
    if not asked:
        return asked
    if not trainer.is_world_process_zero():
        on_all(lambda: None)  # the first process moves aside what is damaged
        return _resumable(asked, trainer.args.output_dir, run_dir)
    return on_all(lambda: _resumable(asked, trainer.args.output_dir, run_dir))


def _resumable(asked: Any, output_dir: str, run_dir: str | None) -> Any:
    if asked is True:
        good, folder = last_good_checkpoint(output_dir, run_dir), output_dir
    else:
        path, folder = Path(asked), asked
        if not path.is_dir() and not path.is_symlink():
            return asked  # the Trainer says what is wrong with it
        older = [each for each in _newest_first(path.parent) if _number(each) < _number(path)]
        newest = newest_checkpoint([path, *older])
        good = None if newest is None else str(newest)
    if good is None:  # the same script starts and goes on; the Trainer itself would refuse
        _log.warning("no checkpoint in %s: training starts anew", folder)
    elif asked is not True and Path(good) != Path(asked):
        _log.warning("going on from %s", good)
    return good


def save_sealed(
    trainer: Any,
    folder: Path,
    write: Callable[[], None],
    carried: Mapping[str, Any] | None,
    emit: Emit | None,
) -> bool:
    """Have a Trainer write a checkpoint between the mark and the seal.

    Older ones go only after that.

    All processes write their part; the first one marks, seals and deletes. Return whether it was
    saved; `carried` is for `carried_in`, None: nothing.
    """
    limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
    writes = trainer.is_world_process_zero()

    def undo() -> None:
        trainer.state.best_model_checkpoint = best
        if writes:
            remove(folder)

    def save() -> None:
        on_all(lambda: begin(folder) if writes else None)
        on_all(write)
        on_all(finish if writes else lambda: None)

    def finish() -> None:
        if carried is not None:
            write_file(folder / _STATE_FILE, json.dumps(carried).encode())
        seal(folder, global_step=trainer.state.global_step, unix_seconds=time.time())
        load("transformers.trainer_utils").rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )

    trainer.args.save_total_limit = None  # the Trainer rotates before the seal
    try:
        return attempt_save(save, folder.name, emit, undo)
    finally:
        trainer.args.save_total_limit = limit


def carried_in(checkpoint: Any) -> dict[str, Any] | None:
    """Return what `save_sealed` was given, or None if it was not written with holdfast."""
    path = Path(checkpoint) / _STATE_FILE if isinstance(checkpoint, str) else None
    return json.loads(path.read_bytes()) if path is not None and path.is_file() else None


def check_best(state: Any) -> None:
    """Verify the checkpoint of the best model before it is loaded, unless it was written without
    holdfast.
    """
    if state.best_model_checkpoint is not None:
        check(Path(state.best_model_checkpoint))
