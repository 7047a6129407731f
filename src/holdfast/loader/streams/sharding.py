"""Whether an iterable dataset divides its items itself, as far as its code shows."""

from __future__ import annotations

import inspect
from typing import Any

_SHARDING_WORDS = {
    "get_worker_info",
    "worker_info",
    "num_replicas",
    "split_by_worker",
    "split_by_node",
}
_RANK_WORDS = {
    "get_rank",
    "get_world_size",
    "rank",
    "world_size",
    "num_replicas",
    "process_index",
    "num_processes",
}
# Hugging Face datasets deal out their shards themselves
_SHARDING_ATTRIBUTES = ("num_shards", "n_shards")


def shards_itself(dataset: Any, worker_init_fn: Any = None) -> bool:
    """Return whether an iterable dataset divides its items among workers, as far as its code shows.

    Looks for ``get_worker_info`` in the functions of its classes and in ``worker_init_fn``, and for
    attributes that such datasets have.
    """
    asks = "get_worker_info" in _words_of(worker_init_fn)
    return (
        asks
        or any(hasattr(dataset, name) for name in _SHARDING_ATTRIBUTES)
        or _names(dataset, _SHARDING_WORDS)
    )


def divides_among_ranks(dataset: Any) -> bool:
    """Return whether an iterable dataset divides its items among ranks, as far as code and
    attributes show.
    """
    return bool(_RANK_WORDS & set(getattr(dataset, "__dict__", ()))) or _names(dataset, _RANK_WORDS)


def _names(dataset: Any, words: set[str]) -> bool:
    """Return whether a function of the dataset's classes, torch's left out, names one of these
    words.
    """
    kinds = [kind for kind in type(dataset).__mro__ if not kind.__module__.startswith("torch.")]
    members = [
        inspect.unwrap(member)
        for kind in kinds
        for member in vars(kind).values()
        if callable(member)
    ]
    return any(words & _words_of(member) for member in members)


def _words_of(function: Any) -> set[str]:
    code = getattr(function, "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_freevars}
