"""Trains in copies of this process under one limit of address space after another, and prints how
each ended.

Arguments: the folder of the runs, and "fresh" or "resume". One JSON list per limit: its bytes
beyond what the process has, "finished" or the type and rule of the error, and the steps that a run
without a limit reaches afterwards.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import holdfast

LIMITS = 5
MOST_BYTES = 90 * 2**20  # beyond this the run below finishes
EPOCHS = 2


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    return model, torch.optim.AdamW(model.parameters())


def train(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, epochs: int = EPOCHS
) -> int:
    loader = holdfast.DataLoader(torch.ones(128, 64), batch_size=32)
    guard = holdfast.Guard(
        folder, model=model, optimizer=optimizer, loader=loader, save_interval_steps=2
    )
    for batch in guard.batches(max_epochs=epochs):
        guard.step(batch, lambda x: model(x).square().mean())
    return guard.global_step


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def in_a_copy(run: Callable[[], str]) -> str:
    """Return what a function says in a copy of this process, or the error that it ended with."""
    reading, writing = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            answer = run()
        except holdfast.HoldfastError as error:
            answer = f"{type(error).__name__} {error.rule}"
        except BaseException as error:  # noqa: BLE001 - it is the answer
            answer = type(error).__name__
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    os.waitpid(copy, 0)
    return answer


def under_a_limit(folder: Path, beyond: int) -> str:
    model, optimizer = parts()
    limit = address_space() + beyond
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    train(folder, model, optimizer)
    return "finished"


def without_a_limit(folder: Path) -> str:
    return str(train(folder, *parts()))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    runs, mode = Path(sys.argv[1]), sys.argv[2]
    begun = runs / "begun"
    in_a_copy(lambda: str(train(begun, *parts(), epochs=1)))
    # What a script imports is there before its run begins; the first optimizer of a process imports
    # more.
    _ = holdfast.Guard, holdfast.DataLoader, parts()

    for number in range(LIMITS):
        folder = runs / str(number)
        if mode == "resume":
            shutil.copytree(begun, folder)
        beyond = MOST_BYTES * number // (LIMITS - 1)
        ended = in_a_copy(lambda folder=folder, beyond=beyond: under_a_limit(folder, beyond))
        reached = in_a_copy(lambda folder=folder: without_a_limit(folder))
        print(json.dumps([beyond, ended, reached]), flush=True)
