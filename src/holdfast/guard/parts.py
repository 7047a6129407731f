"""The objects that a run is made of, checked and named once.

A single model is named ``"model"``, a single optimizer ``"optimizer"``; of a dict the keys are
used. These names appear in gradient norms, in error messages and in the files of a checkpoint.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.core.policy.kinds import Precision
from holdfast.guard.optimizers import check_optimizer, identities
from holdfast.guard.phase import RunState
from holdfast.learning.learning_rate import rate_of
from holdfast.numerics.eager import as_written

_PLAIN = (bool, int, float, str, type(None))
_NOTHING = contextlib.nullcontext()
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved and put back."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Put the state back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a guard takes care of."""

    models: dict[str, nn.Module]  # modules by name
    optimizers: dict[str, Optimizer]  # by name
    schedulers: dict[str, Any]  # by the name of the optimizer that they drive, or by any name
    states: dict[str, Stateful]  # further state by name, averages included
    # Of weights, by the name of their model
    averages: Mapping[str, AveragedModel] = field(default_factory=dict)
    # What models were given in, for several ranks
    wrappers: Mapping[str, nn.Module] = field(default_factory=dict)
    # Whether a model, or a part of one, was given compiled. What else is compiled shows later
    compiled: bool = False

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of every model with its full name."""
        single = len(self.models) == 1 and "model" in self.models
        for name, model in self.models.items():
            prefix = "" if single else f"{name}."
            for key, parameter in model.named_parameters():
                yield prefix + key, parameter

    def optimizer_names(self, chosen: str | Sequence[str] | None) -> list[str]:
        """Return the names of the optimizers that a step moves; None: all."""
        known = list(self.optimizers)
        if chosen is None:
            return known
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        for name in names:
            if name not in known:
                raise PolicyError(
                    f"optimizer={name!r}",
                    limit=f"the optimizers of this guard are {', '.join(map(repr, known))}",
                    fix=did_you_mean(name, known, otherwise="take one of these."),
                    rule="H104",
                )
        return names

    def devices(self) -> list[torch.device]:
        """Return the accelerator devices that hold parameters."""
        found = {p.device for model in self.models.values() for p in model.parameters()}
        return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)

    def device_type(self) -> str:
        """Return the kind of device that computes, such as ``"cuda"`` or ``"cpu"``."""
        devices = self.devices()
        return devices[0].type if devices else "cpu"

    def settings(self) -> dict[str, Any]:
        """Return the plain settings of optimizers and schedulers, by names such as
        ``"optimizer.0.lr"``.
        """
        found: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                found |= {f"{name}.{index}.{key}": value for key, value in group.items()}
        for name, scheduler in self.schedulers.items():
            if isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
                found |= {
                    f"scheduler {name}.{key}": value for key, value in vars(scheduler).items()
                }
        found = {
            key: list(value) if isinstance(value, tuple) else value for key, value in found.items()
        }
        return {
            key: value
            for key, value in found.items()
            if isinstance(value, _PLAIN) or _is_numbers(value)
        }

    def rates(self) -> list[float]:
        """Return the learning rates of all parameter groups."""
        return [
            rate_of(group)
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
        ]

    def update_averages(self, moved: Sequence[torch.Tensor]) -> None:
        """Let each average whose model holds one of the parameters that were moved take in the
        weights of now.
        """
        ids = set(map(id, moved))
        for name, average in self.averages.items():
            if any(id(parameter) in ids for parameter in self.models[name].parameters()):
                average.update_parameters(self.models[name])

    @contextlib.contextmanager
    def averages_swapped_in(self, state: RunState) -> Iterator[None]:
        """Have averaged parameters and buffers in the models, which must not be saved then."""
        used = [name for name, average in self.averages.items() if average.n_averaged > 0]
        own = [each.detach() for name in used for _, each in _tensors(self.models[name])]
        others = [
            each.detach() for name in used for _, each in _tensors(self.averages[name].module)
        ]
        trained, state.averaged = [each.clone() for each in own], True
        try:
            for tensor, other in zip(own, others, strict=True):
                tensor.copy_(other)
            yield
        finally:
            for tensor, other in zip(own, trained, strict=True):
                tensor.copy_(other)
            state.averaged = False


def _averages(given: Any, models: Mapping[str, nn.Module]) -> dict[str, AveragedModel]:
    found = dict(given) if isinstance(given, Mapping) else {} if given is None else {"model": given}
    for name, each in found.items():
        form = (
            []
            if name not in models
            else [(key, tensor.shape) for key, tensor in _tensors(models[name])]
        )
        if not isinstance(each, AveragedModel) or form != [
            (key, t.shape) for key, t in _tensors(each.module)
        ]:
            raise PolicyError(
                f"averaged={type(each).__name__}(...) is no average of a model {name!r}",
                limit=(
                    "a torch.optim.swa_utils.AveragedModel takes in a model, tensor by tensor,"
                    " after each step"
                ),
                fix=(
                    "make it of the bare module, AveragedModel(net), before that is compiled or"
                    ' wrapped; by name, averaged={"generator": ...}, where models have names.'
                    " Another kind of average goes into state=, and your loop updates it after each"
                    " guard.step(...) that is not skipped."
                ),
                rule="H105",
            )
    return found


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, (int, float)) for each in value)


def autocast(device_type: str, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward pass; fp32 needs none."""
    dtype = _AUTOCAST.get(precision)
    return _NOTHING if dtype is None else torch.autocast(device_type, dtype)


def gather_parts(
    model: Any, optimizer: Any, scheduler: Any, state: Any, averaged: Any = None
) -> Parts:
    """Check and name what the caller gave."""
    models: dict[str, nn.Module] = _named(model, "model", nn.Module)
    optimizers: dict[str, Optimizer] = _named(optimizer, "optimizer", Optimizer)
    models, compiled = as_written(models)
    wrappers = {
        name: each for name, each in models.items() if isinstance(each, DistributedDataParallel)
    }
    if wrappers:  # names are those of the bare model, whatever it is trained in
        bare: dict[str, nn.Module] = {
            **models,
            **{name: each.module for name, each in wrappers.items()},
        }
        models, _ = as_written(bare)
    check_shapes("model", models)
    averages = _averages(averaged, models)
    named = {"averaged" + f".{name}" * (name != "model"): each for name, each in averages.items()}
    states = (
        {}
        if state is None or (isinstance(state, dict) and not state)
        else _named(state, "state", Stateful)
    )
    if both := named.keys() & states.keys():
        raise _wrong(
            f"state {min(both)!r} and averaged= are saved by one name", "each must have its own"
        )
    parts = Parts(
        compiled=compiled,
        wrappers=wrappers,
        models=models,
        optimizers=optimizers,
        schedulers={} if scheduler is None else _named(scheduler, "scheduler", Stateful),
        states={**states, **named},
        averages=averages,
    )
    check_shapes("state", parts.states)
    _check_overlap(optimizers)
    owned = {id(parameter) for _, parameter in parts.named_parameters()}
    for name, each in optimizers.items():
        check_optimizer(name, each, owned)
    return parts


def _check_overlap(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise H105 for an optimizer and a wrapper of it, which would both step it."""
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for identity in identities(optimizer):
            if owners.setdefault(identity, name) != name:
                raise _wrong(
                    f"optimizers {owners[identity]!r} and {name!r} are one, or one wraps the other",
                    "each step would move the same weights twice",
                )


def _named(given: Any, what: str, kind: type) -> dict[str, Any]:
    """Return what was given by name, each of it an instance of `kind` and given once."""
    found = dict(given) if isinstance(given, Mapping) else {what: given}
    names: dict[int, str] = {}
    for name, value in found.items():
        fits = is_stateful(value) if kind is Stateful else isinstance(value, kind)
        if not (fits and isinstance(name, str) and name != "" and "/" not in name):
            needed = f"a torch {what}"
            if kind is Stateful:
                needed = "something with state_dict() and load_state_dict(state)"
            if kind is Stateful and isinstance(value, DataLoader):
                needed += ", as a holdfast.DataLoader has and torch's DataLoader has not,"
            raise _wrong(
                f"{what} {name!r} is {_described(value)}", f"{needed} is needed, or a dict of such"
            )
        if id(value) in names:
            raise _wrong(
                f"{what} {name!r} is the same object as {names[id(value)]!r}",
                "it would be used twice",
            )
        names[id(value)] = name
    if not found:
        raise _wrong(f"{what}={given!r}", "at least one is needed")
    return found


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def is_stateful(value: Any) -> bool:
    """Return whether an object has methods that can be called as ``state_dict()`` and
    ``load_state_dict(state)``.
    """
    if isinstance(value, type):
        return False
    return _takes(getattr(value, "state_dict", None), 0) and _takes(
        getattr(value, "load_state_dict", None), 1
    )


def _takes(method: Any, count: int) -> bool:
    """Return whether a method can be called with this number of arguments, as far as its
    signature shows.
    """
    if not callable(method):
        return False
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def check_loader(loader: Any) -> None:
    """Raise H105 for a value that is not an iterable of batches, or has no batches left."""
    limit = "it is iterated for batches"
    fix = "pass a DataLoader or another iterable of batches."
    if _is_dataset(loader):
        limit = "it is a dataset, which yields samples and not batches"
        fix = f"pass holdfast.DataLoader(dataset, batch_size=...) of this {type(loader).__name__}."
    elif isinstance(loader, (torch.Tensor, np.ndarray)):
        limit = "its rows are samples and not batches"
        fix = (
            "pass holdfast.DataLoader(tensor, batch_size=...); if its rows are batches,"
            " list(tensor)."
        )
    elif isinstance(loader, Mapping):
        limit = "iterating it yields its keys"
        fix = (
            "pass one loader; holdfast.DataLoader over a dataset of dicts gives batches of several"
            " kinds."
        )
    elif isinstance(loader, (str, bytes)):
        limit = "iterating it yields characters"
    elif isinstance(loader, Generator) and inspect.getgeneratorstate(loader) == inspect.GEN_CLOSED:
        limit = "it has ended, so no batch is left"
        fix = "make it again; better, pass an object whose __iter__ begins an epoch."
    elif isinstance(loader, Iterable) and not isinstance(loader, type):
        return
    elif callable(loader):
        limit += ", and a function or a class is none until it is called"
        fix = "pass what it returns."
    raise PolicyError(f"loader is {_described(loader)}", limit=limit, fix=fix, rule="H105")


def _is_dataset(loader: Any) -> bool:
    """Return whether a value is a map-style dataset of torch or of the ``datasets`` package.

    An iterable dataset is not one, since it may yield whole batches.
    """
    if isinstance(loader, Dataset):
        return not isinstance(loader, IterableDataset)
    return type(loader).__module__ == "datasets.arrow_dataset"


def check_shapes(kind: str, modules: Mapping[str, Any]) -> None:
    """Raise H105 for parameters and buffers that have no shape until the first batch, such as
    those of LazyLinear.
    """
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            continue
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        lazy = [key for key, tensor in tensors if is_lazy(tensor)]
        if lazy:
            raise PolicyError(
                f"{kind} {name!r} has {len(lazy)} tensor(s) without a shape, the first is"
                f" {lazy[0]}",
                limit=(
                    "a lazy layer makes them in its first forward pass, and a guard saves them"
                    " before"
                ),
                fix="run one batch through the model first, then make the optimizer and the Guard.",
                rule="H105",
            )


def _wrong(what: str, limit: str) -> PolicyError:
    fix = (
        'pass one object, or a dict of named ones such as {"generator": ..., "discriminator": ...}.'
    )
    return PolicyError(what, limit=limit, fix=fix, rule="H105")
