"""Single flipped bits in the newest checkpoint: is one ever loaded as good?

How: a real run (see ``small_training``) leaves 3 checkpoints. For each case the run directory is
copied, one random bit in one of the files of the newest checkpoint is flipped, and then
`Entry.verify` is asked and the run is started again. Half of the flips choose each bit of all files
alike, so mostly tensors; half choose the file first, so also the manifest and the JSON state. A
flip is caught if `verify` raises and the run resumes from the checkpoint before, with exactly the
state that was saved there.

Beside it: as many flips in the file that ``torch.save`` writes of the same weights, optimizer and
schedule, each bit alike, read by ``torch.load(weights_only=True)``: how many load without an error
and with wrong values.

To reach: 0 of 300 loaded as good.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter as Tally
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recipes.demo.campaign import flip_random_bit

from benchmarks.forks import Fate, in_a_fork, single_threaded
from benchmarks.results_file import Result, read_options
from benchmarks.small_training import Training, train_guarded
from holdfast import CheckpointError
from holdfast.checkpoint.store import Store
from holdfast.testing import flip_bit

_STEPS = 16


def make_run(run_dir: Path, plain_file: Path) -> dict[int, str]:
    """Train, leave a run directory and a plain file of the same last state.

    Return each step's digest.
    """
    digests = {0: Training().digest()}

    def after_step(step: int, training: Training) -> None:
        digests[step] = training.digest()

    training = train_guarded(run_dir, 0, after_step, max_steps=_STEPS)
    torch.save(training.plain_state(), plain_file)
    return digests


def flip(directory: Path, chance: random.Random, *, file_first: bool) -> tuple[Path, int]:
    if not file_first:
        return flip_random_bit(directory, chance)
    file = chance.choice(sorted(path for path in directory.iterdir() if path.is_file()))
    bit = chance.randrange(8 * file.stat().st_size)
    flip_bit(file, bit)
    return file, bit


def resume(run_dir: Path) -> tuple[str, int, str]:
    """Start the run again.

    Return the checkpoint that it continued from, the step, and the digest of its state.
    """
    training = Training()
    with training.guard(run_dir) as guard:
        return (
            "" if guard.resumed_from is None else guard.resumed_from.name,
            guard.global_step,
            training.digest(),
        )


def try_one(
    original: Path, copy: Path, chance: random.Random, digests: dict[int, str], *, file_first: bool
) -> Any:
    """Flip one bit in a copy of the run; return the file, the bit, and what came of it."""
    shutil.copytree(original, copy)
    newest = Store(copy / "checkpoints").entries()[0]
    file, bit = flip(newest.path, chance, file_first=file_first)
    try:
        newest.verify()
    except CheckpointError:
        verified = False
    else:
        verified = True
    fate = in_a_fork(partial(resume, copy))
    shutil.rmtree(copy)
    if fate.value is None:
        return file.name, bit, f"restart failed: {fate.error or fate.how}", verified
    name, step, digest = fate.value
    outcome = "loaded as good" if name == newest.path.name else "older checkpoint"
    if digest != digests[step]:
        outcome += ", wrong state"
    return file.name, bit, outcome, verified


def load_plain(file: Path) -> str:
    """Load a plain file and return a digest of everything in it."""
    training = Training()
    training.load_plain_state(torch.load(file, weights_only=True))
    return training.digest()


def try_plain(file: Path, chance: random.Random, good: str) -> str:
    bit = chance.randrange(8 * file.stat().st_size)
    flip_bit(file, bit)
    fate: Fate = in_a_fork(partial(load_plain, file))
    flip_bit(file, bit)
    if fate.value is None:
        return "refused" if fate.signal is None else fate.signal
    return "right values" if fate.value == good else "wrong values without an error"


def main() -> None:
    single_threaded()
    options = read_options("bit_flips", __doc__ or "")
    flips = 30 if options.quick else 300
    chance = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        original, plain_file = Path(folder) / "run", Path(folder) / "plain.pt"
        digests = in_a_fork(partial(make_run, original, plain_file)).value
        newest = Store(original / "checkpoints").entries()[0]
        sizes = {path.name: path.stat().st_size for path in sorted(newest.path.iterdir())}
        parameters = {
            "flips": flips,
            "files_bytes": sizes,
            "plain_file_bytes": plain_file.stat().st_size,
            "seed": 7,
        }
        result = Result(options=options, parameters=parameters)
        if in_a_fork(partial(load_plain, plain_file)).value != digests[_STEPS]:
            raise RuntimeError("the plain file holds another state than the run")
        rows = [
            try_one(original, Path(folder) / "copy", chance, digests, file_first=number % 2 == 0)
            for number in range(flips)
        ]
        plain = Tally(try_plain(plain_file, chance, digests[_STEPS]) for _ in range(flips))
    loaded = sum(row[2].startswith("loaded as good") for row in rows)
    caught = sum(row[2] == "older checkpoint" and not row[3] for row in rows)
    result.add_count("holdfast: loaded as good", loaded, flips, expected=0)
    result.add_count(
        "holdfast: verify found it and the run resumed from the checkpoint before",
        caught,
        flips,
        expected=flips,
    )
    result.add_count(
        "torch.load: wrong values without an error", plain["wrong values without an error"], flips
    )
    result.add_count("torch.load: refused", plain["refused"], flips)
    result.add_count(
        "torch.load: right values, the bit did not matter", plain["right values"], flips
    )
    result.samples["holdfast: file, outcome, count"] = [
        [*key, count] for key, count in sorted(Tally((row[0], row[2]) for row in rows).items())
    ]
    result.samples["torch.load: outcomes"] = dict(plain)
    result.write()


if __name__ == "__main__":
    main()
