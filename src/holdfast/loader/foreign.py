"""Say what a resume can promise for a loader that is not holdfast's, and find the random generators
it uses.

The promise is "bit-exact", "none, because ..." or "not known, because ...": a sentence on which a
user can act.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from holdfast.loader.torch_workers import keeps_workers

EXACT = "bit-exact"

# The order that these samplers return depends only on the random numbers and the epoch that they
# are given.
_SAMPLERS_WITHOUT_STATE = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
# Such samplers of libraries that may not be installed.
_FOREIGN_SAMPLERS_WITHOUT_STATE = (
    "accelerate.data_loader.SeedableRandomSampler",
    "accelerate.data_loader.BatchSamplerShard",
    "transformers.trainer_pt_utils.LengthGroupedSampler",
)
_PLAIN_SEQUENCES = (list, tuple, range, torch.Tensor, np.ndarray)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# Limits of the search for generators. A dataset holds its generator itself or in a transform.
# Objects that are deeper or in longer containers are data.
_MOST_LEVELS = 6
_LONGEST_CONTAINER = 64
_MOST_OBJECTS = 2000
# Modules whose functions are not searched for generators in global variables.
_LIBRARIES = (
    "builtins",
    "collections",
    "functools",
    "numpy",
    "random",
    "torch",
    "torchvision",
    "typing",
)


def is_stateful(value: object) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def torch_loader_of(loader: object) -> DataLoader[Any] | None:
    """Return the torch ``DataLoader`` that a loader is or that holdfast's wrapper of it holds,
    or None.
    """
    inner = getattr(loader, "torch_loader", loader)
    return inner if isinstance(inner, DataLoader) else None


# --- the promise


def resume_promise(loader: object) -> str:
    """Return the promise for a loader that is not holdfast's.

    That of the first rule in `_RULES` that has one.
    """
    for rule in _RULES:
        promise = rule(loader)
        if promise is not None:
            return promise
    return (
        f"not known, because {type(loader).__name__} makes its batches in its own way. A resume"
        " reads and drops batches up to the position, which is exact if each is made only when it"
        " is requested, from global random numbers or generators that are attributes of the"
        " loader. Otherwise give it state_dict and load_state_dict"
    )


def _promise_for_iterator(loader: object) -> str | None:
    if isinstance(loader, Iterator):
        return (
            "none, because an iterator cannot be restarted: a resume can only drop as many batches"
            " of a new one. Pass the iterable that it was made from"
        )
    return None


def _promise_for_own_state(loader: object) -> str | None:
    if is_stateful(loader):
        return (
            "not known, because the loader's own state_dict and load_state_dict decide it; "
            "holdfast.testing.check_resumable tries them"
        )
    return None


def _promise_for_sequence(loader: object) -> str | None:
    if not isinstance(loader, _PLAIN_SEQUENCES):
        return None
    if isinstance(loader, (list, tuple)) and any(
        isinstance(entry, (DataLoader, Iterator)) for entry in loader
    ):
        return (
            "none, because this is a list of loaders, and no checkpoint holds the positions in"
            " them. Pass one as loader=, and the others as holdfast.DataLoader in"
            ' state={"labelled": loader}'
        )
    return EXACT


def _promise_for_torch_loader(loader: object) -> str | None:
    inner = torch_loader_of(loader)
    if inner is None:
        return None
    for rule in _TORCH_RULES:
        promise = rule(inner)
        if promise is not None:
            return promise
    return EXACT


def _promise_for_subclass(loader: DataLoader[Any]) -> str | None:
    if type(loader).__iter__ is not DataLoader.__iter__:
        return (
            f"not known, because {type(loader).__name__} overrides __iter__ of torch's DataLoader"
        )
    return None


def _promise_out_of_order(loader: DataLoader[Any]) -> str | None:
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return (
            "none, because in_order=False returns batches in the order in which workers finish"
            " them, which differs from run to run"
        )
    return None


def _promise_for_stream(loader: DataLoader[Any]) -> str | None:
    if isinstance(loader.dataset, IterableDataset):
        return (
            "not known, because the samples come from an IterableDataset"
            f" ({type(loader.dataset).__name__}), which may carry a position or random numbers from"
            " epoch to epoch. A resume reads and drops batches up to the position;"
            " holdfast.DataLoader saves the dataset's state_dict instead"
        )
    return None


def _promise_for_sampler(loader: DataLoader[Any]) -> str | None:
    for sampler in samplers_of(loader):
        name = type(sampler).__name__
        if is_stateful(sampler):
            return (
                f"not known, because the order comes from {name}: its state_dict is saved, which is"
                " exact unless it draws from torch's global random numbers during training"
            )
        if not has_no_state(sampler):
            return (
                f"not known, because {name} may carry state from epoch to epoch, and has no"
                " state_dict and load_state_dict for a checkpoint"
            )
    return None


def _promise_for_persistent_workers(loader: DataLoader[Any]) -> str | None:
    if keeps_workers(loader):
        return (
            "not known, because with persistent_workers=True the workers carry random numbers from"
            " epoch to epoch, and no checkpoint holds them: after a resume beyond the first epoch"
            " the order is exact, but random augmentation in the workers is not."
            " holdfast.DataLoader restores both"
        )
    return None


_RULES: tuple[Callable[[object], str | None], ...] = (
    _promise_for_iterator,
    _promise_for_own_state,
    _promise_for_sequence,
    _promise_for_torch_loader,
)
_TORCH_RULES: tuple[Callable[[DataLoader[Any]], str | None], ...] = (
    _promise_for_subclass,
    _promise_out_of_order,
    _promise_for_stream,
    _promise_for_sampler,
    _promise_for_persistent_workers,
)


def keeps_by_state_dict(loader: object) -> bool:
    """Return whether a loader or its sampler has a ``state_dict``, so that its author has
    provided for a resume.
    """
    return is_stateful(loader) or any(is_stateful(sampler) for sampler in samplers_of(loader))


# --- samplers and generators


def samplers_of(loader: object) -> list[Any]:
    """Return the samplers that decide a loader's order, outermost first.

    Each with the ones inside it.

    If a loader has a batch sampler, its attribute ``sampler`` is ignored, because torch does not
    use it then.
    """
    inner = torch_loader_of(loader)
    source = loader if inner is None else inner
    outermost = getattr(source, "batch_sampler", None)
    if outermost is None:
        outermost = getattr(source, "sampler", None)
    samplers: list[Any] = []
    while outermost is not None and all(outermost is not sampler for sampler in samplers):
        samplers.append(outermost)
        outermost = getattr(outermost, "sampler", getattr(outermost, "batch_sampler", None))
    return samplers


def has_no_state(sampler: object) -> bool:
    """Return whether a sampler is known to carry nothing but its generator from epoch to epoch."""
    if type(sampler) is BatchSampler:
        # The callers check the sampler inside it as well.
        return True
    name = f"{type(sampler).__module__}.{type(sampler).__qualname__}"
    return (
        type(sampler) in _SAMPLERS_WITHOUT_STATE
        or name in _FOREIGN_SAMPLERS_WITHOUT_STATE
        or isinstance(sampler, _PLAIN_SEQUENCES)
        # torch uses this placeholder for an IterableDataset.
        or type(sampler).__name__ == "_InfiniteConstantSampler"
    )


def set_epoch(loader: object, epoch: int) -> None:
    """Tell a loader's samplers which epoch begins, also those inside of a sampler of batches."""
    samplers = [
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
        *samplers_of(loader),
    ]
    for sampler in {id(sampler): sampler for sampler in samplers}.values():
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def sources_of_state(loader: object) -> list[Any]:
    """Return the objects with random or other state that a loader uses.

    Generators, and samplers with state.

    Generators are searched for in the attributes of the loader and its samplers, in the dataset,
    ``collate_fn`` and transforms of a torch loader, and among the global variables that their
    functions use. Two loaders that were built in the same way return them in the same order.
    """
    source = torch_loader_of(loader)
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    sources = [
        value
        for holder in holders
        for value in _attributes(holder)
        if isinstance(value, _GENERATORS)
    ]
    if source is not None:
        sources += generators_in(
            [source.generator, *samplers_of(source), source.dataset, source.collate_fn]
        )
        sources += [sampler for sampler in samplers_of(source) if is_stateful(sampler)]
        sources += generators_in_globals([*samplers_of(source), source.dataset, source.collate_fn])
    return list({id(value): value for value in sources}.values())


def generators_in(values: Iterable[Any]) -> list[Any]:
    """Return the random generators among values and, down to `_MOST_LEVELS`, in their attributes
    and containers.
    """
    return [value for value in _reachable(values) if isinstance(value, _GENERATORS)]


def generators_in_globals(values: Iterable[Any]) -> list[Any]:
    """Return the random generators in global variables that functions use.

    Those among values, and their methods.

    Functions that are called by such a one are searched as well.
    """
    functions: dict[int, FunctionType] = {}
    waiting = [function for value in _reachable(values) for function in _functions_of(value)]
    generators: dict[int, Any] = {}
    while waiting and len(functions) < _MOST_OBJECTS:
        function = waiting.pop()
        if id(function) in functions or _is_of_a_library(function.__module__):
            continue
        functions[id(function)] = function
        for name in sorted(_names_in(function.__code__)):
            value = function.__globals__.get(name)
            if isinstance(value, _GENERATORS):
                generators[id(value)] = value
            elif isinstance(value, FunctionType):
                waiting.append(value)
    return list(generators.values())


def _functions_of(value: Any) -> list[FunctionType]:
    """Return a function itself, or the methods that the user's own classes give an object."""
    if isinstance(value, FunctionType):
        return [value]
    return [
        attribute
        for kind in type(value).__mro__
        if not _is_of_a_library(kind.__module__)
        for attribute in vars(kind).values()
        if isinstance(attribute, FunctionType)
    ]


def _is_of_a_library(module: str | None) -> bool:
    """Return whether a module belongs to a library that has no generators for a user's dataset."""
    return str(module).split(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> set[str]:
    """Return the global names in the code of a function and of those that are defined inside of
    it.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _reachable(values: Iterable[Any]) -> list[Any]:
    """Return values and, down to `_MOST_LEVELS`, their attributes and what short containers
    hold, nearest first.
    """
    reached: list[Any] = []
    level = list(values)
    visited: dict[int, Any] = {}
    for _ in range(_MOST_LEVELS):
        level = [value for value in level if id(value) not in visited][
            : _MOST_OBJECTS - len(visited)
        ]
        visited.update((id(value), value) for value in level)
        reached += level
        level = [part for value in level for part in _parts_of(value)]
    return reached


def _parts_of(value: Any) -> Iterable[Any]:
    """Return the objects that an object holds, or nothing for a long container or an array,
    which hold data.
    """
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _LONGEST_CONTAINER else ()
    if isinstance(value, (list, tuple)):
        return value if len(value) <= _LONGEST_CONTAINER else ()
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    return _attributes(value)


def _attributes(value: Any) -> list[Any]:
    """Return the values of an object's attributes.

    Nothing for tensors, arrays, classes and modules.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, type, ModuleType)):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
