"""Find the samplers of any loader, and determine whether they carry state between epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

# The order of these samplers depends only on their random generator and on the epoch.
_SAMPLERS_WITHOUT_STATE = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)

# Other samplers of this kind. They are given by name, because their libraries may not be installed.
_FOREIGN_SAMPLERS_WITHOUT_STATE = (
    "accelerate.data_loader.SeedableRandomSampler",
    "accelerate.data_loader.BatchSamplerShard",
    "transformers.trainer_pt_utils.LengthGroupedSampler",
)

# Types of sequences that yield the same entries in every epoch.
PLAIN_SEQUENCES = (list, tuple, range, torch.Tensor, np.ndarray)


def is_stateful(value: object) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def torch_loader_of(loader: object) -> DataLoader[Any] | None:
    """Return the torch ``DataLoader`` that a loader is or wraps, or None if there is none."""
    inner = getattr(loader, "torch_loader", loader)
    return inner if isinstance(inner, DataLoader) else None


def samplers_of(loader: object) -> list[Any]:
    """Return the samplers that determine a loader's order, outermost first.

    Each sampler is followed by the sampler inside it. If a loader has a batch sampler, its
    attribute ``sampler`` is ignored, as in torch.
    """
    torch_loader = torch_loader_of(loader)
    source = loader if torch_loader is None else torch_loader
    sampler = getattr(source, "batch_sampler", None)
    if sampler is None:
        sampler = getattr(source, "sampler", None)
    samplers: list[Any] = []
    while sampler is not None and all(sampler is not other for other in samplers):
        samplers.append(sampler)
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    return samplers


def has_no_state(sampler: object) -> bool:
    """Return whether a sampler is known to carry at most a generator's state between epochs."""
    if type(sampler) is BatchSampler:
        # Any state is in the sampler inside the batch sampler, which callers check separately.
        return True
    if type(sampler) in _SAMPLERS_WITHOUT_STATE or isinstance(sampler, PLAIN_SEQUENCES):
        return True
    name = f"{type(sampler).__module__}.{type(sampler).__qualname__}"
    if name in _FOREIGN_SAMPLERS_WITHOUT_STATE:
        return True
    # torch uses this class as a placeholder for the sampler of an `IterableDataset`.
    return type(sampler).__name__ == "_InfiniteConstantSampler"


def set_epoch(loader: object, epoch: int) -> None:
    """Call ``set_epoch`` on all samplers of a loader, including nested ones."""
    samplers = [
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
        *samplers_of(loader),
    ]
    unique_samplers = {id(sampler): sampler for sampler in samplers}
    for sampler in unique_samplers.values():
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
