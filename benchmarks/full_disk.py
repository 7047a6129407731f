"""A disk that is full for a while: does training go on, and are the older checkpoints still good?

How: a tmpfs of 16 MiB is mounted for this script alone. A run (see ``small_training``) saves on it every 7 steps; a
file fills the disk after step 20 and is removed after step 50. Each repetition is a run of its own. Checked: saves
fail with an event and no exception, every older checkpoint verifies while the disk is full, a later save succeeds,
and the final state equals, bit for bit, that of a plain loop.

Where no tmpfs may be mounted, the result says so and holds no figure.

To reach: all repetitions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from recipes.demo.small_disk import command_with_small_disk

from benchmarks.forks import in_a_fork, single_threaded
from benchmarks.results_file import Result, read_options
from benchmarks.sigkill import reference_digest
from benchmarks.small_training import STEPS, Training, train_guarded
from holdfast import CheckpointError
from holdfast.checkpoint.store import Store
from holdfast.recorder.reader import read_events
from holdfast.testing import fill_disk

_FULL_AT, _FREE_AT = 20, 50
_LEFT_BYTES = 64 * 1024


def train(run_dir: Path) -> dict[str, Any]:
    """Train through a full disk and return what was seen."""
    filler = run_dir.with_name("filler")
    store = Store(run_dir / "checkpoints")
    while_full: dict[str, int] = {"entries": 0, "damaged": 0}

    def after_step(step: int, _: Training) -> None:
        if step == _FULL_AT:
            fill_disk(filler, leave_bytes=_LEFT_BYTES)
        elif step == _FREE_AT:
            for entry in store.entries():
                while_full["entries"] += 1
                try:
                    entry.verify()
                except CheckpointError:
                    while_full["damaged"] += 1
            filler.unlink()

    training = train_guarded(run_dir, 0, after_step)
    events = read_events(run_dir / "recorder" / "rank0")
    return {
        "digest": training.digest(),
        "failed_at": [event.global_step for event in events if event.kind == "save_failed"],
        "saved_at": [event.global_step for event in events if event.kind == "checkpoint_saved"],
        **while_full,
    }


def inside(disk: Path, repetitions: int) -> None:
    """Run all repetitions on the small disk, and print what was seen as JSON."""
    rows = []
    for number in range(repetitions):
        fate = in_a_fork(partial(train, disk / f"run{number}" / "run"))
        rows.append({"value": fate.value, "ended": fate.error or fate.how})
        subprocess.run(["rm", "-rf", str(disk / f"run{number}")], check=True)
    print(json.dumps(rows))


_PROMISES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "saves failed with an event, and training went on": lambda seen: (
        bool(seen["failed_at"]) and all(_FULL_AT < step <= _FREE_AT for step in seen["failed_at"])
    ),
    "every older checkpoint verified while the disk was full": lambda seen: seen["entries"] > 0 == seen["damaged"],
    "a save succeeded after there was space again": lambda seen: max(seen["saved_at"]) > _FREE_AT,
    "the final state equals the plain loop's, bit for bit": lambda seen: seen["digest"] == seen["wanted"],
}


def main() -> None:
    single_threaded()
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), int(sys.argv[3]))
        return
    options = read_options("full_disk", __doc__ or "")
    repetitions = 2 if options.quick else 10
    parameters = {"repetitions": repetitions, "steps": STEPS, "full_after": _FULL_AT, "free_after": _FREE_AT}
    result = Result(options=options, parameters=parameters)
    with tempfile.TemporaryDirectory() as disk:
        again = [sys.executable, "-m", "benchmarks.full_disk", "--inside", disk, str(repetitions)]
        command = command_with_small_disk(Path(disk), again)
        if command is None:
            result.notes.append("skipped: neither root nor an unprivileged user may mount a tmpfs here")
            result.write()
            return
        rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    undisturbed = in_a_fork(reference_digest).value
    for what, holds in _PROMISES.items():
        kept = sum(row["value"] is not None and holds({**row["value"], "wanted": undisturbed}) for row in rows)
        result.add_count(what, kept, repetitions, expected=repetitions)
    result.samples["rows"] = rows
    result.write()


if __name__ == "__main__":
    main()
