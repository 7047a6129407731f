"""The checkpoint folders of a Hugging Face Trainer: sealed when they are written, verified before one is resumed.

The Trainer writes ``checkpoint-500`` in place. Here the folder is marked as unfinished before that, a manifest with
digests is written last, and a folder that does not verify is renamed to ``damaged-checkpoint-500``, where neither the
Trainer nor its rotation looks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from holdfast.checkpoint.sealing import begin, check, newest_good, remove_draft, seal, set_aside
from holdfast.checkpoint.store import paths_in
from holdfast.core.durable import write_file
from holdfast.guard.directory import check_found
from holdfast.integrations.frameworks import load

_log = logging.getLogger("holdfast")
_NAME = re.compile(r"checkpoint-(\d+)")
STATE_FILE = "holdfast_state.json"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoint folders of an output directory, newest first.

    Raises:
        CheckpointError: H312, if it cannot be reached.
    """
    found = [(int(match[1]), path) for path in paths_in(folder) if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def last_good_checkpoint(folder: str | os.PathLike[str], run_dir: str | os.PathLike[str] | None = None) -> str | None:
    """Return the newest checkpoint of an output directory that verifies; those that do not are set aside.

    It stands in for ``transformers.trainer_utils.get_last_checkpoint``, which takes the largest number whatever lies
    in the folder. Not while another process trains there.

    Args:
        folder: ``TrainingArguments.output_dir``.
        run_dir: Where holdfast records; None: ``holdfast`` in the output directory.

    Returns:
        Its path, or None if there is none at all, or none that was ever finished.

    Raises:
        CheckpointError: H312, if one was whole, or is said to have been saved, and none verifies or is found.
    """
    good, refused = newest_good(checkpoints_in(Path(folder)))
    for path, why in refused:
        _log.warning("%s; it is kept as %s", why, set_aside(path))
    if good is None:
        check_found(Path(run_dir or Path(folder, "holdfast")), anew="train without resume_from_checkpoint, ")
    return None if good is None else str(good)


def resumable(asked: Any, output_dir: str, run_dir: str | None = None) -> Any:
    """Return what the Trainer shall resume from, verified.

    Args:
        asked: ``resume_from_checkpoint``: a path, True for the newest, or None or False.
        output_dir: Where the newest is looked for.
        run_dir: Where holdfast records; None: ``holdfast`` there.

    Raises:
        CheckpointError: H312.
    """
    if not asked:
        return asked
    if asked is True:
        newest = last_good_checkpoint(output_dir, run_dir)
        if newest is None:  # the same script starts and goes on; the Trainer itself would refuse
            _log.warning("no checkpoint in %s: training starts anew", output_dir)
        return newest
    path = Path(asked)
    older = [each for each in checkpoints_in(path.parent) if _number(each) < _number(path)]
    if not path.is_dir():
        return asked  # the Trainer says what is wrong with it
    good, refused = newest_good([path, *older])
    for _, why in refused:
        _log.warning("%s; %s", why, "training starts anew" if good is None else f"going on from {good}")
    return None if good is None else str(good)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


class SealedSave:
    """One save of a Trainer: what to do before it writes, and after.

    Args:
        trainer: Its ``args`` and ``state`` are used.
        folder: Where it is about to write.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder
        self._limit = trainer.args.save_total_limit
        self._best = trainer.state.best_model_checkpoint

    def __enter__(self) -> Self:
        self._trainer.args.save_total_limit = None  # nothing older goes before this one is sealed
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.args.save_total_limit = self._limit

    def begin(self) -> None:
        """Mark the folder as unfinished, before the Trainer writes.

        Raises:
            OSError: if the disk refuses.
        """
        begin(self._folder)

    def seal(self, carried: Mapping[str, Any] | None) -> None:
        """Write what holdfast needs of it, and the digests; then older ones may go.

        Args:
            carried: For a later life; None: nothing.

        Raises:
            OSError: if the disk refuses.
        """
        trainer, step = self._trainer, self._trainer.state.global_step
        if carried is not None:
            write_file(self._folder / STATE_FILE, json.dumps(carried).encode())
        seal(self._folder, global_step=step, unix_seconds=time.time())
        load("transformers.trainer_utils").rotate_checkpoints(
            output_dir=str(self._folder.parent),
            save_total_limit=self._limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )

    def give_up(self) -> None:
        """Remove what was written, after an error."""
        self._trainer.state.best_model_checkpoint = self._best
        remove_draft(self._folder)


def carried_in(checkpoint: Any) -> dict[str, Any] | None:
    """Return what `SealedSave.seal` was given, or None if it was not written with holdfast."""
    path = Path(checkpoint) / STATE_FILE if isinstance(checkpoint, str) else None
    return json.loads(path.read_bytes()) if path is not None and path.is_file() else None


def check_best(state: Any) -> None:
    """Verify the checkpoint of the best model before it is loaded, unless it was written without holdfast.

    Args:
        state: Of the Trainer.

    Raises:
        CheckpointError: H311.
    """
    if state.best_model_checkpoint is not None:
        check(Path(state.best_model_checkpoint))


def is_of_the_disk(error: Exception) -> bool:
    """Return whether a save failed for what may be mended by itself; torch wraps what the system said."""
    return isinstance(error, OSError) or "PytorchStreamWriter" in str(error) or "os error" in str(error).lower()
