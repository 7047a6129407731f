"""Loaders that are not holdfast's: what a resume can promise for them, and what they draw random numbers from.

The promise is "bit-exact", "none, because ..." or "not known, because ...": one sentence that a user can act on.
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

# Their order depends on the random numbers and on the epoch that they are given, and on nothing before.
_SAMPLERS_WITHOUT_STATE = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
_SAMPLERS_OF_OTHERS = (
    "accelerate.data_loader.SeedableRandomSampler",
    "accelerate.data_loader.BatchSamplerShard",
    "transformers.trainer_pt_utils.LengthGroupedSampler",
)
_PLAIN_SEQUENCES = (list, tuple, range, torch.Tensor, np.ndarray)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# A dataset holds its generator itself or in a transform; data sits deeper, or in longer lists.
_DEEPEST = 6
_LONGEST = 64
_MOST_OBJECTS = 2000
_LIBRARIES = ("builtins", "collections", "functools", "numpy", "random", "torch", "torchvision", "typing")


def is_stateful(value: object) -> bool:
    """Return whether an object can be saved and put back."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def torch_loader_of(loader: object) -> DataLoader[Any] | None:
    """Return torch's loader behind a loader: itself, or what a wrapper of holdfast's names; None if there is none."""
    inner = getattr(loader, "torch_loader", loader)
    return inner if isinstance(inner, DataLoader) else None


# --- the promise ------------------------------------------------------------------------------------------------


def resume_promise(loader: object) -> str:
    """Return what a resume can promise for a loader that is not holdfast's: the first answer of `_RULES`."""
    for rule in _RULES:
        promise = rule(loader)
        if promise is not None:
            return promise
    return (
        f"not known, because {type(loader).__name__} makes its batches in its own way: they are read over up to the "
        "position, which is exact if each is made when it is asked for, from global random numbers or generators "
        "that are its attributes. Otherwise give it state_dict and load_state_dict"
    )


def _of_an_iterator(loader: object) -> str | None:
    if isinstance(loader, Iterator):
        return (
            "none, because an iterator cannot be started again: batches that were trained are read and dropped, and "
            "what it did before is not restored. Pass the iterable that it was made from"
        )
    return None


def _of_its_own_state(loader: object) -> str | None:
    if is_stateful(loader):
        return (
            "not known, because the loader's own state_dict and load_state_dict decide it; "
            "holdfast.testing.check_resumable tries them"
        )
    return None


def _of_a_sequence(loader: object) -> str | None:
    if not isinstance(loader, _PLAIN_SEQUENCES):
        return None
    if isinstance(loader, (list, tuple)) and any(isinstance(entry, (DataLoader, Iterator)) for entry in loader):
        return (
            "none, because this is a list of loaders, and no checkpoint holds the positions in them. Pass one, "
            'and the others by name, state={"labelled": loader}, as holdfast.DataLoader'
        )
    return EXACT


def _of_torch(loader: object) -> str | None:
    inner = torch_loader_of(loader)
    if inner is None:
        return None
    for rule in _RULES_OF_TORCH:
        promise = rule(inner)
        if promise is not None:
            return promise
    return EXACT


def _of_a_subclass(loader: DataLoader[Any]) -> str | None:
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"not known, because {type(loader).__name__} iterates in its own way, not as torch's DataLoader does"
    return None


def _of_batches_out_of_order(loader: DataLoader[Any]) -> str | None:
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return (
            "none, because in_order=False hands batches out as workers finish them: no two runs read the same order"
        )
    return None


def _of_a_stream(loader: DataLoader[Any]) -> str | None:
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"not known, because the items come from a stream ({type(loader.dataset).__name__}), which may keep a "
            "position or random numbers from epoch to epoch. It is read over up to the position; holdfast.DataLoader "
            "keeps what the stream's state_dict returns"
        )
    return None


def _of_a_sampler(loader: DataLoader[Any]) -> str | None:
    for sampler in samplers_of(loader):
        name = type(sampler).__name__
        if is_stateful(sampler):
            return (
                f"not known, because the order is {name}'s own: its state_dict is kept, which is exact unless it "
                "draws from torch's global random numbers while training does too"
            )
        if not has_no_state(sampler):
            return (
                f"not known, because {name} may keep state from epoch to epoch, and has no state_dict and "
                "load_state_dict that would let a checkpoint hold it"
            )
    return None


def _of_kept_workers(loader: DataLoader[Any]) -> str | None:
    if keeps_workers(loader):
        return (
            "not known, because workers that live from epoch to epoch (persistent_workers=True) keep their random "
            "numbers, and no checkpoint holds them: after a resume behind the first epoch the order is exact, and "
            "random augmentation in the workers is not. holdfast.DataLoader keeps both"
        )
    return None


_RULES: tuple[Callable[[object], str | None], ...] = (
    _of_an_iterator,
    _of_its_own_state,
    _of_a_sequence,
    _of_torch,
)
_RULES_OF_TORCH: tuple[Callable[[DataLoader[Any]], str | None], ...] = (
    _of_a_subclass,
    _of_batches_out_of_order,
    _of_a_stream,
    _of_a_sampler,
    _of_kept_workers,
)


def keeps_by_state_dict(loader: object) -> bool:
    """Return whether a loader, or its sampler, was given a state_dict to be resumed by: its author has seen to it."""
    return is_stateful(loader) or any(is_stateful(sampler) for sampler in samplers_of(loader))


# --- samplers and generators ------------------------------------------------------------------------------------


def samplers_of(loader: object) -> list[Any]:
    """Return what decides a loader's order, outermost first: batch sampler, sampler, and those inside of them.

    A loader with a batch sampler also shows a sampler that it does not use; torch puts one there.
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
    """Return whether a sampler is known to carry nothing from epoch to epoch, but for its generator."""
    if type(sampler) is BatchSampler:
        return True  # what it takes its indices from is looked at too
    name = f"{type(sampler).__module__}.{type(sampler).__qualname__}"
    return (
        type(sampler) in _SAMPLERS_WITHOUT_STATE
        or name in _SAMPLERS_OF_OTHERS
        or isinstance(sampler, _PLAIN_SEQUENCES)
        # The stand-in of torch for streams and for batch_size=None.
        or type(sampler).__name__ == "_InfiniteConstantSampler"
    )


def set_epoch(loader: object, epoch: int) -> None:
    """Tell a loader's samplers which epoch begins, also those inside of a sampler of batches."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None), *samplers_of(loader)]
    for sampler in {id(sampler): sampler for sampler in samplers}.values():
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def sources_of_state(loader: object) -> list[Any]:
    """Return what a loader draws from besides global random numbers: generators of its own, and samplers with state.

    Generators are looked for in the loader, its samplers, and the dataset, ``collate_fn`` and transforms of torch's
    loader, and among the global variables that their functions use. The order is the same for a loader that was
    built in the same way.
    """
    source = torch_loader_of(loader)
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    sources = [value for holder in holders for value in _attributes(holder) if isinstance(value, _GENERATORS)]
    if source is not None:
        sources += generators_in([source.generator, *samplers_of(source), source.dataset, source.collate_fn])
        sources += [sampler for sampler in samplers_of(source) if is_stateful(sampler)]
        sources += generators_in_globals([*samplers_of(source), source.dataset, source.collate_fn])
    return list({id(value): value for value in sources}.values())


def generators_in(values: Iterable[Any]) -> list[Any]:
    """Return the random generators among values and, down to some depth, in their attributes and short containers."""
    return [value for value in _reachable(values) if isinstance(value, _GENERATORS)]


def generators_in_globals(values: Iterable[Any]) -> list[Any]:
    """Return the random generators in global variables that functions use: those among values, and their methods.

    Functions that are called by such a one are looked into as well.
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
    """Return whether a module is one of those that every dataset builds on, which have no generators for it."""
    return str(module).split(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> set[str]:
    """Return the global names in the code of a function and of those that are defined inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _reachable(values: Iterable[Any]) -> list[Any]:
    """Return values and what they hold, down to some depth, nearest first."""
    reached: list[Any] = []
    level = list(values)
    visited: dict[int, Any] = {}
    for _ in range(_DEEPEST):
        level = [value for value in level if id(value) not in visited][: _MOST_OBJECTS - len(visited)]
        visited.update((id(value), value) for value in level)
        reached += level
        level = [part for value in level for part in _parts_of(value)]
    return reached


def _parts_of(value: Any) -> Iterable[Any]:
    """Return what an object holds, as far as a generator could be among it; nothing for data."""
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _LONGEST else ()
    if isinstance(value, (list, tuple)):
        return value if len(value) <= _LONGEST else ()
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    return _attributes(value)


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, (torch.Tensor, np.ndarray, type, ModuleType)):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
