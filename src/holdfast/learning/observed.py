"""What is known about each optimizer, each model and each scheduler of a watched run: counters and small histories.

`observer` fills these in from hooks; `facts` of each is plain data for the rules. Nothing here acts on training.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from holdfast.learning.flow import Sentinel, median, norms_of, sample_of
from holdfast.learning.sampling import FULL_ROUNDS
from holdfast.memory.oom import find_out_of_memory
from holdfast.numerics.eager import is_symbolic

_MOST_LOSSES = 800


_log = logging.getLogger("holdfast")


class _CanFail(Protocol):
    failure: str | None


_Watcher = TypeVar("_Watcher", bound=_CanFail)
_Rest = ParamSpec("_Rest")


def harmless(method: Callable[Concatenate[_Watcher, _Rest], None]) -> Callable[Concatenate[_Watcher, _Rest], None]:
    """Keep a failure of the diagnosis out of the training: it is logged, and nothing is observed any more.

    For want of memory only this observation is left out.
    """

    @functools.wraps(method)
    def guarded(self: _Watcher, *args: _Rest.args, **kwargs: _Rest.kwargs) -> None:
        if self.failure is not None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            if find_out_of_memory(error) is not None:
                return  # this look at it is lost, and the next one will do: the step is made again with less
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("the diagnosis has switched itself off: %s", self.failure, exc_info=error)

    return guarded  # type: ignore[return-value]


class Hook:
    """A hook on a module, which a copy of the module does not have: neither ``deepcopy`` nor ``torch.save`` takes it.

    Args:
        call: What it does; None: nothing.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Do it."""
        if self._call is not None and not is_symbolic():
            self._call(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def number(value: Any) -> float:
    """Return a learning rate as a number, also where it is a tensor (one host sync on a device)."""
    return float(value)


class LossHistory:
    """Losses with their steps, thinned so that the whole run stays in view."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._stride = 1
        self._seen = 0
        self.nonfinite = 0
        self.first_nonfinite: int | None = None

    def add(self, step: int, value: float) -> None:
        """Add one loss; one that is not finite is only counted."""
        if not math.isfinite(value):
            self.nonfinite += 1
            self.first_nonfinite = self.first_nonfinite or step
            return
        self._seen += 1
        if self._seen % self._stride == 0:
            self.points.append((step, value))
        if len(self.points) > _MOST_LOSSES:
            self.points, self._stride = self.points[::2], self._stride * 2


class WatchedOptimizer:
    """One optimizer: steps, learning rates, leaks, and what its gradients were like.

    Args:
        name: Of the optimizer.
        optimizer: The optimizer.
        owned: Ids of the parameters of the watched models.
    """

    def __init__(self, name: str, optimizer: Optimizer, owned: set[int]) -> None:
        self.name, self.optimizer = name, optimizer
        self.steps = self.observed = 0
        self.losses = LossHistory()
        self.pending: list[float] = []
        self.sentinel: Sentinel | None = None
        self.closure = False
        self.clipped = self.committed = 0
        self._owned_at_start = {id(p) for p in self.parameters()} & owned
        self._largest_lr = max((number(group["lr"]) for group in optimizer.param_groups), default=0.0)
        self._lr, self._zero_lr_steps, self._low_lr_steps = self._largest_lr, 0, 0
        self._leaks = self._clean = self._reversed = self._no_gradient = self._with_gradient = 0
        self._zero_gradient = self._nonfinite = self._zeroed = self._moved = 0
        self._scaled_down: list[float] = []
        self._nonfinite_names: list[str] = []
        self._first_nonfinite: int | None = None

    def open(self) -> None:
        """Watch for leaking gradients, while there are steps to be observed fully."""
        if self.sentinel is None and self.observed < FULL_ROUNDS:
            self.sentinel = Sentinel(self.parameters())

    def close(self) -> None:
        """Remove the hooks of that."""
        if self.sentinel is not None:
            self.sentinel.close()
            self.sentinel = None

    def parameters(self) -> list[nn.Parameter]:
        """Return what the optimizer holds now."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def begin_step(self, *, closure: bool) -> None:
        """Count a step, and read the learning rates; every step."""
        self.steps += 1
        self.closure = self.closure or closure
        lr = max((number(group["lr"]) for group in self.optimizer.param_groups), default=0.0)
        self._largest_lr = max(self._largest_lr, min(lr, self._lr))  # a single step is an accident, or was undone
        self._zero_lr_steps = self._zero_lr_steps + 1 if lr <= 1e-7 * self._largest_lr else 0
        self._low_lr_steps = self._low_lr_steps + 1 if lr < 1e-3 * self._largest_lr else 0
        self._lr = lr

    def end_step(self, *, told: bool) -> None:
        """End a step; its loss is that of the newest backward pass, unless the caller is going to tell it."""
        if self.pending and not told:
            self.losses.add(self.steps, self.pending[-1])
        self.pending.clear()
        if self.observed >= FULL_ROUNDS:
            self.close()

    def note_step(self, seen: Mapping[str, Any]) -> None:
        """Add what was found just before an observed step; see `Flow.before_step`."""
        self.observed += 1
        self._no_gradient = 0 if seen["tensors"] else self._no_gradient + 1
        self._with_gradient += seen["tensors"] > 0
        self._zero_gradient = self._zero_gradient + 1 if seen["tensors"] and seen["total"] == 0 else 0
        if seen["nonfinite"]:
            self._nonfinite += 1
            self._first_nonfinite = self._first_nonfinite or self.steps
            self._nonfinite_names = self._nonfinite_names or list(seen["nonfinite"])
        if self.sentinel is not None:
            self._note_sentinel(self.sentinel.at_step())

    def _note_sentinel(self, told: Mapping[str, Any]) -> None:
        if not told["arrived"]:
            return
        self._leaks, self._clean = (0, self._clean + 1) if told["clean"] else (self._leaks + 1, self._clean)
        factors = told["factors"]
        if factors:
            self._reversed += all(factor < 0 for factor in factors)
            self._zeroed += all(factor == 0 for factor in factors)
            self._scaled_down.append(max(factors))

    def _bad_state(self) -> list[str]:
        """Return which entries of the optimizer's state, such as ``exp_avg``, hold NaN or Inf."""
        found = [
            (key, sample_of(value))
            for state in self.optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        ]
        largest = norms_of([sample for _, sample in found], math.inf)
        return sorted({key for (key, _), most in zip(found, largest, strict=True) if not math.isfinite(most)})

    def note_moved(self, *, moved: bool) -> None:
        """Add whether an observed step changed any weight."""
        self._moved += moved

    def facts(self, owned: set[int], totals: Sequence[float]) -> dict[str, Any]:
        """Return what is known, as plain data."""
        held = self.parameters()
        foreign = [p for p in held if id(p) not in owned]
        group = self.optimizer.param_groups[0] if self.optimizer.param_groups else {}
        betas = group.get("betas")
        return {
            "kind": type(self.optimizer).__name__,
            "steps": self.steps,
            "observed": self.observed,
            "closure": self.closure,
            "tensors": len(held),
            "foreign": len(foreign),
            "foreign_with_gradient": sum(p.grad is not None for p in foreign),
            "replaced": sum(id(p) in self._owned_at_start for p in foreign),
            "frozen": sum(not p.requires_grad for p in held),
            "lr": self._lr,
            "largest_lr": self._largest_lr,
            "zero_lr_steps": self._zero_lr_steps,
            "low_lr_steps": self._low_lr_steps,
            "weight_decay": max((float(g.get("weight_decay") or 0) for g in self.optimizer.param_groups), default=0),
            "momentum": float(group.get("momentum") or (number(betas[0]) if betas else 0.0)),
            "maximize": bool(group.get("maximize", False)),
            "no_gradient_steps": self._no_gradient,
            "with_gradient_steps": self._with_gradient,
            "zero_gradient_steps": self._zero_gradient,
            "nonfinite_gradients": self._nonfinite,
            "nonfinite_names": self._nonfinite_names,
            "first_nonfinite_gradient": self._first_nonfinite,
            "first_nonfinite_loss": self.losses.first_nonfinite,
            "nonfinite_state": self._bad_state(),
            "clipped_steps": self.clipped,
            "committed_steps": self.committed,
            "leaks": self._leaks,
            "clean_starts": self._clean,
            "reversed": self._reversed,
            "zeroed": self._zeroed,
            "scaled": median(self._scaled_down),
            "scaled_share": _share(self._scaled_down),
            "moved": self._moved,
            "losses": [list(point) for point in self.losses.points],
            "nonfinite_losses": self.losses.nonfinite,
            "gradient_norms": list(totals),
        }


def _share(factors: Sequence[float]) -> float:
    # A gradient divided by the number of micro-batches is scaled by the same factor in each step; clipping is not.
    usual = median(list(factors)) or 0.0
    steady = sum(abs(f - usual) <= 1e-3 * abs(usual) for f in factors)
    return 0.0 if steady > len(factors) / 2 else sum(f < 0.999 for f in factors) / max(1, len(factors))


class WatchedModel:
    """One model: which weights learn, in which mode it is, and whether it still is the one that was given.

    Args:
        name: Of the model.
        module: The model.
        frozen: Shell patterns of the names of parameters that are meant not to learn.
    """

    def __init__(self, name: str, module: nn.Module, prefix: str, frozen: Sequence[str]) -> None:
        self.name, self.module = name, module
        self._prefix, self._frozen = prefix, frozen
        self._start = {key: sample_of(p) for key, p in self.named() if not p.is_meta}
        self.eval_steps = self.steps = 0
        self.unwatched = {True: 0, False: 0}
        self.train_mode_validations = self.validations = 0

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with their full names."""
        lazy = nn.parameter.UninitializedParameter
        return [(self._prefix + k, p) for k, p in self.module.named_parameters() if not isinstance(p, lazy)]

    def modal(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that behave differently in training: dropout and batch norm."""
        return [(k, m) for k, m in self.module.named_modules() if isinstance(m, (_DropoutNd, _BatchNorm))]

    def note_step(self) -> None:
        """Count an observed step, and whether it was made in evaluation mode."""
        self.steps += 1
        self.unwatched = {True: 0, False: 0}
        if not self.module.training:
            self.eval_steps += any(not m.training for _, m in self.modal())

    def note_validation(self) -> None:
        """Count a validation, and whether all of it ran in training mode."""
        self.validations += 1
        self.train_mode_validations += bool(self.unwatched[True] and not self.unwatched[False] and self.modal())
        self.unwatched = {True: 0, False: 0}

    def is_frozen(self, name: str) -> bool:
        """Return whether a parameter was declared as meant not to learn."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._frozen)

    def facts(self, held: set[int], layers: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is known, as plain data."""
        named = self.named()
        learning = [(k, p) for k, p in named if p.requires_grad and not self.is_frozen(k)]
        outside = [k for k, p in learning if id(p) not in held]
        never = [k for k, p in learning if id(p) in held and _never(layers.get(k))]
        sizes = {k: p.numel() for k, p in named}
        return {
            "weights": sum(sizes[k] for k, _ in learning),
            "outside": outside[:5],
            "outside_count": len(outside),
            "outside_weights": sum(sizes[k] for k in outside),
            "outside_with_gradient": sum(p.grad is not None for k, p in learning if id(p) not in held),
            "outside_changed": self._changed(outside),
            "frozen_weights": sum(sizes[k] for k, p in named if not p.requires_grad),
            "never_gradient": never[:5],
            "never_gradient_count": len(never),
            "never_gradient_weights": sum(sizes[k] for k in never),
            "never_gradient_first": bool(never) and bool(learning) and never[0] == learning[0][0],
            "symmetric": self._symmetric(learning),
            "changed": self._changed(self._start),
            "nonfinite_buffers": self._bad_buffers(),
            "eval_steps": self.eval_steps,
            "observed": self.steps,
            "train_mode_validations": self.train_mode_validations,
            "validations": self.validations,
            "modal": [k for k, _ in self.modal()][:5],
            "dropout": max((m.p for _, m in self.modal() if isinstance(m, _DropoutNd)), default=0.0),
            "batch_norm": any(isinstance(m, _BatchNorm) and m.training for _, m in self.modal()),
            "normalised_input": self._normalises(),
        }

    def _symmetric(self, learning: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
        tables = {self._prefix + k + ".weight" for k, m in self.module.named_modules() if isinstance(m, nn.Embedding)}
        found = []
        for name, p in learning:
            if p.dim() < 2 or p.shape[0] < 2 or p.numel() == p.shape[0] or name in tables or p.grad is None:
                continue
            rows = p.detach().reshape(p.shape[0], -1)
            if torch.equal(rows, rows[:1].expand_as(rows)):
                found.append(name)
        return found[:5]

    def _changed(self, names: Iterable[str]) -> bool:
        now = dict(self.named())
        return any(
            name not in now or not torch.equal(torch.nan_to_num(sample_of(now[name])), torch.nan_to_num(then))
            for name, then in ((name, self._start[name]) for name in names if name in self._start)
        )

    def _bad_buffers(self) -> list[str]:
        floating = [(k, b) for k, b in self.module.named_buffers() if b.is_floating_point() and "running" in k]
        return [self._prefix + k for k, b in floating if not bool(torch.isfinite(b).all())][:5]

    def _normalises(self) -> bool:
        leaves = [m for m in self.module.modules() if not list(m.children()) and not isinstance(m, nn.Flatten)]
        return bool(leaves) and "Norm" in type(leaves[0]).__name__


def _never(layer: Mapping[str, Any] | None) -> bool:
    return layer is not None and layer["steps"] >= 30 and layer["with_gradient"] == 0  # catalogue 14


class WatchedScheduler:
    """One scheduler: how often it was advanced for each step of its optimizer.

    Args:
        name: Of the scheduler.
        scheduler: A torch scheduler, or anything with ``last_epoch``.
    """

    def __init__(self, name: str, scheduler: Any) -> None:
        self.name, self.scheduler = name, scheduler
        self._start = self._last = self._count()
        self._before_first = 0
        self._steps = self._every_step = self._several = 0

    def _count(self) -> int:
        return int(getattr(self.scheduler, "last_epoch", 0))

    def note_step(self) -> None:
        """Compare with the last step of the optimizer; every step."""
        now = self._count()
        advanced = now - self._last
        if self._steps == 0:
            self._before_first = advanced
        else:
            self._every_step += advanced == 1
            self._several += advanced > 1
        self._steps += 1
        self._last = now

    def facts(self) -> dict[str, Any]:
        """Return what is known, as plain data."""
        scheduler = self.scheduler
        period = getattr(scheduler, "T_max", None) or getattr(scheduler, "step_size", None)
        return {
            "kind": type(scheduler).__name__,
            "optimizer_steps": self._steps,
            "advanced": self._last - self._start,
            "before_first": self._before_first,
            "every_step": self._every_step,
            "several": self._several,
            "patience": getattr(scheduler, "patience", None),
            "period": period if isinstance(period, int) else None,
        }
