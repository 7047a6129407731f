"""Guarded training with Hugging Face Accelerate.

Its device, precision and loaders, holdfast's step.

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4) model,
    optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler) guard =
    accelerate_guard(accelerator, model=model, optimizer=optimizer, loader=loader,
    scheduler=scheduler) for batch in guard.batches(max_epochs=3):
        guard.step(batch, lambda batch: model(**batch).loss)

``guard.step`` stands for ``accelerator.accumulate``, ``backward``, ``clip_grad_norm_``,
``optimizer.step``, ``scheduler.step`` and ``zero_grad``. With ``gradient_accumulation_steps`` a
batch of ``guard.batches`` is a window of so many batches of the loader, and the last window of an
epoch has what is left: it is one step, weighted by what it holds. The guard writes the checkpoints
and resumes from them.

``save_state`` and ``load_state`` of the accelerator save and load the same objects; the place in
the data, and what a guard has learnt, are in its own checkpoints only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import BatchError, PolicyError
from holdfast.core.policy.policy import Policy
from holdfast.guard.guard import Guard, take_scale
from holdfast.guard.hosted import agreed
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.splitting.window import Window
from holdfast.integrations.protocol import check_accelerator, excluded, load
from holdfast.loader.loader import DataLoader
from holdfast.recorder.scalars import recorded_too


class PreparedLoader:
    """What a cursor iterates instead of a prepared loader.

    The same batches, from any epoch on, as windows.

    A prepared loader counts epochs by itself and shows a ``state_dict`` that holds nothing, so that
    a run that goes on in a new process would get the order of the first epoch. It also makes each
    batch before the step of the one before it, so that a resume could not give the batch the random
    numbers it had: the loader inside does not.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, steps: int) -> None:
        self._loader = loader
        self._device = device
        self._steps = steps
        self._send = load("accelerate.utils").send_to_device
        self.generator = getattr(loader, "generator", None)
        self.sampler = _Order(loader)

    @property
    def torch_loader(self) -> Any:
        """Return torch's loader if its batches are taken as they are.

        None where Accelerate orders them.
        """
        return self._inner()

    def __len__(self) -> int:
        """Return the windows of an epoch."""
        return -(-len(self._loader) // self._steps)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, or windows of them, on the device."""
        batches = (self._send(batch, self._device) for batch in self._one_by_one())
        if self._steps == 1:
            yield from batches
            return
        while window := list(islice(batches, self._steps)):
            yield Window(window)

    def _one_by_one(self) -> Iterator[Any]:
        loader: Any = self._loader
        inner = self._inner()
        if inner is None:
            yield from loader  # a dispatcher has an order of its own
            return
        if loader.rng_types is not None:
            load("accelerate.utils").synchronize_rng_states(
                loader.rng_types, loader.synchronized_generator
            )
        loader.set_epoch(loader.iteration)
        yield from inner
        loader.iteration += 1

    def _inner(self) -> Any:
        loader: Any = self._loader
        if type(loader).__name__ != "DataLoaderShard" or loader.skip_batches:
            return None
        return getattr(loader, "base_dataloader", None)


class _Order:
    """What decides the order of a loader.

    Where a cursor looks for ``set_epoch`` and for a generator.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        found = (
            loader.get_sampler()
            if hasattr(loader, "get_sampler")
            else getattr(loader, "sampler", None)
        )
        # The sampler of several processes lies deeper, and they draw its order alike.
        self.generator = getattr(loader, "synchronized_generator", None) or getattr(
            found, "generator", None
        )

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration have the order of an epoch."""
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = epoch
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)


class AcceleratedGuard(Guard):
    """A guard of objects that an accelerator has prepared."""

    _batches_of_a_step = 1

    def step(self, batch: Any, loss_fn: LossFunction, **named: Any) -> StepResult:
        """Make one step of a batch of ``guard.batches``, as `Guard.step`.

        Refuse part of a window (H203).
        """
        if self._batches_of_a_step > 1 and not isinstance(batch, Window):
            raise BatchError(
                f"a {type(batch).__name__} is given to guard.step, and "
                f"gradient_accumulation_steps={self._batches_of_a_step}",
                limit=(
                    "each call makes a whole step, so a loop over the loader itself would not"
                    " accumulate"
                ),
                fix=(
                    "pass loader= to accelerate_guard and iterate guard.batches(max_epochs=...),"
                    " which yields windows of so many batches; or leave out"
                    " gradient_accumulation_steps."
                ),
                rule="H203",
            )
        return super().step(batch, loss_fn, **named)


class _AsPrepared:
    """Put before the class of a schedule, it lets it advance as a prepared one does.

    It counts the steps of all processes, unless these share each batch, and one of so many steps
    stays at its end.
    """

    _holdfast_advances: int
    _step_count: int
    total_steps: float = math.inf

    def step(self, *args: Any) -> None:
        """Advance, unless the end is reached."""
        for _ in range(self._holdfast_advances):
            if self._step_count <= self.total_steps:
                super().step(*args)  # type: ignore[misc]


def _schedule(given: Any, processes: int) -> Any:
    """Return the scheduler inside a prepared one."""
    if not isinstance(given, load("accelerate.scheduler").AcceleratedScheduler):
        # Another scheduler may well have an attribute of that name.
        return given
    inner = given.scheduler
    if isinstance(inner, _AsPrepared):
        return inner
    advances = 1 if given.split_batches or not given.step_with_optimizer else processes
    if advances > 1 or hasattr(inner, "total_steps"):
        inner._holdfast_advances = advances
        inner.__class__ = type(type(inner).__name__, (_AsPrepared, type(inner)), {})
    return inner


def accelerate_guard(
    accelerator: Any,
    *,
    model: Any,
    optimizer: Any,
    loader: Iterable[Any] | None = None,
    scheduler: Any = None,
    run_dir: str | os.PathLike[str] | None = None,
    policy: Any = None,
    **overrides: Any,
) -> AcceleratedGuard:
    """Return a guard for what ``accelerator.prepare`` has returned, or for the bare objects.

    Args:
        accelerator: Its precision, device and ``gradient_accumulation_steps`` are used.
        model: One, or a dict of named ones.
        optimizer: One, or a dict of named ones. The guard steps the optimizers inside.
        loader: A prepared loader, or a `holdfast.DataLoader` that was not prepared, which resumes
            exactly without reading over; it takes its ``device=`` itself, and no accumulation: make
            its batches larger instead.
        scheduler: One, or a dict of named ones; advanced once for each optimizer step, or by you,
            where the accelerator has ``step_scheduler_with_optimizer=False``.
        run_dir: None: ``holdfast`` in the accelerator's ``project_dir``.
        policy: As for `Guard`; the precision is the accelerator's.
        **overrides: Fields of the policy, such as ``max_grad_norm``; ``state``, ``split`` and
            ``clock`` of `Guard`.

    Raises:
        PolicyError: H105 for an object of the wrong kind, H108 for several processes without
            ``DistributedDataParallel``, H111 for an engine or a setting that cannot be guarded,
            H109 for a policy with another precision; H1xx as `Guard`.
    """
    own = {name: overrides.pop(name) for name in ("state", "split", "clock") if name in overrides}
    found = agreed(
        Policy.of(policy, **overrides), "Accelerator", {"precision": check_accelerator(accelerator)}
    )
    if run_dir is None and accelerator.project_dir is None:
        raise PolicyError(
            "run_dir=None, and the accelerator has no project_dir",
            limit="checkpoints and the recording need a place",
            fix='pass run_dir="runs/a", or Accelerator(project_dir=...).',
            rule="H105",
        )
    if not accelerator.step_scheduler_with_optimizer and found.scheduler_interval == "step":
        found = found.replace(scheduler_interval=None)
    guard = AcceleratedGuard(
        Path(accelerator.project_dir, "holdfast") if run_dir is None else run_dir,
        model=_each(model, lambda given: _model(given, accelerator)),
        optimizer=_each(optimizer, _optimizer),
        scheduler=_each(scheduler, lambda given: _schedule(given, accelerator.num_processes)),
        loader=_loader(loader, accelerator) if isinstance(loader, Iterable) else loader,
        policy=found,
        **own,
    )
    if not isinstance(loader, DataLoader):
        guard._batches_of_a_step = accelerator.gradient_accumulation_steps
    take_scale(guard, accelerator.scaler)
    accelerator.log = recorded_too(
        accelerator.log, lambda values, step=None, *_, **__: (values, step)
    )
    return guard


def _each(given: Any, unwrapped: Any) -> Any:
    if isinstance(given, Mapping):
        return {name: unwrapped(each) for name, each in given.items()}
    return None if given is None else unwrapped(given)


def _optimizer(given: Any) -> Any:
    """Return the optimizer inside a prepared one; a wrapper such as Lookahead stays as it is."""
    prepared = isinstance(given, load("accelerate.optimizer").AcceleratedOptimizer)
    return given.optimizer if prepared else given


def _model(given: Any, accelerator: Any) -> Any:
    if isinstance(given, torch.nn.parallel.DistributedDataParallel):
        return given  # the ranks need the wrapper
    return accelerator.unwrap_model(given, keep_fp32_wrapper=True, keep_torch_compile=True)


def _loader(loader: Iterable[Any], accelerator: Any) -> Iterable[Any]:
    steps = accelerator.gradient_accumulation_steps
    if isinstance(loader, DataLoader):
        if steps > 1:
            raise excluded(
                f"gradient_accumulation_steps={steps} with a holdfast.DataLoader",
                "it hands out whole batches, and a step cuts them where memory is short",
                f"give it {steps} times the batch_size, and Accelerator no accumulation;"
                " micro_batch_size= limits what is computed at once.",
            )
        return loader
    if getattr(loader, "use_stateful_dataloader", False):
        raise excluded(
            "use_stateful_dataloader=True",
            "its position is ahead of the batches that were trained",
            "leave it out: the guard goes back to its place by itself.",
        )
    return PreparedLoader(loader, accelerator.device, steps)
