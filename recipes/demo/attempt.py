"""One attempt of the demo's training, in a process of its own, with the faults that must be
injected from inside.

    python -m recipes.demo.attempt '{"run_dir": ..., "trace": ..., "memory": {...}, "sample": {...},
    "disk": {...},
                                      "workers": "folder for marks"}'

After each step it appends step and a digest of all weights and momenta to the trace, so that two
runs can be compared step by step, also when one of them was killed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file

from holdfast.checkpoint.store import Store
from holdfast.guard.guard import Guard
from holdfast.guard.result import StepResult
from holdfast.testing import data_segment_bytes, fill_disk, limit_memory
from recipes.demo.digits import Job, train, train_bare

_DAMAGED = 700
_NEVER_MET = 2**45
# What a step needs beyond the base differs by 30 MiB from run to run; splitting must not be the
# first answer.
_FIRST_HEADROOM_BYTES = 88 * 2**20
_LESS_EACH_STEP_BYTES = 4 * 2**20
_GIVEN_BACK_BYTES = 32 * 2**20  # a save's threads come and go: stacks of mostly 8 MiB, and arenas
_SMALL_FILE_BYTES = 64 * 1024
_TIMEOUT_SECONDS = 2

Write = Callable[..., None]


def digest(job: Job) -> str:
    """Return a digest of every weight, buffer and optimizer state, bit for bit."""
    tensors = [*job.model.state_dict().values()]
    for state in job.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


class DamagedSample:
    """A sample whose pixels are NaN from one step on, until a batch was passed over because of
    it.
    """

    def __init__(self, job: Job, from_step: int, *, over: bool) -> None:
        self._images, self._from_step, self._over = job.data.images, from_step, over
        self._sound = self._images[_DAMAGED].clone()

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Damage the sample, or put it right."""
        self._over = self._over or skipped
        if self._over:
            self._images[_DAMAGED] = self._sound
        elif step >= self._from_step:
            self._images[_DAMAGED] = float("nan")


class _UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("what raised cannot be pickled")
        self.reader = lambda: None


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> NoReturn:
    raise _UnpicklableError


class OnceFaulty:
    """A dataset of which three samples do something to the worker that reads them, each the first
    time only.

    `marks` is the folder in which it is noted what has happened.
    """

    def __init__(self, samples: Any, marks: Path) -> None:
        self._samples = samples
        self._marks = marks

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        """Return a sample, unless it is the first time for one of three."""
        faults: dict[int, Callable[[], object]] = {
            100: _kill,
            200: threading.Event().wait,
            300: _raise,
        }
        mark = self._marks / str(index)
        if index in faults and multiprocessing.parent_process() is not None and not mark.exists():
            mark.touch()
            faults[index]()
        return self._samples[index]


class ShrinkingMemory:
    """Less memory after each step, until the guard has answered with a certain decision.

    Then some is given back.

    Else the next save would need what is not there, and force a further decision, which promises
    less.
    """

    def __init__(self, from_step: int, until: str) -> None:
        # A guard that is made under a limit has malloc give back what is freed
        limit_memory(_NEVER_MET)
        self._from_step, self._until = from_step, until
        self._headroom = _FIRST_HEADROOM_BYTES
        self._answered = False
        # Counted from one moment on: what a writer holds just now is no measure
        self._base: int | None = None

    def after_step(self, guard: Guard) -> None:
        """Set the limit for the next step."""
        if guard.global_step >= self._from_step:
            if not self._answered:
                self._answered = any(event.kind == self._until for event in guard.events())
                self._headroom += _GIVEN_BACK_BYTES if self._answered else -_LESS_EACH_STEP_BYTES
            now = data_segment_bytes()
            self._base = self._base or now
            limit_memory(self._base + self._headroom - now)


def full_disk(
    guard: Guard, store: Store, first_step: int, last_step: int, filler: str | None
) -> None:
    """Let no file be written from one step to another, at whose end the older checkpoints must
    verify.

    `filler` is the file that fills a small disk; None: the system refuses files above 64 KiB
    instead, where nobody may mount a small disk.
    """
    if guard.global_step == first_step:
        if filler is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALL_FILE_BYTES, resource.RLIM_INFINITY))
        else:
            fill_disk(Path(filler), leave_bytes=_SMALL_FILE_BYTES)
    elif guard.global_step == last_step:
        for entry in store.entries():
            entry.verify()  # raises, and the attempt ends without a last line in its trace
        if filler is None:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
        else:
            Path(filler).unlink()


def _train_bare(request: dict[str, Any], write: Write) -> tuple[Job, int]:
    sample: DamagedSample | None = None

    def after_step(job: Job, step: int, skipped: bool) -> None:  # noqa: FBT001
        nonlocal sample
        write(job, step)
        if "sample" in request:
            sample = sample or DamagedSample(job, **request["sample"], over=False)
            sample.after_step(step, skipped=skipped)

    return train_bare(after_step)


def _train_guarded(request: dict[str, Any], write: Write) -> tuple[Job, int]:
    run_dir = Path(request["run_dir"])
    store = Store(run_dir / "checkpoints")
    memory = ShrinkingMemory(**request["memory"]) if "memory" in request else None
    sample: DamagedSample | None = None
    last_step = 0

    def after_step(job: Job, guard: Guard, result: StepResult) -> None:
        nonlocal sample, last_step
        last_step = guard.global_step
        write(job, last_step)
        if "sample" in request:
            over = sample is None and any(event.kind == "skip_step" for event in guard.events())
            sample = sample or DamagedSample(job, **request["sample"], over=over)
            sample.after_step(last_step, skipped=result.skipped)
        if memory is not None:
            memory.after_step(guard)
        if "disk" in request:
            full_disk(guard, store, **request["disk"])

    options: dict[str, Any] = {}
    if "workers" in request:
        marks = Path(request["workers"])
        marks.mkdir(exist_ok=True)
        options = {
            "wrap": lambda samples: OnceFaulty(samples, marks),
            "num_workers": 2,
            "timeout": _TIMEOUT_SECONDS,
        }
    return train(run_dir, after_step, **options), last_step


def main(request: dict[str, Any]) -> None:
    """Train, and meet the faults of the request."""
    torch.set_num_threads(1)  # the same number everywhere, or sums are rounded differently
    trace = os.open(request["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(job: Job, step: int, **facts: Any) -> None:
        os.write(trace, json.dumps({"step": step, "digest": digest(job), **facts}).encode() + b"\n")
        if "weights" in request:
            save_file(dict(job.model.state_dict()), f"{request['weights']}/{step}.safetensors")

    job, last_step = (_train_bare if request.get("bare") else _train_guarded)(request, write)
    limit_memory(None)
    write(job, last_step, accuracy=job.accuracy())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
