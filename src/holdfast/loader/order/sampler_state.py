"""Copy a user's sampler, and detect changes to its attributes."""

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

from holdfast.loader.random_state import GENERATOR_TYPES

# Attributes in which samplers store the dataset, which may be large and is not part of their state.
_DATA_ATTRIBUTES = ("data_source", "dataset")

# Attributes that `HostEpochs` adds to samplers.
_ADDED_ATTRIBUTES = ("set_epoch",)

_PLAIN_TYPES = frozenset((bool, int, float, complex, str, bytes, type(None)))

# Number of levels of nested samplers in which `copy_sampler` looks for objects to share.
_MAX_LEVELS = 4


class Fingerprint(NamedTuple):
    """A digest of the attributes of one or more samplers.

    Args:
        digest: The digest. Equal attributes have equal digests.
        is_complete: False if the digest omits a value whose state cannot be read, such as an
            iterator.
    """

    digest: bytes
    is_complete: bool


def fingerprint(samplers: Iterable[Any], dataset: Any) -> Fingerprint:
    """Return the fingerprint of one or more samplers.

    Fingerprints can only be compared within a process. Equal fingerprints mean that the attributes
    are equal. Different fingerprints usually mean that an attribute has changed. Generators that
    are seeded for each epoch are not included.

    Args:
        samplers: The samplers.
        dataset: The samplers' dataset, which is not included.
    """
    digester = _Digester(dataset)
    for sampler in samplers:
        try:
            if isinstance(sampler, (list, tuple, range, torch.Tensor, np.ndarray)):
                digester.visit(sampler)
            else:
                digester.visit_attributes(sampler)
        except Exception:  # noqa: BLE001 - reading an attribute may raise anything
            digester.is_complete = False
    return Fingerprint(digester.digest.digest(), digester.is_complete)


def copy_sampler(sampler: Any, dataset: Any) -> Any | None:
    """Return a deep copy of a sampler, or None if it cannot be copied.

    The copy shares the sampler's dataset and models.
    """
    shared = [dataset]
    inner = sampler
    for _ in range(_MAX_LEVELS):
        attributes = getattr(inner, "__dict__", {})
        for name, value in attributes.items():
            if name in (*_DATA_ATTRIBUTES, *_ADDED_ATTRIBUTES) or isinstance(
                value, torch.nn.Module
            ):
                shared.append(value)
        inner = attributes.get("sampler")
    try:
        return copy.deepcopy(sampler, {id(value): value for value in shared if value is not None})
    except Exception:  # noqa: BLE001 - copying a generator, a lock or an open file may raise anything
        return None


def same_state(first: Any, second: Any) -> bool:
    """Return whether two results of ``state_dict()`` are equal."""
    arrays = (torch.Tensor, np.ndarray)
    if isinstance(first, arrays) or isinstance(second, arrays):
        return _same_array(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            same_state(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same_state, first, second))
    return bool(first == second)


def _same_array(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return bool((first == second).all())


def as_ranges(epochs: Iterable[int]) -> list[list[int]]:
    """Convert a sequence of epochs to ranges of consecutive numbers: ``[[first, last], ...]``.

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
    """Convert the ranges returned by `as_ranges` back to a sequence of epochs."""
    epochs: list[int] = []
    for first, last in ranges:
        epochs += range(first, last + 1)
    return epochs


def _state_attributes(value: Any, dataset: Any) -> dict[str, Any]:
    """Return the attributes of an object that may change from epoch to epoch, by name.

    The result does not include the dataset, attributes that holdfast added, or a generator that is
    seeded for each epoch.
    """
    attributes = getattr(value, "__dict__", {})
    return {
        name: attribute
        for name, attribute in attributes.items()
        if attribute is not dataset
        and name not in (*_DATA_ATTRIBUTES, *_ADDED_ATTRIBUTES)
        and not (name == "generator" and isinstance(attribute, torch.Generator))
    }


class _Digester:
    """Computes a digest of values, of the contents of containers and of the attributes of objects.

    Lists of numbers are digested through their ``repr``, which is fast even for long lists.
    """

    def __init__(self, dataset: Any) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.is_complete = True
        self._dataset = dataset
        # The visited objects by id. The references keep them alive, so that their ids are not
        # reused.
        self._visited: dict[int, Any] = {}

    def visit_attributes(self, value: Any) -> None:
        """Digest an object's class and the names and values of its attributes."""
        self._add(type(value).__qualname__)
        for name, attribute in _state_attributes(value, self._dataset).items():
            self._add(name)
            self.visit(attribute)

    def visit(self, value: Any) -> None:
        """Digest a value according to its type."""
        if type(value) in _PLAIN_TYPES or _is_flat(value):
            self._add(repr(value))
        elif isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            self._visit_array(value)
        elif isinstance(value, Mapping):
            self._visit_once(value, lambda: self._visit_all([*value.keys(), *value.values()]))
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            self._visit_once(value, lambda: self._visit_all(value))
        elif isinstance(value, GENERATOR_TYPES):
            self._visit_generator(value)
        elif isinstance(value, torch.nn.Module):
            # A sampler that uses a model depends on its parameters. torch counts the in-place
            # changes to each tensor in `_version`.
            self._add(repr([tensor._version for tensor in value.parameters()]))
        elif isinstance(value, (type, FunctionType, MethodType, ModuleType)):
            self._add(repr(getattr(value, "__qualname__", "a module")))
        elif isinstance(value, Iterator) or not hasattr(value, "__dict__"):
            self.is_complete = False
        else:
            self._visit_once(value, lambda: self.visit_attributes(value))

    def _visit_once(self, value: Any, visit: Callable[[], None]) -> None:
        """Digest a container or an object only once, because references may form a cycle."""
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
    """Return whether a value is a container that only contains numbers, strings, bytes or None."""
    return type(value) in (list, tuple, set, frozenset, range) and _PLAIN_TYPES.issuperset(
        map(type, value)
    )
