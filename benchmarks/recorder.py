"""The black box: what one record costs, and whether every completed record survives a SIGKILL.

How: CPU time of blocks of 10,000 calls of `BlackBox.step` and of `Guard.log` with one number, the
loop around them included. Then a forked child writes records in a loop and tells its parent through
shared memory how many are complete; it is killed at a random moment, and the file is read. Each
record's loss is made from its number, so a record that was mixed up would be seen. The ring keeps
the newest 32,768 records, less the one that a killed write may have spoiled.

To reach: <= 1 us a record; <= 3 us a logged number; 100 of 100 kills without a lost or wrong
record.
"""

from __future__ import annotations

import random
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

import holdfast
from benchmarks.forks import Child, Counter, single_threaded, wait_until
from benchmarks.results_file import Result, read_options
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.reader import read_steps

_BLOCK = 10_000
_CAPACITY = 32_768
_LONGEST_DELAY_SECONDS = 0.08  # long enough that some rings are full and wrap around


def cost_of_block(box: BlackBox) -> float:
    """Return the CPU microseconds of one record."""
    started = time.process_time_ns()
    for number in range(_BLOCK):
        box.step(StepMark.COMMITTED, number, 32, 0.5, 1.5, 0.01)
    return (time.process_time_ns() - started) / _BLOCK / 1000


def cost_of_logging(guard: holdfast.Guard) -> float:
    """Return the CPU microseconds of one number that is logged."""
    started = time.process_time_ns()
    for number in range(_BLOCK):
        guard.log(accuracy=0.5 * number)
    return (time.process_time_ns() - started) / _BLOCK / 1000


def loss_of(number: int) -> float:
    return number * 0.5 + 0.25


def write_for_ever(directory: Path, complete: Counter) -> None:
    box, number = BlackBox(directory), 0
    while True:
        number += 1
        box.step(StepMark.COMMITTED, number, 32, loss_of(number), 1.5, 0.01)
        complete.set(number)


def kill_once(directory: Path, chance: random.Random) -> tuple[int, int, int]:
    """Kill a writer; return how many records were complete, how many are missing, and how many
    are wrong.
    """
    complete = Counter()
    child = Child(partial(write_for_ever, directory, complete))
    wait_until(lambda: complete.get() > 0, child)
    time.sleep(chance.random() * _LONGEST_DELAY_SECONDS)
    child.kill()
    child.finish()
    found = {record.global_step: record.loss for record in read_steps(directory)}
    newest = complete.get()
    expected = range(max(1, newest - _CAPACITY + 2), newest + 1)
    missing = sum(number not in found for number in expected)
    wrong = sum(loss != loss_of(number) for number, loss in found.items())
    return newest, missing, wrong


def main() -> None:
    single_threaded()
    options = read_options("recorder", __doc__ or "")
    blocks, kills = (30, 10) if options.quick else (300, 100)
    parameters = {
        "blocks": blocks,
        "records_in_a_block": _BLOCK,
        "kills": kills,
        "capacity": _CAPACITY,
        "seed": 1,
    }
    result = Result(options=options, parameters=parameters)
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        box = BlackBox(Path(folder) / "cost")
        cost_of_block(box)
        result.add_samples(
            "CPU time of one record", "us", [cost_of_block(box) for _ in range(blocks)], at_most=1.0
        )
        box.close()
        model = torch.nn.Linear(2, 1)
        with holdfast.Guard(
            Path(folder) / "guard", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)
        ) as guard:
            cost_of_logging(guard)
            costs = [cost_of_logging(guard) for _ in range(blocks)]
        result.add_samples("CPU time of one logged number", "us", costs, at_most=3.0)
        rows = [kill_once(Path(folder) / str(number), chance) for number in range(kills)]
    clean = sum(missing == 0 and wrong == 0 for _, missing, wrong in rows)
    result.add_count(
        "kills after which every completed record was read back", clean, kills, expected=kills
    )
    result.add_count(
        "kills after the ring had wrapped around", sum(row[0] > _CAPACITY for row in rows), kills
    )
    result.samples["records complete at each kill"] = [row[0] for row in rows]
    result.samples["records missing"] = [row[1] for row in rows]
    result.samples["records wrong"] = [row[2] for row in rows]
    result.write()


if __name__ == "__main__":
    main()
