"""Find the samplers of any loader, and whether they carry state from epoch to epoch."""

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

# The order of these samplers depends only on their random numbers and on the epoch.
_SAMPLERS_WITHOUT_STATE = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)

# Samplers of the same kind, in libraries that may not be installed.
_FOREIGN_SAMPLERS_WITHOUT_STATE = (
    "accelerate.data_loader.SeedableRandomSampler",
    "accelerate.data_loader.BatchSamplerShard",
    "transformers.trainer_pt_utils.LengthGroupedSampler",
)

# Sequences that return the same entries each time they are iterated.
PLAIN_SEQUENCES = (list, tuple, range, torch.Tensor, np.ndarray)


def is_stateful(value: object) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def torch_loader_of(loader: object) -> DataLoader[Any] | None:
    """Return a loader if it is torch's ``DataLoader``, or the one inside holdfast's wrapper.

    Returns None if there is none.
    """
    inner = getattr(loader, "torch_loader", loader)
    return inner if isinstance(inner, DataLoader) else None


def samplers_of(loader: object) -> list[Any]:
    """Return the samplers that determine a loader's order, outermost first.

    Each is followed by the one inside it. If a loader has a batch sampler, its attribute
    ``sampler`` is ignored, because torch does not use it then.
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
    """Return whether a sampler is known to carry no state except its generator between epochs."""
    if type(sampler) is BatchSampler:
        # The callers check the sampler inside it as well.
        return True
    if type(sampler) in _SAMPLERS_WITHOUT_STATE or isinstance(sampler, PLAIN_SEQUENCES):
        return True
    name = f"{type(sampler).__module__}.{type(sampler).__qualname__}"
    if name in _FOREIGN_SAMPLERS_WITHOUT_STATE:
        return True
    # The placeholder that torch uses for an IterableDataset.
    return type(sampler).__name__ == "_InfiniteConstantSampler"


def set_epoch(loader: object, epoch: int) -> None:
    """Call ``set_epoch`` of a loader's samplers, including nested ones."""
    samplers = [
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
        *samplers_of(loader),
    ]
    unique_samplers = {id(sampler): sampler for sampler in samplers}
    for sampler in unique_samplers.values():
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
