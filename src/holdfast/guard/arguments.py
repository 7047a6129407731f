"""Check the arguments of `Guard` and give each a name, before the run directory is created.

`gather_parts` checks the models, optimizers, schedulers and additional state, and `check_loader`
checks the loader. A wrong argument raises H105. The checks of a single optimizer are in
``optimizers``.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.core.errors import PolicyError
from holdfast.core.text import counted
from holdfast.guard.optimizers import check_optimizer, identities
from holdfast.guard.parts import Parts, Stateful, named_tensors
from holdfast.numerics.eager import as_written


def gather_parts(
    model: Any, optimizer: Any, scheduler: Any, state: Any, averaged: Any = None
) -> Parts:
    """Check the objects passed to `Guard`, and return them as named parts.

    Args:
        model: A module, or a dict of modules by name.
        optimizer: An optimizer, or a dict of optimizers by name.
        scheduler: A scheduler, a dict of schedulers by name, or None.
        state: An object with ``state_dict`` and ``load_state_dict``, a dict of such objects by
            name, or None.
        averaged: An `AveragedModel`, a dict of such averages by model name, or None.

    Raises:
        PolicyError: H105 to H108, for the first wrong argument.
    """
    given_models: dict[str, nn.Module] = _named(model, "model", nn.Module)
    optimizers: dict[str, Optimizer] = _named(optimizer, "optimizer", Optimizer)
    uncompiled_models, is_compiled = as_written(given_models)
    wrappers = {
        name: module
        for name, module in uncompiled_models.items()
        if isinstance(module, DistributedDataParallel)
    }
    models = _without_wrappers(uncompiled_models, wrappers)
    _check_shapes("model", models)

    averages = _averages(averaged, models)
    schedulers = {}
    if scheduler is not None:
        schedulers = _named(scheduler, "scheduler", Stateful)
    states = _states(state, averages)
    _check_shapes("state", states)

    parts = Parts(
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        states=states,
        averages=averages,
        wrappers=wrappers,
        compiled=is_compiled,
    )
    _check_overlap(optimizers)
    owned = {id(parameter) for _, parameter in parts.named_parameters()}
    for name, named_optimizer in optimizers.items():
        check_optimizer(name, named_optimizer, owned)
    return parts


# --- models, optimizers and state


def _named(argument: Any, kind: str, needed_type: type) -> dict[str, Any]:
    """Check the values of an argument and return them by name.

    Args:
        argument: A single value, which is named `kind`, or a dict of values by name.
        kind: The name of the argument, such as ``"model"``.
        needed_type: The type that each value must have. For `Stateful`, the value's ``state_dict``
            and ``load_state_dict`` must also accept the right number of arguments.

    Raises:
        PolicyError: H105 if there are no values, or if a name or a value is invalid.
    """
    values = dict(argument) if isinstance(argument, Mapping) else {kind: argument}
    if not values:
        raise _wrong_argument(f"{kind}={argument!r}", f"a guard needs at least one {kind}")
    names_by_id: dict[int, str] = {}
    for name, value in values.items():
        if not (_is_name(name) and _has_type(value, needed_type)):
            needed = _describe_type(kind, needed_type, value)
            raise _wrong_argument(
                f"{kind} {name!r} is {_describe(value)}",
                f"{kind}= takes {needed}, or a dict of them",
            )
        if id(value) in names_by_id:
            raise _wrong_argument(
                f"{kind} {name!r} is the same object as {names_by_id[id(value)]!r}",
                "it would be used twice",
            )
        names_by_id[id(value)] = name
    return values


def _is_name(name: Any) -> bool:
    """Return whether a name is a string that can be part of a file name."""
    return isinstance(name, str) and name != "" and "/" not in name


def _has_type(value: Any, needed_type: type) -> bool:
    if needed_type is Stateful:
        return _can_save_and_load(value)
    return isinstance(value, needed_type)


def _can_save_and_load(value: Any) -> bool:
    """Return whether ``state_dict()`` and ``load_state_dict(state)`` can be called on an object."""
    if isinstance(value, type):
        return False
    saves = _accepts(getattr(value, "state_dict", None), argument_count=0)
    return saves and _accepts(getattr(value, "load_state_dict", None), argument_count=1)


def _accepts(method: Any, *, argument_count: int) -> bool:
    """Return whether a method can be called with this number of positional arguments.

    Some methods in C extensions have no signature. They are assumed to accept the arguments.
    """
    if not callable(method):
        return False
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * argument_count)
    except TypeError:
        return False
    return True


def _describe_type(kind: str, needed_type: type, value: Any) -> str:
    """Return a description of the values that an argument accepts, for an error message."""
    if needed_type is not Stateful:
        return f"a torch {kind}"
    if isinstance(value, DataLoader):
        return (
            "an object with state_dict() and load_state_dict(state), such as a holdfast.DataLoader"
            " (not torch's DataLoader)"
        )
    return "an object with state_dict() and load_state_dict(state)"


def _describe(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"


def _without_wrappers(
    models: dict[str, nn.Module], wrappers: Mapping[str, DistributedDataParallel]
) -> dict[str, nn.Module]:
    """Return the models without DDP wrappers, whose ``module.`` prefix would change the names."""
    if not wrappers:
        return models
    bare: dict[str, nn.Module] = dict(models)
    for name, wrapper in wrappers.items():
        bare[name] = wrapper.module
    uncompiled, _ = as_written(bare)
    return uncompiled


def _states(state: Any, averages: Mapping[str, AveragedModel]) -> dict[str, Stateful]:
    """Return the additional state by name, including the averages."""
    states: dict[str, Stateful] = {}
    is_empty = isinstance(state, dict) and not state
    if state is not None and not is_empty:
        states = _named(state, "state", Stateful)
    for model_name, average in averages.items():
        name = "averaged" if model_name == "model" else f"averaged.{model_name}"
        if name in states:
            raise _wrong_argument(
                f"state {name!r} has the name under which averaged= is saved",
                "each state needs a unique name",
            )
        states[name] = average
    return states


def _averages(averaged: Any, models: Mapping[str, nn.Module]) -> dict[str, AveragedModel]:
    """Check that each average matches its model, and return the averages by model name."""
    if averaged is None:
        return {}
    averages = dict(averaged) if isinstance(averaged, Mapping) else {"model": averaged}
    for name, average in averages.items():
        if not _is_average_of(average, models.get(name)):
            raise PolicyError(
                f"averaged={type(average).__name__}(...) is not an average of model {name!r}",
                limit=(
                    "after each step, a torch.optim.swa_utils.AveragedModel is updated from its"
                    " model, tensor by tensor"
                ),
                fix=(
                    "create it from the bare module, AveragedModel(net), before compiling or"
                    " wrapping the module. If the models have names, pass"
                    ' averaged={"generator": ...}. Pass any other kind of average as state=, and'
                    " update it in your loop after each guard.step(...) that is not skipped."
                ),
                rule="H105",
            )
    return averages


def _is_average_of(average: Any, model: nn.Module | None) -> bool:
    """Return whether `average` is an `AveragedModel` with the model's tensor names and shapes."""
    if not isinstance(average, AveragedModel):
        return False
    return _names_and_shapes(average.module) == _names_and_shapes(model)


def _names_and_shapes(module: nn.Module | None) -> list[tuple[str, torch.Size]]:
    if module is None:
        return []
    return [(name, tensor.shape) for name, tensor in named_tensors(module)]


def _check_overlap(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise H105 if two optimizers are the same object, or one wraps the other.

    Each step would then update the same weights twice.
    """
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for identity in identities(optimizer):
            owner = owners.setdefault(identity, name)
            if owner != name:
                raise _wrong_argument(
                    f"optimizers {owner!r} and {name!r} are the same, or one wraps the other",
                    "each step would update the same weights twice",
                )


def _check_shapes(kind: str, values: Mapping[str, Any]) -> None:
    """Raise H105 if a module has uninitialized lazy tensors, such as those of LazyLinear."""
    for name, value in values.items():
        if not isinstance(value, nn.Module):
            continue
        lazy = [key for key, tensor in named_tensors(value) if is_lazy(tensor)]
        if lazy:
            raise PolicyError(
                f"{kind} {name!r} has {counted(len(lazy), 'tensor')} without a shape, the first"
                f" being {lazy[0]}",
                limit=(
                    "a lazy layer creates its tensors in the first forward pass, but a guard saves"
                    " a checkpoint before that"
                ),
                fix=(
                    "run one batch through the model first, then create the optimizer and the"
                    " Guard."
                ),
                rule="H105",
            )


def _wrong_argument(problem: str, limit: str) -> PolicyError:
    return PolicyError(
        problem,
        limit=limit,
        fix=(
            "pass one object, or a dict of objects by name, such as"
            ' {"generator": ..., "discriminator": ...}.'
        ),
        rule="H105",
    )


# --- the loader


def check_loader(loader: Any) -> None:
    """Raise H105 if a loader is not an iterable of batches, or is an exhausted generator."""
    limit = "the guard iterates over it to get batches"
    fix = "pass a DataLoader or another iterable of batches."
    if _is_dataset(loader):
        limit = "a dataset yields samples, not batches"
        fix = f"wrap the {type(loader).__name__}: holdfast.DataLoader(dataset, batch_size=...)."
    elif isinstance(loader, (torch.Tensor, np.ndarray)):
        limit = "its rows are samples, not batches"
        fix = (
            "pass holdfast.DataLoader(tensor, batch_size=...). If its rows are batches, pass"
            " list(tensor)."
        )
    elif isinstance(loader, Mapping):
        limit = "iterating it yields its keys"
        fix = (
            "pass a single loader. If batches contain several kinds of data, pass"
            " holdfast.DataLoader over a dataset of dicts."
        )
    elif isinstance(loader, (str, bytes)):
        limit = "iterating it yields characters"
    elif isinstance(loader, Generator) and inspect.getgeneratorstate(loader) == inspect.GEN_CLOSED:
        limit = "it is exhausted"
        fix = "create it again, or pass an object whose __iter__ starts an epoch."
    elif isinstance(loader, Iterable) and not isinstance(loader, type):
        return
    elif callable(loader):
        limit += ", but a function or a class cannot be iterated"
        fix = "pass its return value instead."
    raise PolicyError(f"loader is {_describe(loader)}", limit=limit, fix=fix, rule="H105")


def _is_dataset(loader: Any) -> bool:
    """Return whether `loader` is a map-style dataset from torch or the ``datasets`` package.

    An iterable dataset is accepted as a loader, since it may yield whole batches.
    """
    if isinstance(loader, Dataset):
        return not isinstance(loader, IterableDataset)
    return type(loader).__module__ == "datasets.arrow_dataset"
