"""The arguments of `DataLoader`.

Checked before any work, and turned into an order and a place among the ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from holdfast.core.errors import LoaderError
from holdfast.loader.order.orders import Order, Sequential, Shuffled
from holdfast.loader.order.plan import Plan
from holdfast.loader.order.ranks import ranks_now
from holdfast.loader.order.sampled import Sampled
from holdfast.loader.streams.sharding import divides_among_ranks

_TORCH = inspect.signature(TorchDataLoader.__init__)
_AS_TORCH = ("pin_memory", "worker_init_fn", "prefetch_factor", "pin_memory_device")


def check_arguments(
    dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, seed: int, quarantine: float
) -> dict[str, Any]:
    """Return torch's arguments by name.

    H607 for what cannot be used, H610 for a dataset without samples.
    """
    given: dict[str, Any] = dict(_TORCH.bind(None, dataset, *args, **kwargs).arguments)
    del given["self"]
    workers, prefetch, generator = (
        given.get("num_workers", 0),
        given.get("prefetch_factor"),
        given.get("generator"),
    )
    number = isinstance(quarantine, (int, float)) and not isinstance(quarantine, bool)
    whole, seeding = isinstance(workers, int), isinstance(generator, (torch.Generator, type(None)))
    several = prefetch is None or (isinstance(prefetch, int) and prefetch > 0)
    stream = isinstance(dataset, IterableDataset)
    reads_one = getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)
    _need(
        whole,
        f"num_workers={workers!r}",
        "it is a number",
        "pass one; H630 says when it is too many.",
    )
    _need(
        several,
        f"prefetch_factor={prefetch!r}",
        "each worker has a batch under way",
        "pass 1 or more.",
    )
    _need(
        workers or not given.get("timeout"),
        "timeout with num_workers=0",
        "only workers are waited for",
        "omit it.",
    )
    _need(
        seeding, f"generator={generator!r}", "it is a torch.Generator", "pass seed= for a number."
    )
    _need(
        type(seed) is not bool and hasattr(seed, "__index__"),
        f"seed={seed!r}",
        "it is a whole number",
        "as 0.",
    )
    share = number and 0 <= quarantine < math.inf
    _need(
        share,
        f"quarantine={quarantine!r}",
        "it is a share or a number of samples",
        "pass 0.001, 5, or 0 for none.",
    )
    _need(
        stream or reads_one or not hasattr(dataset, "__getitems__"),
        f"{type(dataset).__name__} has __getitems__ and no __getitem__",
        "each sample is read by itself, with random numbers of its own",
        "add a __getitem__; with batch_size=None and a sampler of lists it may read many at once.",
    )
    _check_order(dataset, given)
    if not stream and isinstance(dataset, Sized) and len(dataset) == 0:
        raise LoaderError(
            f"{type(dataset).__name__} has no samples",
            limit="an epoch needs at least one",
            fix="check its path and its filters.",
            rule="H610",
        )
    return given


def _need(usable: Any, what: str, limit: str, fix: str) -> None:
    if not usable:
        raise LoaderError(what, limit=limit, fix=fix, rule="H607")


def _check_order(dataset: Any, given: dict[str, Any]) -> None:
    sampler, batch_sampler = given.get("sampler"), given.get("batch_sampler")
    _need(
        not isinstance(batch_sampler, Order),
        f"batch_sampler={type(batch_sampler).__name__}",
        "an order yields indices",
        "pass it as sampler=.",
    )
    if isinstance(sampler, Order) and isinstance(dataset, Sized):
        _need(
            len(sampler) == len(dataset),
            f"{type(sampler).__name__} of {len(sampler)} samples with a dataset of {len(dataset)}",
            "some would never come, or are not there",
            "make it for this dataset: one length for each sample.",
        )


def start_method(context: Any) -> str | None:
    """Return how workers are started, as given; None: as this python does when they are started."""
    if context is None or isinstance(context, str):
        return context
    found: str | None = context.get_start_method(allow_none=True)
    return found


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this rank and the number of ranks, as given or as ``torch.distributed`` says; H607."""
    if rank is None and world_size is None:
        return ranks_now((0, 1))
    rank, world_size = -1 if rank is None else rank, -1 if world_size is None else world_size
    _need(
        0 <= rank < world_size,
        f"rank={rank}, world_size={world_size}",
        "they belong together, and ranks count from 0",
        "pass both, with rank < world_size, or neither.",
    )
    return rank, world_size


def why_undivided(dataset: Any, *, sharded: bool) -> str:
    """Return why a stream is not divided among the ranks of ``torch.distributed``, or nothing if
    it is.
    """
    # Dividing again would leave the items of all ranks but one out
    if divides_among_ranks(dataset):
        return "the dataset asks for ranks: it is taken to divide its items itself"
    if sharded:
        return (
            "the dataset divides its items among workers and asks for no rank, as far as its code"
            " shows: each rank gets every item; pass rank= and world_size= to have them divided"
        )
    return ""


def as_torch(loader: Any, *, generator: Any, keep: bool) -> dict[str, Any]:
    """Return the options of torch's loader inside ours, which was initialised as torch's."""
    options = {name: getattr(loader, name) for name in _AS_TORCH}
    # A position is one number: with batches out of order it would repeat or lose some.
    return {**options, "generator": generator, "in_order": True, "persistent_workers": keep}


def check_position(here: dict[str, Any], state: dict[str, Any]) -> None:
    """Check that a state is a position, in the order that the loader has; H604."""
    wrong = [f"no {name}" for name in ("epoch", "consumed", "order") if name not in state]
    wrong = wrong or [
        f"{name}={value!r:.50}"
        for name in ("epoch", "consumed")
        if type(value := state[name]) is not int or value < 0
    ]
    if wrong:
        raise LoaderError(
            f"the state has {', '.join(wrong)}",
            limit="a position is what state_dict() of a holdfast.DataLoader returned",
            fix="pass that; torch's own loaders and samplers keep other states.",
            rule="H604",
        )
    saved = state["order"]
    for name in {**saved, **here}:
        if here.get(name) != saved.get(name):
            raise LoaderError(
                f"the loader has {name}={here.get(name)!r} and the position was saved with "
                f"{name}={saved.get(name)!r}",
                limit="the same order is needed to continue in the middle of an epoch",
                fix="build the loader as it was, or start in a new run directory.",
                rule="H604",
            )


def plan_of(
    loader: Any, given: dict[str, Any], ranks: tuple[int, int], *, repeats: bool | None, named: bool
) -> Plan:
    """Return where the entries of a map-style dataset come from.

    `named`: the user has passed the ranks.

    H603 for a sampler without a length, H607 for ranks with a sampler of the user's that does not
    divide its indices.
    """
    sampler, batch_sampler, dataset = (
        given.get("sampler"),
        given.get("batch_sampler"),
        loader.dataset,
    )
    samples = len(dataset) if isinstance(dataset, Sized) else None
    own = (
        None if isinstance(sampler, Order) else sampler if batch_sampler is None else batch_sampler
    )
    _need(
        own is None or not named or ranks[1] == 1,
        f"rank={ranks[0]}, world_size={ranks[1]} with {type(own).__name__}",
        "a sampler of your own says itself what a rank gets",
        "let it divide by ranks and leave rank= and world_size= out, or pass shuffle=True, which"
        " the loader divides.",
    )
    order: Any
    if batch_sampler is not None:
        order = Sampled(
            batch_sampler,
            loader.seed,
            repeats=repeats,
            batches=True,
            samples=samples,
            dataset=dataset,
        )
        return Plan(order=order, of_batches=True)
    if isinstance(sampler, Order):
        order = sampler
    elif sampler is not None:
        order = Sampled(sampler, loader.seed, repeats=repeats, samples=samples, dataset=dataset)
        ranks = (0, 1)
    else:
        order = Shuffled(len(dataset)) if given.get("shuffle") else Sequential(len(dataset))
    return Plan(
        order=order,
        seed=loader.seed,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        rank=ranks[0],
        world_size=ranks[1],
    )
