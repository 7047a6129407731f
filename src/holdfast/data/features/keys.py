"""What a feature cache was made from, as names and texts: the function with all that is bound to it, and the dataset.

Two builds with equal facts give the same features. A difference has a name, so that the error can say what changed:
the source of a function or of one that it calls, a default, a closure, an argument of a partial, an attribute of a
callable object or of its class, a global that the code reads, a module that it imports when it runs, a sample. What
the function changes by running is no difference (``changing``).

Not seen: files that the function opens, versions of installed packages, and what it reaches by a name that is put
together at run time. That is what the user's own ``parameters`` are for. Where more than 50 objects hold one another,
only the kinds and names of those further inside are told. Of a dataset that is not all in memory, or is large, no
samples but eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from holdfast.core.errors import LoaderError
from holdfast.data.features.changing import OF_FUNCTION, Origin, tell
from holdfast.data.features.errors import not_computed
from holdfast.data.features.sources import digest
from holdfast.data.features.telling import Teller, short
from holdfast.data.random_state import isolated, seed_cpu
from holdfast.data.seeds import derive_seed

_SAMPLES = 8
"""Samples that tell datasets apart. Another set of data differs in nearly all; eight cost no time worth naming."""
_CONTENT = "dataset: content"
_MOST_CONTENT_BYTES = 256 * 2**20
_VALUE_BYTES = 4096
"""What to tell a number or a text costs, in bytes of a tensor whose digest costs as much."""


def facts_of(dataset: Any, fn: Any, parameters: Mapping[str, Any] | None, seed: int) -> dict[str, str]:
    """Return what decides the features, by name.

    Args:
        dataset: Map-style. A list, tuple, array, tensor or TensorDataset of up to 256 MiB is read whole; of another
            one, eight samples. One that cannot be read is left out.
        fn: Computes the features of a sample.
        parameters: What the user says beside it.
        seed: Decides the random numbers that a sample and ``fn`` draw.

    Raises:
        LoaderError: H623, if none of the eight samples can be read.
    """
    teller = Teller()
    facts = tell(teller, fn).facts
    facts |= {f"parameters: {name}": short(teller.told(value)) for name, value in (parameters or {}).items()}
    facts["dataset: length"] = str(len(dataset))
    failed: list[LoaderError] = []
    looked_at = _looked_at(len(dataset))
    for index in looked_at:
        try:
            facts[_sample(index)] = short(teller.told(_read(dataset, index, seed)))
        except LoaderError as error:  # its turn may never come, and what comes before it is computed
            failed.append(error)
    if len(failed) == len(looked_at):
        raise failed[0]
    if _is_told_whole(dataset):
        facts[_CONTENT] = digest("".join(map(teller.told, _columns(dataset))).encode("utf-8", "surrogatepass"))
    facts["seed"] = str(seed)
    return facts


def as_known(origin: Origin, facts: Mapping[str, str], fn: Any, left: Mapping[str, str | None]) -> dict[str, str]:
    """Return facts as they were told of the function that features were made with, where it changed them by running.

    Args:
        origin: What those features were made from.
        facts: What there is now.
        fn: The function that there is now.
        left: Facts as the last build of these features has left them in this process, None for one that was gone.
    """
    known, runs = dict(facts), origin.runs
    marked = facts
    if runs and runs.marks:
        others = {name: text for name, text in facts.items() if not name.startswith(OF_FUNCTION)}
        marked = others | tell(Teller(runs.marks), fn).facts
    expected = origin.key | (runs.after if runs else {})
    same = [name for name in [*facts, *expected] if marked.get(name) == expected.get(name)]
    for name in [*same, *(name for name, text in left.items() if facts.get(name) == text)]:
        if name in origin.key:
            known[name] = origin.key[name]
        else:
            known.pop(name, None)
    return known


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return each fact that is another one, in words."""
    found: list[str] = []
    for name in [*there, *(name for name in here if name not in there)]:
        old, new = there.get(name), here.get(name)
        if name.startswith((_sample(""), _CONTENT)) and None in (old, new):
            continue  # not read there or here; of a dataset of another length, which is told, others are looked at
        if name == _CONTENT and any(text.startswith("dataset: ") for text in found):
            continue  # it is told what of it
        if old != new:
            found.append(f"{name} was {old or 'not there'} and is {new or 'gone'}")
    return found


def not_read(there: Mapping[str, str], here: Mapping[str, str]) -> list[int]:
    """Return the samples that were looked at there and could not be read here."""
    if there.get("dataset: length") != here.get("dataset: length"):
        return []
    gone = [name for name in there if name.startswith(_sample("")) and name not in here]
    return [int(name.removeprefix(_sample(""))) for name in gone]


def completed(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return facts with those of samples that could not be read there and can be here, in their usual order."""
    read = (_sample(""), _CONTENT)
    names = [name for name in here if name in there or name.startswith(read)]
    return {name: there.get(name, here[name]) for name in names} | dict(there)


def _sample(index: int | str) -> str:
    return f"dataset: sample {index}"


def _read(dataset: Any, index: int, seed: int) -> Any:
    """Return a sample as a build sees it, its random numbers decided by (seed, index)."""
    with isolated():
        seed_cpu(derive_seed(seed, "features", index))
        try:
            return dataset[index]
        except Exception as error:
            raise not_computed(index, f"raised {type(error).__name__}: {error}") from error


def _looked_at(length: int) -> list[int]:
    if length <= _SAMPLES:
        return list(range(length))
    between = {derive_seed("looked at", length, number) % length for number in range(_SAMPLES - 2)}
    return sorted({0, length - 1, *between})


def _columns(dataset: Any) -> Iterable[Any]:
    return dataset.tensors if type(dataset) is TensorDataset else [dataset]


def _is_told_whole(dataset: Any) -> bool:
    """Say whether all of a dataset is in memory, and little enough to be told at each build."""
    room, waiting = _MOST_CONTENT_BYTES, list(_columns(dataset))
    if not isinstance(dataset, (TensorDataset, list, tuple, np.ndarray, torch.Tensor)):
        return False
    while waiting and room >= 0:
        value = waiting.pop()
        room -= _VALUE_BYTES
        if type(value) is torch.Tensor:
            if value.layout != torch.strided or value.is_nested or value.is_meta:
                return False
            room -= value.nbytes
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            room -= value.nbytes
        elif type(value) in (str, bytes):
            room -= len(value)
        elif type(value) in (list, tuple):
            if len(value) * _VALUE_BYTES > room:
                return False
            waiting += value
        elif type(value) is dict:
            waiting += [*value.keys(), *value.values()]
        elif not isinstance(value, (bool, int, float, complex, np.generic, type(None))):
            return False  # it may be a file that is read when it is asked
    return not waiting and room >= 0
