"""Infer from an iterable dataset's code whether it divides its items among workers or ranks."""

from __future__ import annotations

import inspect
from typing import Any

# Names used in the code of datasets that divide their items among workers.
_SHARDING_NAMES = {
    "get_worker_info",
    "worker_info",
    "num_replicas",
    "split_by_worker",
    "split_by_node",
}

# Names in the code or the attributes of datasets that divide their items among ranks.
_RANK_NAMES = {
    "get_rank",
    "get_world_size",
    "rank",
    "world_size",
    "num_replicas",
    "process_index",
    "num_processes",
}

# Hugging Face datasets, which divide their shards among workers, have one of these attributes.
_SHARD_COUNTS = ("num_shards", "n_shards")


def shards_itself(dataset: Any, worker_init_fn: Any = None) -> bool:
    """Return whether an iterable dataset divides its items among workers itself.

    This is assumed if `worker_init_fn` or the dataset's code uses the worker info, or if the
    dataset has shards.

    Args:
        dataset: The iterable dataset.
        worker_init_fn: The user's ``worker_init_fn``, or None.
    """
    if "get_worker_info" in _names_in(worker_init_fn):
        return True
    if any(hasattr(dataset, name) for name in _SHARD_COUNTS):
        return True
    return _uses_a_name(dataset, _SHARDING_NAMES)


def divides_among_ranks(dataset: Any) -> bool:
    """Return whether an iterable dataset divides its items among ranks itself.

    This is assumed if the dataset's code uses a name that refers to ranks, such as ``get_rank``, or
    if the dataset has an attribute with such a name.
    """
    attributes = set(getattr(dataset, "__dict__", ()))
    return bool(_RANK_NAMES & attributes) or _uses_a_name(dataset, _RANK_NAMES)


def _uses_a_name(dataset: Any, names: set[str]) -> bool:
    """Return whether the dataset's own methods, not those inherited from torch, use these names."""
    for cls in type(dataset).__mro__:
        if cls.__module__.startswith("torch."):
            continue
        for member in vars(cls).values():
            if callable(member) and names & _names_in(inspect.unwrap(member)):
                return True
    return False


def _names_in(function: Any) -> set[str]:
    code = getattr(function, "__code__", None)
    if code is None:
        return set()
    return {*code.co_names, *code.co_freevars}
