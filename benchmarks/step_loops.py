"""The loops whose steps are timed: a plain one, guarded ones, and those of other frameworks.

Each loop is created for a `Job`, and then makes as many steps at a time as it is asked to. Several
loops can therefore take turns in one process, so that whatever else the machine does affects all of
them.
"""

from __future__ import annotations

import logging
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

from benchmarks.step_models import MAX_GRAD_NORM, Job
from holdfast import Guard

BLOCK_STEPS = 20
ENDLESS_STEPS = 10**6

Clock: TypeAlias = Callable[[], float]
Loop: TypeAlias = Callable[[int], float]
"""Makes a number of steps, and returns the seconds that they took by the loop's clock."""


class _RepeatedBatch(torch.utils.data.Dataset[Any]):
    """A data set in which every item is the batch that a job has at that moment."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __len__(self) -> int:
        return ENDLESS_STEPS

    def __getitem__(self, index: int) -> Any:
        return self._job.batch


class _NamedBatch(_RepeatedBatch):
    """The same with names for the tensors, as transformers' Trainer needs them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, labels = super().__getitem__(index)
        return {"inputs": inputs, "labels": labels}


def _loader(data: _RepeatedBatch) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(data, batch_size=None)


def _looping(step: Callable[[Any], Any], batches: Iterator[Any], clock: Clock) -> Loop:
    def run(steps: int) -> float:
        started = clock()
        for _ in range(steps):
            step(next(batches))
        return clock() - started

    return run


def bare(job: Job, clock: Clock = time.process_time) -> Loop:
    """Create a plain PyTorch loop."""
    return _looping(job.bare_step, iter(_loader(_RepeatedBatch(job))), clock)


def guarded(job: Job, clock: Clock = time.process_time, **policy: Any) -> Loop:
    """Create a guarded loop.

    Args:
        job: What it trains.
        clock: What its steps are timed with.
        policy: Fields of `Policy` that are not to have their defaults.
    """
    guard = Guard(
        tempfile.mkdtemp(),
        model=job.model,
        optimizer=job.optimizer,
        loader=_loader(_RepeatedBatch(job)),
        max_grad_norm=MAX_GRAD_NORM,
        **policy,
    )
    batches = guard.batches(max_steps=ENDLESS_STEPS)
    return _looping(lambda batch: guard.step(batch, job.loss), batches, clock)


def accelerated(job: Job, clock: Clock = time.process_time) -> Loop:
    """Create a loop as in Accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=job.device == "cpu")
    model, optimizer, loader = accelerator.prepare(
        job.model, job.optimizer, _loader(_RepeatedBatch(job))
    )

    def step(batch: Any) -> None:
        inputs, labels = batch
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()

    return _looping(step, iter(loader), clock)


class _Turns:
    """Lets a framework that owns its loop make some steps at a time.

    The framework trains in a thread of its own, and waits in a callback until more steps are asked
    for. The thread never ends.

    Args:
        train: Trains, and calls its argument once before the first step and after each step.
        clock: What the steps are timed with.
    """

    def __init__(self, train: Callable[[Callable[[], None]], None], clock: Clock) -> None:
        self._train = train
        self._clock = clock
        self._steps_left = 0
        self._resumed = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        # Why the training has ended, which must never happen.
        self._failure: BaseException | None = None
        threading.Thread(target=self._train_in_turns, daemon=True).start()
        self._wait()

    def run(self, steps: int) -> float:
        """Make a number of steps; see `Loop`."""
        self._steps_left = steps
        started = self._clock()
        self._resumed.release()
        self._wait()
        return self._clock() - started

    def _wait(self) -> None:
        self._paused.acquire()
        if self._failure is not None:
            raise RuntimeError("the framework's training has ended") from self._failure

    def _train_in_turns(self) -> None:
        try:
            self._train(self._note_step)
        except BaseException as error:  # noqa: BLE001 - it is raised where steps are asked for
            self._failure = error
        else:
            self._failure = RuntimeError("no step is left")
        self._paused.release()

    def _note_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._paused.release()
            self._resumed.acquire()


def lightning(job: Job, clock: Clock = time.process_time) -> Loop:
    """Create a loop of Lightning's Trainer, which saves and logs nothing."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            inputs, labels = batch
            return F.cross_entropy(self.model(inputs), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

    def train(note_step: Callable[[], None]) -> None:
        class Turns(pl.Callback):
            def on_train_start(self, *_: Any) -> None:
                note_step()

            def on_train_batch_end(self, *_: Any) -> None:
                note_step()

        trainer = pl.Trainer(
            max_steps=ENDLESS_STEPS,
            callbacks=[Turns()],
            gradient_clip_val=MAX_GRAD_NORM,
            accelerator="cpu" if job.device == "cpu" else "gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tempfile.mkdtemp(),
        )
        trainer.fit(Module(), _loader(_RepeatedBatch(job)))

    return _Turns(train, clock).run


def transformers(job: Job, clock: Clock = time.process_time) -> Loop:
    """Create a loop of transformers' Trainer, which saves and logs nothing."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.model(inputs), labels)}

    class TrainerWithLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(_loader(_NamedBatch(job)))

    def train(note_step: Callable[[], None]) -> None:
        class Turns(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                note_step()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                note_step()

        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=ENDLESS_STEPS,
            max_grad_norm=MAX_GRAD_NORM,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=job.device == "cpu",
        )
        constant = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda _: 1.0)
        trainer = TrainerWithLoader(
            Model(), arguments, callbacks=[Turns()], optimizers=(job.optimizer, constant)
        )
        trainer.train()

    return _Turns(train, clock).run


LOOPS: dict[str, Callable[[Job, Clock], Loop]] = {
    "bare": bare,
    "guarded": guarded,
    "now": partial(guarded, decide="now"),
    "late": partial(guarded, decide="late"),
    "accelerate": accelerated,
    "lightning": lightning,
    "transformers' Trainer": transformers,
}
"""The loops by name. Those named after a decision are guarded, with that `Policy.decide`."""

FRAMEWORKS = ("accelerate", "lightning", "transformers' Trainer")


def silence_frameworks() -> None:
    """Log nothing but errors."""
    for name in ("lightning.pytorch", "transformers", "accelerate", "holdfast"):
        logging.getLogger(name).setLevel(logging.ERROR)


def in_turns(
    loops: Sequence[tuple[str, Loop]], rounds: int, seed: int, block_steps: int = BLOCK_STEPS
) -> list[dict[str, float]]:
    """Run loops in turns, a block of steps at a time, in random order.

    Args:
        loops: The loops, each with its name.
        rounds: How often each of them has a turn.
        seed: Decides the order.
        block_steps: Steps of a turn.

    Returns:
        For each round the seconds of a step by loop.
    """
    order = random.Random(seed)
    return [
        {name: run(block_steps) / block_steps for name, run in order.sample(loops, len(loops))}
        for _ in range(rounds)
    ]
