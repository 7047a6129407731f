"""A process that is killed while it saves.

Does its run directory always resume, with a state that was saved?

How: a forked child trains a 20 MB model and saves whenever it can: beside the training, so that
steps go on and change the weights while they are written, or in the loop after every step. It
appends the digest of its weights to a log after each step, before a save of them can begin. It is
killed by SIGKILL at a random moment of the time from one save to the next. Then the run is resumed,
its state is compared with the log, and the next child goes on from there until it is killed too: 10
kills of each run. A kill that fell into a save shows as an unfinished directory that was left
behind. A state that mixes two steps, because the writer did not have a true copy, has a digest that
is in no log.

Beside it: ``torch.save`` of the same weights straight to the final path, in a loop that does
nothing else, killed in the same way; how often the file cannot be loaded afterwards.

To reach: 0 of 500 run directories that cannot be resumed, 0 of 500 resumed states that were never
there; 400 of the kills beside the training, 100 in the loop.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from benchmarks.forks import Child, Counter, in_a_fork, single_threaded, wait_until
from benchmarks.results_file import Result, read_options, without_paths
from benchmarks.small_training import digest_tensors
from holdfast import Guard

_SIDE = 2236  # 2236 x 2236 fp32 weights are 20 MB
_KILLS_OF_A_RUN = 10
_WARM_SAVES = 2
_ENDLESS = 10**6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(_SIDE, _SIDE, bias=False)


def digest(model: nn.Module) -> str:
    return digest_tensors(list(model.state_dict().values()))


def resumed(run_dir: Path, beside: bool) -> tuple[Guard, nn.Module]:
    model = make_model()
    guard = Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=[torch.ones(4, _SIDE)] * 1000,
        save_interval_steps=1,
        async_save=beside,
        spike_action="off",
        check_split=False,
    )
    return guard, model


def save_for_ever(run_dir: Path, beside: bool, saves: Counter) -> None:
    """Resume, then train, note the digest, and save, until killed.

    Count the saves that were finished.
    """
    guard, model = resumed(run_dir, beside)
    log = os.open(run_dir / "digests.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    for batch in guard.batches(max_steps=_ENDLESS):
        guard.step(batch, lambda x: model(x).square().mean())
        line = {"step": guard.global_step, "digest": digest(model)}
        os.write(log, json.dumps(line).encode() + b"\n")
        saves.set(guard.statistics().checkpoints_saved)


def report_only(run_dir: Path) -> tuple[int, str]:
    guard, model = resumed(run_dir, True)
    return guard.global_step, digest(model)


def save_plainly_for_ever(file: Path, steps: Counter) -> None:
    model = make_model()
    while True:
        steps.set(steps.get() + 1)  # the save begins now
        torch.save(model.state_dict(), file)


def load_plainly(file: Path) -> bool:
    return digest_tensors(list(torch.load(file, weights_only=True).values())) == digest(
        make_model()
    )


def time_of_a_save(run: Callable[[Counter], None]) -> float:
    """Return the median seconds between two beginnings of a save."""
    steps = Counter()
    child = Child(partial(run, steps))
    moments = []
    for number in range(2, 12):
        wait_until(lambda: steps.get() >= number, child)  # noqa: B023 - called in this round only
        moments.append(time.perf_counter())
    child.kill()
    child.finish()
    return statistics.median(after - before for before, after in pairwise(moments))


def kill_in_a_save(
    run: Callable[[Counter], None], chance: random.Random, save_seconds: float
) -> str:
    """Kill a process at a random moment after a save began; return how it ended."""
    steps = Counter()
    child = Child(partial(run, steps))
    target = chance.randint(1, 1 + _WARM_SAVES)
    if wait_until(lambda: steps.get() >= target, child):
        time.sleep(chance.random() * save_seconds)
    child.kill()
    fate = child.finish()
    return fate.error or fate.how


def check_run(run_dir: Path) -> tuple[bool, bool]:
    """Return whether the run resumes, and whether what it finds was saved before."""
    fate = in_a_fork(partial(report_only, run_dir))
    if fate.value is None:
        print(f"    cannot be resumed: {without_paths(fate.error or fate.how)}")
        return False, False
    step, found = fate.value
    lines = [
        json.loads(line) for line in (run_dir / "digests.jsonl").read_bytes().split(b"\n")[:-1]
    ]
    saved = {(line["step"], line["digest"]) for line in lines}
    fresh = (0, digest(make_model()))
    return True, (step, found) in saved | {fresh}


def measure_holdfast(
    result: Result, folder: Path, kills: int, chance: random.Random, *, beside: bool
) -> None:
    name = "holdfast, beside the training" if beside else "holdfast, in the loop"
    save_seconds = time_of_a_save(partial(save_for_ever, folder / f"timing-{beside}", beside))
    rows = []
    for number in range(kills):
        run_dir = folder / f"run{number // _KILLS_OF_A_RUN}-{beside}"
        ended = kill_in_a_save(partial(save_for_ever, run_dir, beside), chance, save_seconds)
        left_behind = any((run_dir / "checkpoints").glob(".tmp-*"))
        rows.append((ended == "SIGKILL", left_behind, *check_run(run_dir)))
    killed, unfinished, resumes, right = (sum(column) for column in zip(*rows, strict=True))
    result.parameters[f"{name}: seconds between saves"] = round(save_seconds, 4)
    result.add_count(f"{name}: killed by SIGKILL", killed, kills, expected=kills)
    result.add_count(f"{name}: kills that left an unfinished save behind", unfinished, kills)
    result.add_count(f"{name}: run directory cannot be resumed", kills - resumes, kills, expected=0)
    result.add_count(f"{name}: resumed state was never there", resumes - right, kills, expected=0)
    result.samples[f"{name}: save was unfinished"] = [int(row[1]) for row in rows]


def measure_plain(result: Result, folder: Path, kills: int, chance: random.Random) -> None:
    file = folder / "plain.pt"
    torch.save(make_model().state_dict(), file)
    if not load_plainly(file):
        raise RuntimeError("the file of an undisturbed torch.save cannot be loaded")
    save_seconds = time_of_a_save(partial(save_plainly_for_ever, file))
    rows = []
    for _ in range(kills):
        kill_in_a_save(partial(save_plainly_for_ever, file), chance, save_seconds)
        rows.append(in_a_fork(partial(load_plainly, file)).value is True)
    result.parameters["torch_save_seconds_between_saves"] = round(save_seconds, 4)
    result.add_count("torch.save: newest file cannot be loaded", kills - sum(rows), kills)
    result.samples["torch.save: file cannot be loaded"] = [int(not row) for row in rows]


def main() -> None:
    single_threaded()
    options = read_options("save_kills", __doc__ or "")
    kills, in_the_loop, plain = (10, 5, 5) if options.quick else (400, 100, 100)
    parameters = {
        "kills": [kills, in_the_loop],
        "kills_of_a_run": _KILLS_OF_A_RUN,
        "model_bytes": 4 * _SIDE**2,
        "seed": 3,
    }
    result = Result(options=options, parameters=parameters)
    with tempfile.TemporaryDirectory() as folder:
        measure_holdfast(result, Path(folder), kills, random.Random(3), beside=True)
        measure_holdfast(result, Path(folder), in_the_loop, random.Random(4), beside=False)
        measure_plain(result, Path(folder), plain, random.Random(3))
    result.write()


if __name__ == "__main__":
    main()
