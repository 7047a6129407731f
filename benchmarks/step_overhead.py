"""What a guarded step costs over a plain loop with clipping.

Everything at its default, first steps too, and peers.

How: in a forked child two models of one kind, bare and guarded, each with a torch loader of its
own, train in blocks of 20 steps that take turns, in random order; in every second child the guarded
model is made first. Compared is the CPU time of all threads (user and system) of the two blocks of
a pair, so saves beside the loop count. *First*: the first 400 steps of both, the very first
included, as the ratio or difference of the sums, one sample for each child. *Warm*: after 500
steps, one sample for each pair of blocks.

*Alone*: one loop in a child of its own, all with the guard's malloc setting; the CPU time of steps
401 to 800 of a guarded child over that of the bare one started in the same round, in random order.

*Peers*: bare loop, Guard, Accelerate, Lightning and transformers' Trainer in one child, the same
model and AdamW for each, blocks in turn as above; those that own their loop wait in a callback, in
a thread. They save nothing and log nothing; the Guard has its defaults.

Memory: the peak of resident bytes in the third to fifth step over what was there before the model,
guarded less bare.
"""

from __future__ import annotations

import itertools
import logging
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from benchmarks.forks import single_threaded, value_in_a_fork
from benchmarks.process_memory import peak_bytes, reset_peak, resident_bytes
from benchmarks.results_file import Result, read_options
from benchmarks.step_models import MAX_GRAD_NORM, Job, find_batch_size
from holdfast import Guard
from holdfast.memory.host_memory import set_malloc_threshold

_ENDLESS = 10**6
_BLOCK, _FIRST, _WARM_AFTER = 20, 400, 500
# Kind, milliseconds (None: a batch of 64 or 4), children, most at first and when warm: ratios, of
# tiny microseconds.
_TIMED: tuple[tuple[str, float | None, int, float, float], ...] = (
    ("tiny", None, 6, 120.0, 80.0),
    ("mlp512", None, 3, 1.03, 1.015),
    ("mlp", 10.0, 3, 1.03, 1.015),
    ("conv", 10.0, 3, 1.03, 1.015),
    ("mlp", 50.0, 1, 1.03, 1.005),
)
_MEMORY_CASES = (("mlp", 16384), ("wide_conv", 64), ("wide_conv", 256))

Clock: TypeAlias = Callable[[], float]
Loop: TypeAlias = Callable[[int], float]
"""Makes so many steps, a multiple of the block, and returns their seconds, of CPU time if no clock
is named."""


class _Same(torch.utils.data.Dataset[Any]):
    """The batch of a job, again and again."""

    def __init__(self, batch: Callable[[], Any]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, _: int) -> Any:
        return self._batch()


def _loader(batch: Callable[[], Any]) -> Any:
    return torch.utils.data.DataLoader(_Same(batch), batch_size=None)


def _stepping(
    step: Callable[[Any], Any], batches: Iterator[Any], clock: Clock = time.process_time
) -> Loop:
    def run(steps: int) -> float:
        started = clock()
        for _ in range(steps):
            step(next(batches))
        return clock() - started

    return run


def bare(job: Job, clock: Clock = time.process_time) -> Loop:
    return _stepping(job.bare_step, iter(_loader(lambda: job.batch)), clock)


def guarded(job: Job, clock: Clock = time.process_time) -> Loop:
    guard = Guard(
        tempfile.mkdtemp(),
        model=job.model,
        optimizer=job.optimizer,
        loader=_loader(lambda: job.batch),
        max_grad_norm=MAX_GRAD_NORM,
    )
    return _stepping(
        lambda batch: guard.step(batch, job.loss), guard.batches(max_steps=_ENDLESS), clock
    )


def accelerated(job: Job, clock: Clock = time.process_time) -> Loop:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=job.device == "cpu")
    model, optimizer, loader = accelerator.prepare(
        job.model, job.optimizer, _loader(lambda: job.batch)
    )

    def step(batch: Any) -> None:
        inputs, labels = batch
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()

    return _stepping(step, iter(loader), clock)


class _Turns:
    """Lets a training that owns its loop go on for some steps at a time, in a thread that waits
    in between.
    """

    def __init__(self, train: Callable[[Callable[[], None]], None], clock: Clock) -> None:
        self._clock = clock
        self._left, self._go, self._done = 0, threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=train, args=(self._stepped,), daemon=True).start()
        self._wait_for_first = True

    def _stepped(self) -> None:
        """Called after each step, and once before the first."""
        self._left -= 1
        if self._left <= 0:
            self._done.release()
            self._go.acquire()

    def run(self, steps: int) -> float:
        if self._wait_for_first:
            self._done.acquire()
            self._wait_for_first = False
        self._left = steps
        started = self._clock()
        self._go.release()
        self._done.acquire()
        return self._clock() - started


def lightning(job: Job, clock: Clock = time.process_time) -> Loop:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

    def train(stepped: Callable[[], None]) -> None:
        class Waits(pl.Callback):
            def on_train_start(self, *_: Any) -> None:
                stepped()

            def on_train_batch_end(self, *_: Any) -> None:
                stepped()

        trainer = pl.Trainer(
            max_steps=_ENDLESS,
            callbacks=[Waits()],
            gradient_clip_val=MAX_GRAD_NORM,
            accelerator="cpu" if job.device == "cpu" else "gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tempfile.mkdtemp(),
        )
        trainer.fit(Module(), _loader(lambda: job.batch))

    return _Turns(train, clock).run


def transformers(job: Job, clock: Clock = time.process_time) -> Loop:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), labels)}

    def train(stepped: Callable[[], None]) -> None:
        class Waits(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                stepped()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                stepped()

        class Trains(Trainer):
            def get_train_dataloader(self) -> Any:
                named = _loader(lambda: dict(zip(("inputs", "labels"), job.batch, strict=True)))
                return self.accelerator.prepare(named)

        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=_ENDLESS,
            max_grad_norm=MAX_GRAD_NORM,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=job.device == "cpu",
        )
        constant = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda _: 1.0)
        Trains(
            Model(), arguments, callbacks=[Waits()], optimizers=(job.optimizer, constant)
        ).train()

    return _Turns(train, clock).run


PEERS: dict[str, Callable[..., Loop]] = {
    "bare": bare,
    "guarded": guarded,
    "accelerate": accelerated,
    "lightning": lightning,
    "transformers' Trainer": transformers,
}


def in_turns(made: Sequence[tuple[str, Loop]], pairs: int, seed: int) -> list[dict[str, float]]:
    """Return the CPU seconds of a step of each loop, for each round of blocks in random order."""
    chance = random.Random(seed)
    return [
        {name: run(_BLOCK) / _BLOCK for name, run in chance.sample(made, len(made))}
        for _ in range(pairs)
    ]


def compared(
    names: Sequence[str], kind: str, size: int, warm_pairs: int, seed: int
) -> tuple[Any, Any]:
    """Return the rounds of blocks of the first 400 steps, and those after 500."""
    set_malloc_threshold("auto")  # as the guard does, for all
    order = list(names) if seed % 2 else list(names)[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("lightning.pytorch", "transformers", "accelerate", "holdfast"):
            logging.getLogger(name).setLevel(logging.ERROR)
        made = [(name, PEERS[name](Job(kind, size))) for name in order]
        first = in_turns(made, _FIRST // _BLOCK, seed)
        in_turns(made, (_WARM_AFTER - _FIRST) // _BLOCK, seed)
        return first, in_turns(made, warm_pairs, seed)


def alone(name: str, kind: str, size: int) -> float:
    """Return the CPU seconds of a step of one loop in this process, after 400."""
    set_malloc_threshold("auto")
    run = PEERS[name](Job(kind, size))
    run(_FIRST)
    return run(_FIRST) / _FIRST


def measure_time(result: Result, *, quick: bool) -> None:
    for kind, milliseconds, children, at_first, when_warm in _TIMED[: 2 if quick else None]:
        size = {"tiny": 4, "mlp512": 64}.get(kind, 0)
        if milliseconds is not None:
            size = value_in_a_fork(partial(find_batch_size, kind, milliseconds), kind).batch_size
        name = kind if milliseconds is None else f"{kind}, {milliseconds:g} ms"
        first, warm = [], []
        for seed in range(1 if quick else children):
            run = partial(compared, ("bare", "guarded"), kind, size, 4 if quick else 20, seed)
            found = value_in_a_fork(run, name)
            first.append(
                [
                    sum(each[loop] for each in found[0]) / len(found[0])
                    for loop in ("bare", "guarded")
                ]
            )
            warm += [(each["bare"], each["guarded"]) for each in found[1]]
        result.parameters[name] = {"batch_size": size}
        for when, samples, most in (
            ("first 400 steps", first, at_first),
            ("warm", warm, when_warm),
        ):
            if kind == "tiny":
                added = [1e6 * (mine - plain) for plain, mine in samples]
                result.add_samples(
                    f"{name}, {when}: added to a step", "us", added, at_most=most, digits=1
                )
            else:
                ratios = [mine / plain for plain, mine in samples]
                what = f"{name}, {when}: CPU time of guarded over bare"
                result.add_samples(what, "ratio", ratios, at_most=most)
        result.add_samples(f"{name}: bare step", "ms", [1000 * plain for plain, _ in warm])


def measure_alone(result: Result, rounds: int) -> None:
    chance, ratios = random.Random(0), []
    for _ in range(rounds):
        names = chance.sample(["bare", "guarded"], 2)
        found = {name: value_in_a_fork(partial(alone, name, "mlp512", 64), name) for name in names}
        ratios.append(found["guarded"] / found["bare"])
    result.add_samples(
        "mlp512, alone: CPU time of guarded over bare", "ratio", ratios, at_most=1.015
    )


def measure_peers(result: Result, children: int, pairs: int) -> None:
    first: dict[str, list[float]] = {name: [] for name in PEERS if name != "bare"}
    warm: dict[str, list[float]] = {name: [] for name in PEERS if name != "bare"}
    for seed in range(children):
        found = value_in_a_fork(partial(compared, tuple(PEERS), "mlp512", 64, pairs, seed), "peers")
        for name in first:
            first[name].append(
                sum(each[name] for each in found[0]) / sum(each["bare"] for each in found[0])
            )
            warm[name] += [each[name] / each["bare"] for each in found[1]]
    for when, samples in (("first 400 steps", first), ("warm", warm)):
        for name, ratios in samples.items():
            result.add_samples(
                f"peers, mlp512, {when}: CPU time of {name} over bare", "ratio", ratios
            )


def peak_of_loop(kind: str, batch_size: int, name: str) -> tuple[int, int]:
    """Return the peak of resident bytes of a loop beyond what was there before, and the bytes of
    mutable buffers.
    """
    set_malloc_threshold("auto")
    before = resident_bytes()
    job = Job(kind, batch_size)
    run = PEERS[name](job)
    run(2)
    reset_peak()
    run(3)
    return peak_bytes() - before, job.mutable_buffer_bytes()


def measure_memory(result: Result, kind: str, batch_size: int, repetitions: int) -> None:
    name, buffers = f"{kind}, batch of {batch_size}", 0
    peaks: dict[str, list[int]] = {"bare": [], "guarded": []}
    for _, loop in itertools.product(range(repetitions), peaks):
        peak, buffers = value_in_a_fork(partial(peak_of_loop, kind, batch_size, loop), name)
        peaks[loop].append(peak)
    extra = [after - before for before, after in zip(peaks["bare"], peaks["guarded"], strict=True)]
    beyond = [(more - buffers) / peak for more, peak in zip(extra, peaks["bare"], strict=True)]
    result.parameters[f"{name}: mutable_buffer_bytes"] = buffers
    result.add_samples(
        f"{name}: peak of the bare loop", "MiB", [peak / 2**20 for peak in peaks["bare"]], digits=2
    )
    result.add_samples(
        f"{name}: extra peak of the guarded loop", "MiB", [more / 2**20 for more in extra], digits=2
    )
    result.add_samples(
        f"{name}: extra peak less mutable buffers, over bare peak", "ratio", beyond, at_most=0.01
    )


def main() -> None:
    single_threaded()
    options = read_options("step_overhead", __doc__ or "")
    quick = options.quick
    result = Result(
        options=options, parameters={"block": _BLOCK, "first": _FIRST, "warm_after": _WARM_AFTER}
    )
    measure_time(result, quick=quick)
    measure_alone(result, 1 if quick else 5)
    measure_peers(result, 1 if quick else 2, 2 if quick else 20)
    for kind, batch_size in _MEMORY_CASES[: 1 if quick else None]:
        measure_memory(result, kind, batch_size, 2 if quick else 5)
    result.write()


if __name__ == "__main__":
    main()
