"""What a sampler of the user's carries from epoch to epoch: noticed from outside, and copied to be undone."""

from __future__ import annotations

import collections
import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

# Attributes of samplers that hold the dataset, which is no state of theirs and may be large.
_DATA = ("data_source", "dataset")

# What `HostEpochs` puts on samplers that have none.
_OURS = ("set_epoch",)

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_DEEPEST = 4  # samplers inside of samplers that are looked into


class Fingerprint(NamedTuple):
    """A digest of all attributes of a sampler, and whether all could be looked into: an iterator cannot be."""

    digest: bytes
    is_complete: bool


def fingerprint(samplers: Iterable[Any], dataset: Any) -> Fingerprint:
    """Return a fingerprint of samplers, without their dataset and the generators that are seeded for each epoch.

    Equal ones mean equal attributes; unequal ones usually mean that something has changed. It is for comparisons
    within one process.
    """
    walk = _Walk(dataset)
    for sampler in samplers:
        try:
            if isinstance(sampler, (list, tuple, range, torch.Tensor, np.ndarray)):
                walk.visit(sampler)
            else:
                walk.visit_attributes(sampler)
        except Exception:  # noqa: BLE001 - whatever an attribute raises when it is looked at
            walk.is_complete = False
    return Fingerprint(walk.digest.digest(), walk.is_complete)


def copied(sampler: Any, dataset: Any) -> Any | None:
    """Return a copy of a sampler that shares its dataset and models that it asks; None if it cannot be copied."""
    shared = [dataset]
    inner = sampler
    for _ in range(_DEEPEST):
        attributes = getattr(inner, "__dict__", {})
        for name, value in attributes.items():
            if name in (*_DATA, *_OURS) or isinstance(value, torch.nn.Module):
                shared.append(value)
        inner = attributes.get("sampler")
    try:
        return copy.deepcopy(sampler, {id(value): value for value in shared if value is not None})
    except Exception:  # noqa: BLE001 - whatever an attribute raises: a generator, a lock, an open file
        return None


def same_state(one: Any, other: Any) -> bool:
    """Return whether two trees of state, as ``state_dict()`` returns them, hold equal values."""
    if isinstance(one, (torch.Tensor, np.ndarray)) or isinstance(other, (torch.Tensor, np.ndarray)):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool((one == other).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_state(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


def as_ranges(epochs: Iterable[int]) -> list[list[int]]:
    """Return a sequence of numbers as runs of consecutive ones: ``[[first, last], ...]``.

    Example:
        >>> as_ranges([0, 1, 2, 5, 5])
        [[0, 2], [5, 5], [5, 5]]
    """
    ranges: list[list[int]] = []
    for epoch in epochs:
        if ranges and ranges[-1][1] == epoch - 1:
            ranges[-1][1] = epoch
        else:
            ranges.append([epoch, epoch])
    return ranges


def from_ranges(ranges: Iterable[Iterable[int]]) -> list[int]:
    """Return what `as_ranges` was given."""
    return [epoch for first, last in ranges for epoch in range(first, last + 1)]


def _own_attributes(value: Any, dataset: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", {})
    return {
        name: attribute
        for name, attribute in attributes.items()
        if attribute is not dataset
        and name not in (*_DATA, *_OURS)
        and not (name == "generator" and isinstance(attribute, torch.Generator))
    }


class _Walk:
    """Digests values and, of objects, their attributes; long lists of numbers at the speed of C."""

    def __init__(self, dataset: Any) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.is_complete = True
        self._dataset = dataset
        self._visited: dict[int, Any] = {}  # kept alive here, so that no other object gets the id of one

    def visit_attributes(self, value: Any) -> None:
        """Digest the attributes of an object by name, and its class."""
        self._add(type(value).__qualname__)
        for name, attribute in _own_attributes(value, self._dataset).items():
            self._add(name)
            self.visit(attribute)

    def visit(self, value: Any) -> None:
        """Digest one value: the first branch that knows its type."""
        if type(value) in _PLAIN or _is_flat(value):
            self._add(repr(value))
        elif isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            self._visit_array(value)
        elif isinstance(value, Mapping):
            self._visit_once(value, lambda: self._visit_all([*value.keys(), *value.values()]))
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            self._visit_once(value, lambda: self._visit_all(value))
        elif isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            self._visit_generator(value)
        elif isinstance(value, torch.nn.Module):
            # Each change in place counts up: a sampler that asks the model changes with every step.
            self._add(repr([tensor._version for tensor in value.parameters()]))
        elif isinstance(value, (type, FunctionType, MethodType, ModuleType)):
            self._add(repr(getattr(value, "__qualname__", "a module")))
        elif isinstance(value, Iterator) or not hasattr(value, "__dict__"):
            self.is_complete = False
        else:
            self._visit_once(value, lambda: self.visit_attributes(value))

    def _visit_once(self, value: Any, visit: Callable[[], None]) -> None:
        """Digest a container or an object unless that was done before; they may refer to each other."""
        self._add(f"{type(value).__qualname__} {id(value) in self._visited}")
        if id(value) not in self._visited and value is not self._dataset:
            self._visited[id(value)] = value
            visit()

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.visit(value)

    def _visit_array(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add(f"{value.dtype} {tuple(value.shape)}")
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif value.dtype.hasobject:
            self._visit_all(value.reshape(-1).tolist())
            return
        self._add(f"{value.dtype} {value.shape}")
        self.digest.update(value.tobytes())

    def _visit_generator(self, value: Any) -> None:
        if isinstance(value, torch.Generator):
            self._visit_array(value.get_state())
        elif isinstance(value, np.random.Generator):
            self.visit(value.bit_generator.state)
        else:
            self.visit(value.getstate() if isinstance(value, random.Random) else value.get_state())

    def _add(self, text: str) -> None:
        self.digest.update(text.encode("utf-8", "surrogatepass") + b"\0")


def _is_flat(value: Any) -> bool:
    """Return whether this is a container of nothing but numbers and texts, which may be long."""
    return type(value) in (list, tuple, set, frozenset, range) and _PLAIN.issuperset(map(type, value))
