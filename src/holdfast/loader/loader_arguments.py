"""The arguments of `DataLoader`: checked before any work, and turned into an order and a place among the ranks."""

from __future__ import annotations

import inspect
import math
import multiprocessing
from collections.abc import Sized
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Subset

from holdfast.core.errors import LoaderError, did_you_mean
from holdfast.loader.order.orders import Order, Sequential, Shuffled, TokenBatches
from holdfast.loader.order.plan import ByBatch, ByPosition, Plan
from holdfast.loader.order.sampled import Drawn, Sampled
from holdfast.loader.streams.sharding import divides_among_ranks

_TORCH = inspect.signature(TorchDataLoader.__init__)
_OURS = ("seed", "quarantine", "check_finite", "repeats", "sharded", "rank", "world_size", "device")
_AS_TORCH = ("pin_memory", "worker_init_fn", "prefetch_factor", "pin_memory_device")
AUTO = "auto"


class UnknownArgumentError(LoaderError, TypeError):
    """An argument that no loader has; a `TypeError` as from torch."""


def check_arguments(
    dataset: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    seed: int,
    quarantine: float,
    check_finite: bool,
) -> dict[str, Any]:
    """Check what torch would accept or refuse without a word of help.

    Returns:
        torch's arguments by name.

    Raises:
        LoaderError: H607 for arguments that cannot be used, H610 for a dataset without samples.
    """
    for name in kwargs:
        if name not in _TORCH.parameters:
            raise UnknownArgumentError(
                f"DataLoader() got an unexpected keyword argument {name!r}",
                limit=f"it takes torch's and {', '.join(_OURS)}",
                fix=did_you_mean(name, [*_TORCH.parameters, *_OURS], otherwise="leave it out."),
                rule="H607",
            )
    given: dict[str, Any] = dict(_TORCH.bind(None, dataset, *args, **kwargs).arguments)
    del given["self"]
    _check_auto(given)
    if given.get("timeout") and not given.get("num_workers"):
        raise _unusable(
            f"timeout={given['timeout']} with num_workers=0",
            "only workers can be waited for",
            "pass num_workers >= 1, or leave timeout out.",
        )
    if not isinstance(generator := given.get("generator"), (torch.Generator, type(None))):
        raise _unusable(f"generator={generator!r}", "it is a torch.Generator", "pass seed= for a number.")
    if not hasattr(seed, "__index__") or isinstance(seed, bool):
        raise _unusable(f"seed={seed!r}", "it is a whole number", "pass one such as 0.")
    if not isinstance(quarantine, (int, float)) or isinstance(quarantine, bool) or not 0 <= quarantine < math.inf:
        raise _unusable(
            f"quarantine={quarantine!r}", "it is a share or a number of samples", "pass 0.001, 5, or 0 for none."
        )
    _check_orders(dataset, given)
    iterable = isinstance(dataset, IterableDataset)
    if iterable and check_finite:
        raise _unusable(
            "check_finite=True with an IterableDataset",
            "an item of a stream cannot be replaced",
            "check in the dataset, or use a map-style one.",
        )
    if not iterable and isinstance(dataset, Sized) and len(dataset) == 0:
        raise LoaderError(
            f"{type(dataset).__name__} has no samples",
            limit="an epoch needs at least one",
            fix="check its path and its filters.",
            rule="H610",
        )
    return given


def _check_orders(dataset: Any, given: dict[str, Any]) -> None:
    sampler, batch_sampler = given.get("sampler"), given.get("batch_sampler")
    for name, value, wrong, right in (
        ("sampler", sampler, TokenBatches, "batch_sampler"),
        ("batch_sampler", batch_sampler, Order, "sampler"),
    ):
        if isinstance(value, wrong):
            raise _unusable(
                f"{name}={type(value).__name__}",
                f"it is a {right}",
                f"pass it as {right}={type(value).__name__}(...).",
            )
    order = batch_sampler.order if isinstance(batch_sampler, TokenBatches) else sampler
    if isinstance(order, Order) and isinstance(dataset, Sized) and order.samples != len(dataset):
        raise _unusable(
            f"{type(order).__name__} of {order.samples} samples with a dataset of {len(dataset)}",
            "some would never come, or are not there",
            "make it for this dataset: one length or weight for each sample.",
        )


def _check_auto(given: dict[str, Any]) -> None:
    workers, prefetch = given.get("num_workers", 0), given.get("prefetch_factor")
    for name, value in (("num_workers", workers), ("prefetch_factor", prefetch)):
        if value is not None and value != AUTO and not isinstance(value, int):
            raise _unusable(f"{name}={value!r}", 'it is a number or "auto"', f'pass a number, or {name}="auto".')
    if prefetch == AUTO and not workers:
        raise _unusable(
            f"prefetch_factor='auto' with num_workers={workers}",
            "only workers prefetch",
            'pass num_workers >= 1 or "auto".',
        )


def chooses(given: dict[str, Any]) -> bool:
    """Return whether the loader begins without workers, and chooses them or what they prefetch."""
    return AUTO in (given.get("num_workers"), given.get("prefetch_factor"))


def workers_given(given: dict[str, Any]) -> dict[str, int | None]:
    """Return the numbers as the tuner takes them: None for what is to be chosen."""
    workers, prefetch = given.get("num_workers", 0), given.get("prefetch_factor")
    later = chooses(given)
    return {
        "num_workers": None if later else workers,
        "prefetch_factor": None if prefetch == AUTO else prefetch,
        "exact_workers": workers if later and workers != AUTO else None,
    }


def check_shards(given: dict[str, Any], *, sharded: bool) -> None:
    """Check that workers are not chosen where their number decides which item comes.

    Raises:
        LoaderError: H607.
    """
    if sharded and chooses(given):
        raise _unusable(
            "num_workers='auto' or prefetch_factor='auto' with a dataset that divides its items among workers itself",
            "which item comes when would depend on what is chosen, and on the first batches, made without workers",
            "pass a number of workers and no prefetch_factor, or sharded=False if it does not divide them.",
        )


def without_auto(given: dict[str, Any]) -> dict[str, Any]:
    """Return torch's arguments for a loader that begins without workers, if they are to be chosen."""
    if not chooses(given):
        return given
    for_workers = {name: given[name] for name in ("timeout", "multiprocessing_context") if name in given}
    exact = workers_given(given)["exact_workers"]
    TorchDataLoader(given["dataset"], num_workers=exact or 1, **for_workers)  # raises what torch would raise
    later = {"num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"}
    return {name: value for name, value in given.items() if name not in later}


def start_method(context: Any) -> str | None:
    """Return how workers are started, as given; None: as this python does when they are started."""
    if context is None or isinstance(context, str):
        return context
    found: str | None = context.get_start_method(allow_none=True)
    return found


def usual_start_method() -> str:
    """Return how this python starts processes, without deciding it: a program may do that after it made a loader."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _unusable(what: str, limit: str, fix: str) -> LoaderError:
    return LoaderError(what, limit=limit, fix=fix, rule="H607")


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this rank and the number of ranks, as given or as ``torch.distributed`` says.

    Raises:
        LoaderError: H607 for a rank that there is not.
    """
    if (rank is None) != (world_size is None):
        raise _unusable(f"rank={rank}, world_size={world_size}", "they belong together", "pass both, or neither.")
    if rank is None or world_size is None:
        return ranks_now((0, 1))
    if not 0 <= rank < world_size:
        raise _unusable(f"rank={rank}, world_size={world_size}", "ranks count from 0", "pass rank < world_size.")
    return rank, world_size


def ranks_now(otherwise: tuple[int, int]) -> tuple[int, int]:
    """Return this rank and the number of ranks as ``torch.distributed`` says, where it is used."""
    known = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if known else otherwise


def why_undivided(dataset: Any, *, sharded: bool) -> str:
    """Return why a stream is not divided among the ranks of ``torch.distributed``, or nothing if it is."""
    if divides_among_ranks(dataset):  # dividing again would leave the items of all ranks but one out
        return "the dataset asks for ranks: it is taken to divide its items itself"
    if sharded:
        return (
            "the dataset divides its items among workers and asks for no rank, as far as its code shows: each rank "
            "gets every item; pass rank= and world_size= to have them divided"
        )
    return ""


def why_singly(dataset: Any) -> str:
    """Return why samples are read otherwise than torch does, or nothing if they are not."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    reads_one = getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)
    if not reads_one or not hasattr(dataset, "__getitems__") or isinstance(dataset, (Subset, IterableDataset)):
        return ""
    return (
        f"{type(dataset).__name__} has __getitems__, and is read by __getitem__: each sample has random numbers of "
        "its own. To read many at once, or where __getitems__ returns no list, pass batch_size=None and a sampler of "
        "lists: each then is one key of __getitem__"
    )


def check_length(dataset: Any, length: int | None) -> None:
    """Check that a dataset has the length that it had when its loader was made; None if that is not known.

    Raises:
        LoaderError: H608.
    """
    if length is not None and len(dataset) != length:
        raise LoaderError(
            f"the dataset has {len(dataset)} samples and had {length} when the loader was made",
            limit="an order is made for one length",
            fix="make a new loader, or keep the length fixed.",
            rule="H608",
        )


def as_torch(loader: Any, *, generator: Any, keep: bool) -> dict[str, Any]:
    """Return the options of torch's loader inside ours.

    Args:
        loader: Ours, initialised as torch's.
        generator: That the seeds of workers come from.
        keep: Whether workers are kept between epochs.
    """
    options = {name: getattr(loader, name) for name in _AS_TORCH}
    # A position is one number: with batches out of order it would repeat or lose some.
    return {**options, "generator": generator, "in_order": True, "persistent_workers": keep}


def check_position(here: dict[str, Any], state: dict[str, Any], sampler: Sampled | None = None) -> None:
    """Check that a state is a position, in the order that the loader has.

    Args:
        here: What must be the same.
        state: The state.
        sampler: The user's, whose length may depend on the epoch.

    Raises:
        LoaderError: H604.
    """
    missing = [name for name in ("epoch", "consumed", "order") if name not in state]
    if missing:
        raise LoaderError(
            f"the state has no {', '.join(missing)}",
            limit="a position is what state_dict() of a holdfast.DataLoader returned",
            fix="pass that; torch's own loaders and samplers keep other states.",
            rule="H604",
        )
    saved = state["order"]
    for name in {**saved, **here}:
        if here.get(name) != saved.get(name):
            if name == "length" and sampler is not None and _may_be_of(sampler, state):
                continue
            raise LoaderError(
                f"the loader has {name}={here.get(name)!r} and the position was saved with "
                f"{name}={saved.get(name)!r}",
                limit="the same order is needed to continue in the middle of an epoch",
                fix="build the loader as it was, or start in a new run directory.",
                rule="H604",
            )


def _may_be_of(sampler: Sampled, state: dict[str, Any]) -> bool:
    drawn = Drawn(state["drawn"], state.get("drawn_rank")) if "drawn" in state else None
    epoch, begun = state["epoch"], state["consumed"] > 0
    return sampler.may_have_told(state["order"].get("length"), epoch, drawn, begun=begun)


def plan_of(loader: Any, given: dict[str, Any], ranks: tuple[int, int], *, repeats: bool | None, told: bool) -> Plan:
    """Return where the entries of a map-style dataset come from.

    Args:
        loader: The loader, initialised as torch's.
        given: Its arguments by name.
        ranks: This rank and the number of ranks.
        repeats: As `Sampled`.
        told: Whether the user has passed the ranks.

    Raises:
        LoaderError: H603 for a sampler without a length, H607 for ranks that are given with a sampler of the user's
            that does not divide its indices.
    """
    plan = _plan_of(loader, given, ranks, repeats=repeats)
    if told and ranks[1] > 1 and plan.drawn is not None and not plan.drawn.divides:
        name = "sampler" if given.get("batch_sampler") is None else "batch_sampler"
        raise _unusable(
            f"rank={ranks[0]}, world_size={ranks[1]} with {name}={type(given[name]).__name__}",
            f"a {name} of your own says itself what a rank gets, and this one would give the same to all",
            "let it divide by ranks and leave rank= and world_size= out, or pass an order of holdfast, such as "
            "shuffle=True or Weighted, which the loader divides.",
        )
    return plan


def _plan_of(loader: Any, given: dict[str, Any], ranks: tuple[int, int], *, repeats: bool | None) -> Plan:
    sampler, batch_sampler = given.get("sampler"), given.get("batch_sampler")
    rank, world_size = ranks
    tokens = batch_sampler if isinstance(batch_sampler, TokenBatches) else None
    if batch_sampler is not None and tokens is None:
        return ByBatch(sampler=Sampled(batch_sampler, loader.seed, repeats=repeats, batches=True))
    order: Any
    if tokens is not None:
        order = tokens.order
    elif isinstance(sampler, Order):
        order = sampler
    elif sampler is not None:
        order, rank, world_size = Sampled(sampler, loader.seed, repeats=repeats), 0, 1
    else:
        order = Shuffled(len(loader.dataset)) if given.get("shuffle") else Sequential(len(loader.dataset))
    return ByPosition(
        order=order,
        seed=loader.seed,
        batch_size=1 if tokens is not None else loader.batch_size,
        drop_last=loader.drop_last,
        rank=rank,
        world_size=world_size,
        tokens=tokens,
    )
