"""Train while the last saves fail, and end in one of the ways in which programs end.

    python not_saved.py '{"run_dir": ..., "fault": "no_room", "end": "returns"}'

The fault comes after step 6 of 12. "after the loop" is printed where a script may still write its
weights to another disk.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast

FAULT_AT_STEP = 6
LAST_STEP = 12

torch.set_num_threads(1)
request = json.loads(sys.argv[1])
run_dir = Path(request["run_dir"])
before = resource.getrlimit(resource.RLIMIT_FSIZE)


# --- what fails


def no_room() -> None:
    """Let the system refuse every file of this process that is longer than some words."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))


def room_again() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_such_disk() -> None:
    """Take away the disk that the checkpoints lie on."""
    (run_dir / "checkpoints").rename(run_dir.with_name("unmounted"))
    (run_dir / "checkpoints").symlink_to(run_dir.with_name("not there"))


def no_directory() -> None:
    """Put something else in the place of the run directory."""
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.write_bytes(b"")


def no_permission() -> None:
    """Take away the right to write into the run directory; it does not bind the administrator."""
    (run_dir / "checkpoints").chmod(0o555)
    if os.geteuid() == 0:
        for path in (run_dir, *run_dir.parents[:4]):
            path.chmod(0o755)
        os.seteuid(65534)


# --- the training


def make_guard(directory: Path = run_dir) -> tuple[holdfast.Guard, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    guard = holdfast.Guard(
        directory,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        loader=holdfast.DataLoader(list(torch.randn(64, 64)), batch_size=4),
        save_interval_steps=2,
        async_save=request.get("async_save", False),
        check_split=False,
    )
    return guard, model


guard, model = make_guard()
fault = globals()[request["fault"]]


def train(until: int = LAST_STEP) -> None:
    for batch in guard.batches(max_steps=until):
        guard.step(batch, lambda x: model(x).square().mean())
        if guard.global_step == FAULT_AT_STEP:
            fault()
        if guard.global_step == 9 and request["end"] == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
        if guard.global_step == 9 and request["end"] == "breaks":
            break
        if guard.global_step == 9 and request["end"] == "room before the end":
            room_again()


def train_without_a_loop_of_the_guard() -> None:
    for step in range(1, LAST_STEP + 1):
        guard.step(torch.randn(4, 64), lambda x: model(x).square().mean())
        if step == FAULT_AT_STEP:
            fault()


# --- how it ends


def close_late() -> None:
    room_again()
    guard.close()


def fork_a_child() -> None:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def train_another_run() -> Any:
    room_again()
    other, its_model = make_guard(run_dir.with_name("other"))
    for batch in other.batches(max_steps=4):
        other.step(batch, lambda x: its_model(x).square().mean())


def end() -> None:
    how = request["end"]
    if how == "exit with 0":
        sys.exit(0)
    if how == "exit with 3":
        sys.exit(3)
    if how == "exit with words":
        sys.exit("nothing to be done")
    if how == "raises":
        raise RuntimeError("of the script")
    if how == "closed later":
        close_late()
    if how == "closed at exit":
        atexit.register(close_late)
    if how == "trains on":
        room_again()
        train(LAST_STEP + 4)
    if how == "forks":
        fork_a_child()
    if how == "another run is saved":
        train_another_run()


if request["end"] == "has no loop":
    train_without_a_loop_of_the_guard()
else:
    train()
print("after the loop", flush=True)
end()
