"""Check the arguments of `DataLoader` early, and derive its batches and ranks from them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sized
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from holdfast.core.errors import LoaderError
from holdfast.loader.order.batches import EpochBatches
from holdfast.loader.order.orders import Order, Sequential, Shuffled
from holdfast.loader.order.ranks import ranks_now
from holdfast.loader.order.sampler_order import SamplerOrder
from holdfast.loader.streams.sharding import divides_among_ranks

_TORCH_SIGNATURE = inspect.signature(TorchDataLoader.__init__)

# Options that are passed unchanged to the torch loader inside ours.
_OPTIONS_FOR_TORCH = ("pin_memory", "worker_init_fn", "prefetch_factor", "pin_memory_device")

# Torch's arguments by name, with the dataset.
Arguments: TypeAlias = dict[str, Any]


def check_arguments(
    dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, seed: int, quarantine: float
) -> Arguments:
    """Check all arguments of a `DataLoader`, and return those of torch by name.

    Args:
        dataset: The user's dataset.
        args: Torch's positional arguments after the dataset.
        kwargs: Torch's keyword arguments.
        seed: As `DataLoader`.
        quarantine: As `DataLoader`.

    Raises:
        TypeError: Torch's loader has no such arguments.
        LoaderError: H607 for an argument that cannot be used, H610 for a dataset without samples.
    """
    arguments: Arguments = dict(_TORCH_SIGNATURE.bind(None, dataset, *args, **kwargs).arguments)
    del arguments["self"]
    _check_options(arguments)
    _check_samplers(arguments)
    _check_own_arguments(seed, quarantine)
    _check_dataset(dataset)
    return arguments


def _check_options(arguments: Arguments) -> None:
    """Check the options that do not depend on the dataset."""
    workers = arguments.get("num_workers", 0)
    if not isinstance(workers, int):
        raise _unusable(
            f"num_workers={workers!r}",
            limit="num_workers must be a whole number",
            fix="pass one; H630 warns if it is too large.",
        )
    prefetch_factor = arguments.get("prefetch_factor")
    is_count = isinstance(prefetch_factor, int) and prefetch_factor > 0
    if prefetch_factor is not None and not is_count:
        raise _unusable(
            f"prefetch_factor={prefetch_factor!r}",
            limit="each worker prepares at least one batch ahead",
            fix="pass 1 or more.",
        )
    if arguments.get("timeout") and not workers:
        raise _unusable(
            "timeout with num_workers=0",
            limit="without workers, there is nothing to wait for",
            fix="omit it.",
        )
    generator = arguments.get("generator")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise _unusable(
            f"generator={generator!r}",
            limit="a generator must be a torch.Generator",
            fix="pass seed= for a number.",
        )


def _check_samplers(arguments: Arguments) -> None:
    """Check that an `Order` is passed as ``sampler`` and was made for a dataset of this length."""
    batch_sampler = arguments.get("batch_sampler")
    if isinstance(batch_sampler, Order):
        raise _unusable(
            f"batch_sampler={type(batch_sampler).__name__}",
            limit="an order yields indices, not batches",
            fix="pass it as sampler=.",
        )
    sampler = arguments.get("sampler")
    dataset = arguments["dataset"]
    if not isinstance(sampler, Order) or not isinstance(dataset, Sized):
        return
    if len(sampler) != len(dataset):
        raise _unusable(
            f"{type(sampler).__name__} of {len(sampler)} samples with a dataset of {len(dataset)}",
            limit="both must have the same length",
            fix="create the order for this dataset, with one length per sample.",
        )


def _check_own_arguments(seed: Any, quarantine: Any) -> None:
    """Check the arguments that holdfast adds to those of torch."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise _unusable(
            f"seed={seed!r}", limit="a seed is a whole number", fix="pass one, such as 0."
        )
    is_number = isinstance(quarantine, (int, float)) and not isinstance(quarantine, bool)
    if not is_number or not 0 <= quarantine < math.inf:
        raise _unusable(
            f"quarantine={quarantine!r}",
            limit="it must be a share or a number of samples",
            fix="pass 0.001, 5, or 0 for none.",
        )


def _check_dataset(dataset: Any) -> None:
    """Check that a map-style dataset is not empty and can return single samples."""
    if isinstance(dataset, IterableDataset):
        return
    reads_single_samples = getattr(type(dataset), "__getitem__", None) not in (
        None,
        Dataset.__getitem__,
    )
    if hasattr(dataset, "__getitems__") and not reads_single_samples:
        raise _unusable(
            f"{type(dataset).__name__} has __getitems__ and no __getitem__",
            limit="samples are read one by one, each with its own random numbers",
            fix="add a __getitem__; with batch_size=None and a sampler of lists it may read many at"
            " once.",
        )
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise LoaderError(
            f"{type(dataset).__name__} has no samples",
            limit="an epoch needs at least one",
            fix="check its path and its filters.",
            rule="H610",
        )


def _unusable(what: str, *, limit: str, fix: str) -> LoaderError:
    return LoaderError(what, limit=limit, fix=fix, rule="H607")


# --- workers and ranks ----------------------------------------------------------------------------


def start_method(context: Any) -> str | None:
    """Return the start method of worker processes.

    Args:
        context: Torch's ``multiprocessing_context``.

    Returns:
        The name of the method, or None for the default of Python at the time when workers start.
    """
    if context is None or isinstance(context, str):
        return context
    method: str | None = context.get_start_method(allow_none=True)
    return method


def options_for_torch(loader: Any, *, generator: Any, keep_workers: bool) -> dict[str, Any]:
    """Return the options for the torch loader inside ours.

    Args:
        loader: Our loader, after torch's ``__init__`` has run.
        generator: The generator from which torch draws the seeds of workers.
        keep_workers: Whether workers are kept after an epoch.
    """
    options = {name: getattr(loader, name) for name in _OPTIONS_FOR_TORCH}
    options["generator"] = generator
    options["persistent_workers"] = keep_workers
    # A position is a single number, so out-of-order batches would be repeated or lost.
    options["in_order"] = True
    return options


def check_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this rank and the number of ranks, as passed or according to ``torch.distributed``.

    Raises:
        LoaderError: H607 if they contradict each other.
    """
    if rank is None and world_size is None:
        return ranks_now((0, 1))
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise _unusable(
            f"rank={rank}, world_size={world_size}",
            limit="they belong together, and ranks count from 0",
            fix="pass both, with rank < world_size, or neither.",
        )
    return rank, world_size


def why_not_divided(dataset: Any, *, sharded: bool) -> str:
    """Return why a stream is not divided among the ranks of ``torch.distributed``, or "" if it is.

    Args:
        dataset: The iterable dataset.
        sharded: Whether the dataset itself divides its items among workers.
    """
    if divides_among_ranks(dataset):
        # Dividing the items a second time would lose most of them.
        return "the dataset looks up its rank, so it probably divides its items itself"
    if sharded:
        return (
            "the dataset divides its items among workers, and its code does not seem to ask for a"
            " rank: each rank gets every item; pass rank= and world_size= to divide them"
        )
    return ""


# --- batches --------------------------------------------------------------------------------------


def plan_batches(
    loader: Any,
    arguments: Arguments,
    ranks: tuple[int, int],
    *,
    repeats: bool | None,
    ranks_were_passed: bool,
) -> EpochBatches:
    """Return how the samples of a map-style dataset are grouped into batches.

    Args:
        loader: The loader, after torch's ``__init__`` has run and its seed is set.
        arguments: Torch's arguments.
        ranks: This rank and the number of ranks.
        repeats: As `DataLoader`.
        ranks_were_passed: Whether the user has passed the ranks.

    Raises:
        LoaderError: H603 for a sampler without a length, H607 for ranks passed together with the
            user's own sampler, which the loader does not divide.
    """
    sampler = arguments.get("sampler")
    batch_sampler = arguments.get("batch_sampler")
    dataset = loader.dataset
    if ranks_were_passed:
        _check_loader_divides(sampler, batch_sampler, ranks)
    samples = len(dataset) if isinstance(dataset, Sized) else None
    order: Order | SamplerOrder
    if batch_sampler is not None:
        order = SamplerOrder(
            batch_sampler,
            loader.seed,
            repeats=repeats,
            batches=True,
            samples=samples,
            dataset=dataset,
        )
        return EpochBatches(order=order, counts_batches=True)
    if isinstance(sampler, Order):
        order = sampler
    elif sampler is not None:
        order = SamplerOrder(
            sampler, loader.seed, repeats=repeats, samples=samples, dataset=dataset
        )
        # The sampler already yields only the indices of this rank.
        ranks = (0, 1)
    elif arguments.get("shuffle"):
        order = Shuffled(len(dataset))
    else:
        order = Sequential(len(dataset))
    rank, world_size = ranks
    return EpochBatches(
        order=order,
        seed=loader.seed,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        rank=rank,
        world_size=world_size,
    )


def _check_loader_divides(sampler: Any, batch_sampler: Any, ranks: tuple[int, int]) -> None:
    own_sampler = batch_sampler
    if batch_sampler is None and not isinstance(sampler, Order):
        own_sampler = sampler
    rank, world_size = ranks
    if own_sampler is not None and world_size != 1:
        raise _unusable(
            f"rank={rank}, world_size={world_size} with {type(own_sampler).__name__}",
            limit="your own sampler decides which samples a rank gets",
            fix="let it divide by ranks and omit rank= and world_size=, or pass shuffle=True, which"
            " the loader divides.",
        )


# --- positions ------------------------------------------------------------------------------------


def check_position(identity: dict[str, Any], state: dict[str, Any]) -> None:
    """Check that a state is a position in the order of this loader.

    Args:
        identity: The loader's values that must equal the saved ones for a position to mean the same
            samples.
        state: The value that `DataLoader.state_dict` returned.

    Raises:
        LoaderError: H604 if it is not a position, or belongs to another order.
    """
    problems = [f"no {name}" for name in ("epoch", "consumed", "order") if name not in state]
    if not problems:
        problems = [
            f"{name}={state[name]!r:.50}"
            for name in ("epoch", "consumed")
            if type(state[name]) is not int or state[name] < 0
        ]
    if problems:
        raise LoaderError(
            f"the state has {', '.join(problems)}",
            limit="a position is what state_dict() of a holdfast.DataLoader returned",
            fix="pass that; torch's own loaders and samplers keep other states.",
            rule="H604",
        )
    saved = state["order"]
    for name in {**saved, **identity}:
        if identity.get(name) != saved.get(name):
            raise LoaderError(
                f"the loader has {name}={identity.get(name)!r}, and the position was saved with"
                f" {name}={saved.get(name)!r}",
                limit="the same order is needed to continue in the middle of an epoch",
                fix="build the loader as in the saved run, or start in a new run directory.",
                rule="H604",
            )
