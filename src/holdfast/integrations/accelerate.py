"""Guarded training with Hugging Face Accelerate.

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    guard = accelerate_guard(
        accelerator, model=model, optimizer=optimizer, loader=loader, scheduler=scheduler
    )
    for batch in guard.batches(max_epochs=3):
        guard.step(batch, lambda batch: model(**batch).loss)

Accelerate provides the device, the precision and the loaders, and holdfast runs the steps. These
are the differences from plain Accelerate:

- ``guard.step`` replaces ``accelerator.accumulate``, ``backward``, ``clip_grad_norm_``,
  ``optimizer.step``, ``scheduler.step`` and ``zero_grad``.
- With ``gradient_accumulation_steps=n``, ``guard.batches`` yields windows of ``n`` batches. The
  last window of an epoch may be shorter. Each window is one step, in which every batch is weighted
  by its number of items.
- The guard writes the checkpoints and resumes from them. The accelerator's ``save_state`` and
  ``load_state`` cover the same objects, but not the position in the data or the guard's own state.

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

# Arguments of `Guard` that callers may mix with policy fields in ``**overrides``.
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
    """Return a guard for objects that an accelerator has prepared. Unprepared objects work too.

    Args:
        accelerator: The accelerator, which determines the device, the precision and
            ``gradient_accumulation_steps``.
        model: A model, or a dict of named models.
        optimizer: An optimizer, or a dict of named optimizers. Prepared optimizers are unwrapped.
        loader: A prepared loader, or an unprepared `holdfast.DataLoader`. The latter resumes
            exactly without reading batches again, but does not support accumulation: use larger
            batches instead, and pass ``device=`` to the loader.
        scheduler: A scheduler, or a dict of named schedulers. The guard steps it after each
            optimizer step. If the accelerator has ``step_scheduler_with_optimizer=False``, step it
            yourself.
        run_dir: The run directory. Defaults to ``holdfast`` in the accelerator's ``project_dir``.
        policy: The policy, as for `Guard`. Its precision must match the accelerator's.
        **overrides: Policy fields, such as ``max_grad_norm``, and the arguments ``state``,
            ``split`` and ``clock`` of `Guard`.

    Raises:
        PolicyError: H105 for an object of the wrong type, H108 for several processes without
            ``DistributedDataParallel``, H109 for a policy that contradicts the accelerator's
            precision, or H111 for an engine or setting that cannot be guarded. All errors that
            `Guard` raises are possible too.
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
    """Return the policy with the accelerator's precision and scheduler setting applied."""
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
            limit="checkpoints and the recording need a directory",
            fix='pass run_dir="runs/a", or Accelerator(project_dir=...).',
            rule="H105",
        )
    return Path(accelerator.project_dir, "holdfast")


def _logged_values(values: Any, step: Any = None, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Return the values and the step from the arguments of ``accelerator.log``."""
    return values, step


class AcceleratedGuard(Guard):
    """A guard for objects that an accelerator has prepared, with support for accumulation."""

    _batches_per_step = 1

    def _why_guard_must_step(self) -> str:
        """Return why the loop must not step the optimizers itself."""
        return "the accelerator scales and skips steps in its own way, which no checkpoint holds"

    def step(self, batch: Any, loss_fn: LossFunction, **named: Any) -> StepResult:
        """Run one step on a batch from ``guard.batches``, as `Guard.step` does.

        Raises:
            BatchError: H203 if accumulation is on and the batch is not a window of batches. All
                errors that `Guard.step` raises are possible too.
        """
        if self._batches_per_step > 1 and not isinstance(batch, Window):
            raise BatchError(
                f"guard.step was called with a {type(batch).__name__}, and"
                f" gradient_accumulation_steps={self._batches_per_step}",
                limit=(
                    "each call is a complete step, so a loop over the loader itself would not"
                    " accumulate gradients"
                ),
                fix=(
                    "pass loader= to accelerate_guard and iterate guard.batches(max_epochs=...),"
                    " which yields windows of that many batches. Or remove"
                    " gradient_accumulation_steps."
                ),
                rule="H203",
            )
        return super().step(batch, loss_fn, **named)


# --- Prepared objects -----------------------------------------------------------------------------


def _unwrap_each(prepared: Any, unwrap: Callable[[Any], Any]) -> Any:
    """Unwrap an object, or each value in a dict of named objects, and return the result."""
    if prepared is None:
        return None
    if isinstance(prepared, Mapping):
        return {name: unwrap(value) for name, value in prepared.items()}
    return unwrap(prepared)


def _unwrap_model(model: Any, accelerator: Any) -> Any:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        # The wrapper averages gradients over the ranks, so the guard has to use it.
        return model
    return accelerator.unwrap_model(model, keep_fp32_wrapper=True, keep_torch_compile=True)


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper.

    An optimizer without that wrapper is returned unchanged, even if it has an attribute
    ``optimizer``, as Lookahead does.
    """
    if isinstance(optimizer, load("accelerate.optimizer").AcceleratedOptimizer):
        return optimizer.optimizer
    return optimizer


def _unwrap_scheduler(scheduler: Any, num_processes: int) -> Any:
    """Return the scheduler inside Accelerate's wrapper, changed to advance as the wrapper does.

    A scheduler without that wrapper is returned unchanged, even if it has an attribute
    ``scheduler``.

    Args:
        scheduler: The scheduler, which may be wrapped.
        num_processes: The accelerator's number of processes.
    """
    if not isinstance(scheduler, load("accelerate.scheduler").AcceleratedScheduler):
        return scheduler
    inner = scheduler.scheduler
    if isinstance(inner, _AsPrepared):
        return inner
    # In each step, Accelerate advances a scheduler once per process, unless the processes share
    # each batch or the user steps the scheduler.
    advances_per_step = num_processes
    if scheduler.split_batches or not scheduler.step_with_optimizer:
        advances_per_step = 1
    if advances_per_step > 1 or hasattr(inner, "total_steps"):
        inner._holdfast_advances = advances_per_step
        inner.__class__ = type(type(inner).__name__, (_AsPrepared, type(inner)), {})
    return inner


class _AsPrepared:
    """Mixin that makes a scheduler advance as in Accelerate, possibly several times per step.

    A scheduler with `total_steps`, such as ``OneCycleLR``, stops advancing after that many steps.
    """

    _holdfast_advances: int
    _step_count: int
    total_steps: float = math.inf

    def step(self, *args: Any) -> None:
        """Advance the scheduler, but not past `total_steps`."""
        for _ in range(self._holdfast_advances):
            if self._step_count <= self.total_steps:
                super().step(*args)  # type: ignore[misc]


# --- Loaders --------------------------------------------------------------------------------------


def _guarded_loader(loader: Any, accelerator: Any) -> Any:
    """Return the loader that the guard iterates.

    An object that is not iterable is returned unchanged, because the guard refuses it.

    Raises:
        PolicyError: H111 for a `holdfast.DataLoader` with accumulation, or for a stateful loader.
    """
    steps = accelerator.gradient_accumulation_steps
    if not isinstance(loader, Iterable):
        return loader
    if isinstance(loader, DataLoader):
        if steps > 1:
            raise unsupported(
                f"gradient_accumulation_steps={steps} with a holdfast.DataLoader",
                reason="each batch of this loader is one step, and is split if memory runs out",
                fix=(
                    f"multiply its batch_size by {steps}, and remove gradient_accumulation_steps"
                    " from the Accelerator. micro_batch_size= limits the samples per backward pass."
                ),
            )
        return loader
    if getattr(loader, "use_stateful_dataloader", False):
        raise unsupported(
            "use_stateful_dataloader=True",
            reason="the loader's position is ahead of the last batch that was trained on",
            fix="remove it. The guard restores the position itself.",
        )
    return PreparedLoader(loader, accelerator.device, steps)


class PreparedLoader:
    """Iterates a prepared loader from any epoch, and yields batches or windows on a device.

    The guard iterates this object instead of the prepared loader, for two reasons:

    - A prepared loader counts epochs itself, but does not save the count. A run that resumes in a
      new process would repeat the order of the first epoch.
    - A prepared loader fetches each batch before the previous one is trained, so a resume could not
      reproduce the random numbers with which the batch was loaded. This class iterates the inner
      torch loader, which loads batches on demand.

    Args:
        loader: A loader that Accelerate has prepared, or any iterable of batches.
        device: The device to which batches are moved.
        batches_per_window: The accelerator's ``gradient_accumulation_steps``.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device, batches_per_window: int
    ) -> None:
        self._loader: Any = loader
        self._device = device
        self._batches_per_window = batches_per_window
        self._send_to_device = load("accelerate.utils").send_to_device
        # The guard's cursor uses these two attributes to save and restore the order of an epoch.
        self.generator = getattr(loader, "generator", None)
        self.sampler = _EpochOrder(loader)

    @property
    def torch_loader(self) -> Any:
        """Return the inner torch loader, or None if Accelerate changes the order of its batches."""
        if type(self._loader).__name__ != "DataLoaderShard" or self._loader.skip_batches:
            return None
        return getattr(self._loader, "base_dataloader", None)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, or of windows if accumulation is on."""
        return math.ceil(len(self._loader) / self._batches_per_window)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches on the device, or windows of batches if accumulation is on."""
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
            # Accelerate determines the order itself, for example in its dispatcher.
            yield from self._loader
            return
        # The rest follows ``DataLoaderShard.__iter__``, but without fetching ahead.
        if self._loader.rng_types is not None:
            load("accelerate.utils").synchronize_rng_states(
                self._loader.rng_types, self._loader.synchronized_generator
            )
        self._loader.set_epoch(self._loader.iteration)
        yield from torch_loader
        self._loader.iteration += 1


class _EpochOrder:
    """Stands in for a sampler, so that the guard's cursor can restore the order of an epoch.

    The cursor calls `set_epoch` and saves the state of `generator`.

    Args:
        loader: A loader that Accelerate has prepared, or any iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        if hasattr(loader, "get_sampler"):
            sampler = loader.get_sampler()
        else:
            sampler = getattr(loader, "sampler", None)
        # With several processes, the sampler is wrapped, and all processes draw the order from this
        # synchronized generator.
        synchronized = getattr(loader, "synchronized_generator", None)
        self.generator = synchronized or getattr(sampler, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration uses."""
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = epoch
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
