"""Guarded training with Hugging Face Accelerate.

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    guard = accelerate_guard(
        accelerator, model=model, optimizer=optimizer, loader=loader, scheduler=scheduler
    )
    for batch in guard.batches(max_epochs=3):
        guard.step(batch, lambda batch: model(**batch).loss)

Accelerate provides the device, the precision and the loaders, and holdfast makes the step.
Differences from plain Accelerate:

- ``guard.step`` replaces ``accelerator.accumulate``, ``backward``, ``clip_grad_norm_``,
  ``optimizer.step``, ``scheduler.step`` and ``zero_grad``.
- With ``gradient_accumulation_steps``, each batch of ``guard.batches`` is a window of that many
  batches of the loader, and the last window of an epoch holds the rest. A window is one step, in
  which each batch is weighted by its items.
- The guard writes the checkpoints and resumes from them. The accelerator's ``save_state`` and
  ``load_state`` cover the same objects, but neither the position in the data nor the guard's own
  state.

Read in this order: `accelerate_guard`, `AcceleratedGuard`, `PreparedLoader`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import BatchError, PolicyError
from holdfast.core.policy.policy import Policy
from holdfast.guard.guard import Guard, take_scale
from holdfast.guard.hosted import with_host_settings
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.splitting.window import Window
from holdfast.integrations.refusals import check_accelerator, load, unsupported
from holdfast.loader.loader import DataLoader
from holdfast.recorder.scalars import with_recording

# Arguments of `Guard` that may be passed together with policy fields.
_GUARD_ARGUMENTS = ("state", "split", "clock")


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
    """Return a guard for objects returned by ``accelerator.prepare``, or for unprepared ones.

    Args:
        accelerator: The accelerator whose precision, device and ``gradient_accumulation_steps`` are
            used.
        model: A model, or a dict of named ones.
        optimizer: An optimizer, or a dict of named ones. The guard steps the optimizer inside a
            prepared one.
        loader: A prepared loader, or a `holdfast.DataLoader` that was not prepared. The latter
            resumes exactly without reading batches again. Pass it ``device=`` itself, and use
            larger batches instead of accumulation, which it does not support.
        scheduler: A scheduler, or a dict of named ones. It is stepped once for each optimizer step,
            or by you if the accelerator has ``step_scheduler_with_optimizer=False``.
        run_dir: The run directory. None: ``holdfast`` in the accelerator's ``project_dir``.
        policy: As for `Guard`. The precision is taken from the accelerator.
        **overrides: Fields of the policy, such as ``max_grad_norm``, and the arguments ``state``,
            ``split`` and ``clock`` of `Guard`.

    Raises:
        PolicyError: H105 for an object of the wrong kind, H108 for several processes without
            ``DistributedDataParallel``, H109 for a policy with another precision, H111 for an
            engine or a setting that cannot be guarded, and others as `Guard`.
    """
    guard_arguments = {name: overrides.pop(name) for name in _GUARD_ARGUMENTS if name in overrides}
    agreed_policy = _agreed_policy(accelerator, Policy.of(policy, **overrides))
    guard = AcceleratedGuard(
        _run_directory(run_dir, accelerator),
        model=_unwrap_each(model, partial(_unwrap_model, accelerator=accelerator)),
        optimizer=_unwrap_each(optimizer, _unwrap_optimizer),
        scheduler=_unwrap_each(
            scheduler, partial(_unwrap_scheduler, num_processes=accelerator.num_processes)
        ),
        loader=_guarded_loader(loader, accelerator),
        policy=agreed_policy,
        **guard_arguments,
    )
    if not isinstance(loader, DataLoader):
        guard._batches_per_step = accelerator.gradient_accumulation_steps
    take_scale(guard, accelerator.scaler)
    accelerator.log = with_recording(accelerator.log, _logged_values)
    return guard


def _agreed_policy(accelerator: Any, policy: Policy) -> Policy:
    """Return the policy with the accelerator's precision and its setting for schedulers."""
    policy = with_host_settings(
        policy, "Accelerator", {"precision": check_accelerator(accelerator)}
    )
    user_steps_scheduler = not accelerator.step_scheduler_with_optimizer
    if user_steps_scheduler and policy.scheduler_interval == "step":
        policy = policy.replace(scheduler_interval=None)
    return policy


def _run_directory(
    run_dir: str | os.PathLike[str] | None, accelerator: Any
) -> str | os.PathLike[str]:
    if run_dir is not None:
        return run_dir
    if accelerator.project_dir is None:
        raise PolicyError(
            "run_dir=None, and the accelerator has no project_dir",
            limit="checkpoints and the recording need a place",
            fix='pass run_dir="runs/a", or Accelerator(project_dir=...).',
            rule="H105",
        )
    return Path(accelerator.project_dir, "holdfast")


def _logged_values(values: Any, step: Any = None, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Return the values and the step that ``accelerator.log`` was called with."""
    return values, step


class AcceleratedGuard(Guard):
    """A guard for objects that an accelerator has prepared."""

    _batches_per_step = 1

    def step(self, batch: Any, loss_fn: LossFunction, **named: Any) -> StepResult:
        """Make one step with a batch of ``guard.batches``, as `Guard.step` does.

        Raises:
            BatchError: H203 for a batch that is only a part of a window, and others as `Guard`.
        """
        if self._batches_per_step > 1 and not isinstance(batch, Window):
            raise BatchError(
                f"guard.step was called with a {type(batch).__name__}, and"
                f" gradient_accumulation_steps={self._batches_per_step}",
                limit=(
                    "each call makes a whole step, so a loop over the loader itself would not"
                    " accumulate"
                ),
                fix=(
                    "pass loader= to accelerate_guard and iterate guard.batches(max_epochs=...),"
                    " which yields windows of that many batches; or leave out"
                    " gradient_accumulation_steps."
                ),
                rule="H203",
            )
        return super().step(batch, loss_fn, **named)


# --- Prepared objects -----------------------------------------------------------------------------


def _unwrap_each(prepared: Any, unwrap: Callable[[Any], Any]) -> Any:
    """Unwrap an object, or each in a dict of named ones."""
    if prepared is None:
        return None
    if isinstance(prepared, Mapping):
        return {name: unwrap(value) for name, value in prepared.items()}
    return unwrap(prepared)


def _unwrap_model(model: Any, accelerator: Any) -> Any:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        # The guard needs this wrapper, which averages gradients over the ranks.
        return model
    return accelerator.unwrap_model(model, keep_fp32_wrapper=True, keep_torch_compile=True)


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a prepared one.

    Other wrappers, such as Lookahead, may also have an attribute ``optimizer``, and are returned
    unchanged.
    """
    if isinstance(optimizer, load("accelerate.optimizer").AcceleratedOptimizer):
        return optimizer.optimizer
    return optimizer


def _unwrap_scheduler(scheduler: Any, num_processes: int) -> Any:
    """Return the scheduler inside a prepared one, made to advance as the prepared one does.

    Other schedulers may also have an attribute ``scheduler``, and are returned unchanged.
    """
    if not isinstance(scheduler, load("accelerate.scheduler").AcceleratedScheduler):
        return scheduler
    inner = scheduler.scheduler
    if isinstance(inner, _AsPrepared):
        return inner
    # A schedule counts the steps of all processes, unless they share each batch.
    advances_per_step = num_processes
    if scheduler.split_batches or not scheduler.step_with_optimizer:
        advances_per_step = 1
    if advances_per_step > 1 or hasattr(inner, "total_steps"):
        inner._holdfast_advances = advances_per_step
        inner.__class__ = type(type(inner).__name__, (_AsPrepared, type(inner)), {})
    return inner


class _AsPrepared:
    """Mixin that makes a scheduler advance as under Accelerate, possibly several times per step.

    A scheduler with `total_steps` stops advancing at its end.
    """

    _holdfast_advances: int
    _step_count: int
    total_steps: float = math.inf

    def step(self, *args: Any) -> None:
        """Advance the schedule, but not beyond its end."""
        for _ in range(self._holdfast_advances):
            if self._step_count <= self.total_steps:
                super().step(*args)  # type: ignore[misc]


# --- Loaders --------------------------------------------------------------------------------------


def _guarded_loader(loader: Any, accelerator: Any) -> Any:
    """Return the loader that the guard will iterate.

    Anything that cannot be iterated is returned unchanged, and the guard refuses it.

    Raises:
        PolicyError: H111 for a loader whose position or accumulation cannot be guarded.
    """
    steps = accelerator.gradient_accumulation_steps
    if not isinstance(loader, Iterable):
        return loader
    if isinstance(loader, DataLoader):
        if steps > 1:
            raise unsupported(
                f"gradient_accumulation_steps={steps} with a holdfast.DataLoader",
                reason="it yields whole batches, and a step splits them only if memory is short",
                fix=(
                    f"give it {steps} times the batch_size, and Accelerator no accumulation;"
                    " micro_batch_size= limits what is computed at once."
                ),
            )
        return loader
    if getattr(loader, "use_stateful_dataloader", False):
        raise unsupported(
            "use_stateful_dataloader=True",
            reason="its position is ahead of the batches that were trained",
            fix="leave it out: the guard restores the position itself.",
        )
    return PreparedLoader(loader, accelerator.device, steps)


class PreparedLoader:
    """The batches of a prepared loader, starting at any epoch, as windows on the device.

    The guard iterates this object instead of the prepared loader, for two reasons:

    - A prepared loader counts epochs itself, and its ``state_dict`` holds nothing. A run that
      resumes in a new process would therefore repeat the order of the first epoch.
    - It loads each batch before the step of the previous one, so a resume could not reproduce the
      random numbers of that batch. The loader inside it loads on demand.

    Args:
        loader: A loader that Accelerate has prepared, or any iterable of batches.
        device: The device to which batches are moved.
        batches_per_window: ``gradient_accumulation_steps``.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device, batches_per_window: int
    ) -> None:
        self._loader: Any = loader
        self._device = device
        self._batches_per_window = batches_per_window
        self._send_to_device = load("accelerate.utils").send_to_device
        # The guard's cursor looks for these two attributes.
        self.generator = getattr(loader, "generator", None)
        self.sampler = _EpochOrder(loader)

    @property
    def torch_loader(self) -> Any:
        """Return torch's loader if its batches are used unchanged.

        None if Accelerate determines their order.
        """
        if type(self._loader).__name__ != "DataLoaderShard" or self._loader.skip_batches:
            return None
        return getattr(self._loader, "base_dataloader", None)

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return math.ceil(len(self._loader) / self._batches_per_window)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, or windows of them, on the device."""
        batches = (self._send_to_device(batch, self._device) for batch in self._batches())
        if self._batches_per_window == 1:
            yield from batches
            return
        while True:
            window = list(islice(batches, self._batches_per_window))
            if not window:
                return
            yield Window(window)

    def _batches(self) -> Iterator[Any]:
        torch_loader = self.torch_loader
        if torch_loader is None:
            # A loader with its own order, such as a dispatcher.
            yield from self._loader
            return
        # Accelerate does the same around the iteration of the inner loader.
        if self._loader.rng_types is not None:
            load("accelerate.utils").synchronize_rng_states(
                self._loader.rng_types, self._loader.synchronized_generator
            )
        self._loader.set_epoch(self._loader.iteration)
        yield from torch_loader
        self._loader.iteration += 1


class _EpochOrder:
    """The part of a loader that determines its order.

    A guard's cursor sets its epoch and saves its generator.

    Args:
        loader: A loader that Accelerate has prepared, or any iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        if hasattr(loader, "get_sampler"):
            sampler = loader.get_sampler()
        else:
            sampler = getattr(loader, "sampler", None)
        # With several processes, the sampler is nested deeper, and all processes draw the order
        # from this generator.
        synchronized = getattr(loader, "synchronized_generator", None)
        self.generator = synchronized or getattr(sampler, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration has."""
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = epoch
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
