"""Train to step 9 of 12, leave the loop there, and end in one of the ways in which programs end.

    python left_loop.py '{"run_dir": ..., "leave": "break", "then": "nothing"}'

The newest checkpoint is of step 8 unless something saves later. With ``"async_save"`` it may be an
earlier one. After the step ``"signal_at"`` comes SIGTERM.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys

import torch

import holdfast

LEFT_AT_STEP = 9

torch.set_num_threads(1)
request = json.loads(sys.argv[1])


def make_guard(model: torch.nn.Module) -> holdfast.Guard:
    return holdfast.Guard(
        request["run_dir"],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loader=holdfast.DataLoader(torch.randn(48, 4), batch_size=4),
        save_interval_steps=4,
        async_save=request.get("async_save", False),
        check_split=False,
    )


def make_step(batch: torch.Tensor) -> None:
    guard.step(batch, lambda x: model(x).square().mean())
    if guard.global_step == request.get("signal_at"):
        os.kill(os.getpid(), signal.SIGTERM)


# --- how the loop is left


def train_until_break() -> None:
    for batch in guard.batches(max_steps=12):
        make_step(batch)
        if guard.global_step == LEFT_AT_STEP:
            break


def train_with_next() -> None:
    """Keep the iterator to the end of the process, as a script without functions does."""
    global iterator
    iterator = iter(guard.batches(max_steps=12))
    while guard.global_step < LEFT_AT_STEP:
        make_step(next(iterator))


def train_without_batches() -> None:
    while guard.global_step < LEFT_AT_STEP:
        make_step(torch.randn(4, 4))


def train_to_an_error() -> None:
    train_until_break()
    raise RuntimeError("of the script")


# --- what follows


def train_on() -> None:
    for batch in guard.batches(max_steps=12):
        make_step(batch)


def run_the_cell_again() -> None:
    global guard
    if request["leave"] == "next":
        iterator.close()
    guard = make_guard(model)
    train_on()


def delete_the_guard() -> None:
    global guard
    del guard


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
guard = make_guard(model)
leave = {
    "break": train_until_break,
    "next": train_with_next,
    "no loop": train_without_batches,
    "error": train_to_an_error,
}
leave[request["leave"]]()
then = {
    "nothing": lambda: None,
    "close": lambda: guard.close(),
    "close at exit": lambda: atexit.register(guard.close),
    "with": lambda: guard.__exit__(None, None, None),
    "train on": train_on,
    "new guard": run_the_cell_again,
    "delete": delete_the_guard,
}
then[request["then"]]()
