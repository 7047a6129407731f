"""Kills of a training on several ranks.

Does it go on where it was, with the weights of the run nobody disturbed?

How: each schedule trains a small model on two or three ranks under ``torchrun``, is killed by
SIGKILL at random steps, once or twice, and is started again until it ends. Killed is one rank, all
ranks at once, or the launcher. The launcher is always under ``holdfast run``, which starts it
again; so are every second of the other schedules. In a third of the schedules the number of ranks
changes at each start; the batch of all ranks together stays the same. A second kill comes 16 steps
after what the first had let be made, or later: ``holdfast run`` takes one within 10 for the same
again.

The model has dropout where the number of ranks stays, samples are augmented at random, and each
epoch is shuffled. Compared are the weights at the end with those of an undisturbed run: every bit
where the number of ranks stays, else relative to their norm. *Unusable*: the next start does not go
on from the run directory, or does not end in 90 s.

To reach: 60 of 60 schedules with the same weights (at most 1e-6 apart where the number of ranks
changed), 0 unusable.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results_file import Result, read_options

_BATCH, _SAMPLES, _EPOCHS, _WIDTH = 12, 96, 8, 16
_STEPS = _EPOCHS * _SAMPLES // _BATCH
_LIMIT_SECONDS, _APART = 90.0, 16
_ROOT = Path(__file__).parents[1]
_BIN = Path(sys.executable).parent
_VICTIMS = ("one rank", "all ranks", "launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When who is killed.

    Before each kill and at the end the training is started on so many ranks.
    """

    kind: str  # "ddp" or "fsdp"
    victim: str
    supervised: bool  # by ``holdfast run``, which starts it again
    worlds: tuple[int, ...]
    kills: tuple[int, ...]  # at these steps

    @property
    def changes(self) -> bool:
        """Return whether the number of ranks changes."""
        return len(set(self.worlds)) > 1


@dataclass(slots=True)
class Outcome:
    """How a schedule has ended."""

    schedule: Schedule
    distance: float | None = None  # from the undisturbed weights; None: there are none
    exact: bool = False
    problems: list[str] = field(default_factory=list)


# --- what trains


def train(kind: str, folder: Path, *, dropout: bool) -> None:
    """Train as one rank."""
    import torch
    from torch import distributed, nn

    from holdfast import DataLoader, Guard

    class Noisy(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return _SAMPLES

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((_WIDTH,), index / _SAMPLES) + 0.1 * torch.randn(_WIDTH)

    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(_WIDTH, 32), nn.Tanh(), nn.Dropout(0.1 * dropout), nn.Linear(32, 1)
    )
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (net[0], net[3], net):
            fully_shard(layer)
        model: Any = net
    else:
        model = nn.parallel.DistributedDataParallel(net)
    guard = Guard(
        folder / "run",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loader=DataLoader(Noisy(), batch_size=_BATCH // world_size, shuffle=True),
        max_grad_norm=1.0,
        save_interval_steps=3,
    )
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    for batch in guard.batches(max_epochs=_EPOCHS):
        guard.step(batch, lambda values: (model(values).squeeze(1) - values.sum(1)).square().mean())
        if rank == 0:
            (folder / "step").write_text(str(guard.global_step))
        time.sleep(0.01)
    whole = [
        p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()
    ]
    if rank == 0:
        torch.save(torch.cat([p.detach().flatten() for p in whole]), folder / "weights.tmp")
        (folder / "weights.tmp").rename(folder / "weights")
    distributed.destroy_process_group()


# --- who kills


def start(schedule: Schedule, folder: Path, world_size: int) -> subprocess.Popen[bytes]:
    """Start the launcher, or who supervises it, in a session of its own."""
    for name in ("step", "pid0", "pid1", "pid2"):
        (folder / name).unlink(missing_ok=True)
    dropout = "no dropout" if schedule.changes else "dropout"
    program = ["-m", "benchmarks.rank_kills", "--train", schedule.kind, str(folder), dropout]
    command = [str(_BIN / "torchrun"), "--standalone", f"--nproc-per-node={world_size}", *program]
    if schedule.supervised:
        of_run = [
            "--run-dir",
            str(folder / "supervised"),
            "--restart-delay",
            "0",
            "--max-restarts",
            "5",
        ]
        command = [str(_BIN / "holdfast"), "run", *of_run, "--", *command]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path[1:]]),
            },
        )


def read_number(path: Path) -> int:
    """Return the number in a file, 0 without one."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def launcher_of(rank_pid: int) -> int:
    """Return the parent of a rank."""
    return int(Path(f"/proc/{rank_pid}/stat").read_text().rpartition(")")[2].split()[1])


def strike(schedule: Schedule, folder: Path, world_size: int, chance: random.Random) -> None:
    """Kill by SIGKILL."""
    ranks = [read_number(folder / f"pid{rank}") for rank in range(world_size)]
    victims = {
        "one rank": [chance.choice(ranks)],
        "all ranks": ranks,
        "launcher": [launcher_of(ranks[0])],
    }
    for name in ("step", "pid0", "pid1", "pid2"):
        (folder / name).unlink(missing_ok=True)
    for pid in victims[schedule.victim]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def play(schedule: Schedule, folder: Path, seed: int) -> Outcome:
    """Play a schedule to its end."""
    import torch

    chance, outcome = random.Random(seed), Outcome(schedule)
    process: subprocess.Popen[bytes] | None = None
    reached = 0  # by ranks that went on for a moment when the launcher was killed
    for number, world_size in enumerate(schedule.worlds):
        if process is None:
            process = start(schedule, folder, world_size)
        until = time.monotonic() + _LIMIT_SECONDS
        at = schedule.kills[number] if number < len(schedule.kills) else None
        has_begun = False
        while process.poll() is None and time.monotonic() < until:
            step = read_number(folder / "step")
            has_begun = has_begun or all(
                (folder / f"pid{rank}").exists() for rank in range(world_size)
            )
            if not has_begun:
                reached = max(reached, step)
            elif at is not None and step >= (max(at, reached + _APART) if number else at):
                break
            time.sleep(0.005)
        if process.poll() is None and at is not None and time.monotonic() < until:
            strike(schedule, folder, world_size, chance)
            if schedule.supervised and not schedule.changes:
                continue  # it is started again by its supervisor
            until = time.monotonic() + _LIMIT_SECONDS
            if schedule.supervised:
                process.terminate()
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        if process.poll() is None:
            outcome.problems.append(f"start {number} did not end")
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process = None
    path = folder / "weights"
    if path.exists():
        found, expected = (
            torch.load(path),
            torch.load(folder.parent / reference_name(schedule) / "weights"),
        )
        outcome.distance = float((found - expected).norm() / expected.norm())
        outcome.exact = torch.equal(found, expected)
    else:
        outcome.problems.append(
            "it did not get to its end: " + (folder / "output").read_text(errors="replace")[-600:]
        )
    return outcome


def reference_name(schedule: Schedule) -> str:
    """Return the name of the undisturbed run that a schedule is compared with."""
    return f"{schedule.kind}-{schedule.worlds[-1]}-{'plain' if schedule.changes else 'dropout'}"


def any_schedule(chance: random.Random, number: int, kinds: tuple[str, ...]) -> Schedule:
    """Return a schedule; every third changes the number of ranks."""
    first_kill = chance.randrange(1, _STEPS - 1)
    later = range(first_kill + _APART, _STEPS - 1)
    kills = (first_kill, chance.choice(later)) if later and chance.random() < 0.6 else (first_kill,)
    first = chance.choice((2, 3))
    changes = number % 3 == 2
    worlds = tuple(5 - first if changes and at % 2 else first for at in range(len(kills) + 1))
    victim = _VICTIMS[number // 3 % (2 if changes else 3)]
    supervised = victim == "launcher" or number % 2 == 0
    return Schedule(
        kind=kinds[number % len(kinds)],
        victim=victim,
        supervised=supervised,
        worlds=worlds,
        kills=kills,
    )


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], Path(sys.argv[3]), dropout=sys.argv[4] == "dropout")
        return
    options = read_options("rank_kills", __doc__ or "")
    chance, count, kinds = random.Random(0), 4 if options.quick else 60, ("ddp", "fsdp")
    result = Result(
        options=options,
        parameters={"schedules": count, "steps": _STEPS, "batch of all ranks": _BATCH},
    )
    schedules = [any_schedule(chance, number, kinds) for number in range(count)]
    outcomes = []
    with tempfile.TemporaryDirectory() as root:
        for each in {reference_name(schedule): schedule for schedule in schedules}.values():
            worlds = each.worlds if each.changes else each.worlds[-1:]
            undisturbed = Schedule(
                kind=each.kind, victim="nobody", supervised=False, worlds=worlds, kills=()
            )
            folder = Path(root, reference_name(each))
            folder.mkdir()
            if start(undisturbed, folder, each.worlds[-1]).wait(_LIMIT_SECONDS):
                raise RuntimeError((folder / "output").read_text(errors="replace")[-2000:])
        for number, schedule in enumerate(schedules):
            folder = Path(root, str(number))
            folder.mkdir()
            outcomes.append(play(schedule, folder, number))
            print(
                f"  {schedule}: exact {outcomes[-1].exact}, {outcomes[-1].distance},"
                f" {outcomes[-1].problems}",
                flush=True,
            )
    add(result, outcomes)
    result.write()


def add(result: Result, outcomes: list[Outcome]) -> None:
    """Add the figures."""
    stays = [outcome for outcome in outcomes if not outcome.schedule.changes]
    changes = [outcome for outcome in outcomes if outcome.schedule.changes]
    exact = sum(outcome.exact for outcome in stays)
    result.add_count(
        "same number of ranks: weights of the undisturbed run, every bit",
        exact,
        len(stays),
        expected=len(stays),
    )
    near = sum(outcome.distance is not None and outcome.distance <= 1e-6 for outcome in changes)
    result.add_count(
        "other numbers of ranks: weights within 1e-6", near, len(changes), expected=len(changes)
    )
    unusable = sum(bool(outcome.problems) for outcome in outcomes)
    result.add_count("unusable run directories", unusable, len(outcomes), expected=0)
    distances = [outcome.distance for outcome in changes if outcome.distance is not None]
    result.add_samples(
        "other numbers of ranks: distance of the weights", "ratio", distances, digits=9
    )
    result.notes += [
        f"{outcome.schedule}: {problem}" for outcome in outcomes for problem in outcome.problems
    ]


if __name__ == "__main__":
    main()
