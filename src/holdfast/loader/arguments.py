"""Check the arguments of `DataLoader`, and derive batches, ranks and worker options from them."""

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

# Options passed unchanged to the torch loader that holdfast's loader uses internally.
_OPTIONS_FOR_TORCH = ("pin_memory", "worker_init_fn", "prefetch_factor", "pin_memory_device")

# The arguments of torch's DataLoader by name, including the dataset.
Arguments: TypeAlias = dict[str, Any]


def check_arguments(
    dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, seed: int, quarantine: float
) -> Arguments:
    """Check all arguments of a `DataLoader`, and return torch's arguments by name.

    Args:
        dataset: The user's dataset.
        args: Torch's positional arguments after the dataset.
        kwargs: Torch's keyword arguments.
        seed: See `DataLoader`.
        quarantine: See `DataLoader`.

    Raises:
        TypeError: torch's loader does not accept these arguments.
        LoaderError: H607 for an invalid argument, H610 for a dataset without samples.
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
            fix="pass a whole number, such as 4. H630 warns if it is too large.",
        )
    prefetch_factor = arguments.get("prefetch_factor")
    is_count = isinstance(prefetch_factor, int) and prefetch_factor > 0
    if prefetch_factor is not None and not is_count:
        raise _unusable(
            f"prefetch_factor={prefetch_factor!r}",
            limit="each worker loads at least one batch in advance",
            fix="pass 1 or more.",
        )
    if arguments.get("timeout") and not workers:
        raise _unusable(
            "timeout with num_workers=0",
            limit="without workers, a batch is loaded in the main process, which cannot time out",
            fix="omit timeout=, or pass num_workers=1 or more.",
        )
    generator = arguments.get("generator")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise _unusable(
            f"generator={generator!r}",
            limit="generator must be a torch.Generator",
            fix="to pass a number, use seed= instead.",
        )


def _check_samplers(arguments: Arguments) -> None:
    """Check that any `Order` is passed as ``sampler`` and has the same length as the dataset."""
    batch_sampler = arguments.get("batch_sampler")
    if isinstance(batch_sampler, Order):
        raise _unusable(
            f"batch_sampler={type(batch_sampler).__name__}",
            limit="an order yields indices, not batches",
            fix="pass the order as sampler=.",
        )
    sampler = arguments.get("sampler")
    dataset = arguments["dataset"]
    if not isinstance(sampler, Order) or not isinstance(dataset, Sized):
        return
    if len(sampler) != len(dataset):
        raise _unusable(
            f"{type(sampler).__name__} of {len(sampler)} samples with a dataset of {len(dataset)}",
            limit="the order and the dataset must have the same length",
            fix="create the order from this dataset.",
        )


def _check_own_arguments(seed: Any, quarantine: Any) -> None:
    """Check the arguments that torch's loader does not have."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise _unusable(
            f"seed={seed!r}", limit="seed must be a whole number", fix="pass an integer, such as 0."
        )
    is_number = isinstance(quarantine, (int, float)) and not isinstance(quarantine, bool)
    if not is_number or not 0 <= quarantine < math.inf:
        raise _unusable(
            f"quarantine={quarantine!r}",
            limit="quarantine must be a fraction of the samples or a number of samples",
            fix="pass a value such as 0.001 or 5, or 0 to turn off the quarantine.",
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
            f"{type(dataset).__name__} has __getitems__, but no __getitem__",
            limit="samples are read one by one, each with its own random numbers",
            fix="add a __getitem__. To read many samples at once, let it accept a list of indices,"
            " and pass batch_size=None and a sampler that yields lists.",
        )
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise LoaderError(
            f"{type(dataset).__name__} has no samples",
            limit="an epoch needs at least one sample",
            fix="check the dataset's path and filters.",
            rule="H610",
        )


def _unusable(what: str, *, limit: str, fix: str) -> LoaderError:
    return LoaderError(what, limit=limit, fix=fix, rule="H607")


# --- workers and ranks ----------------------------------------------------------------------------


def start_method(context: Any) -> str | None:
    """Return the start method of worker processes.

    Args:
        context: The ``multiprocessing_context`` argument of torch's loader.

    Returns:
        The name of the method, or None to use Python's default when the workers start.
    """
    if context is None or isinstance(context, str):
        return context
    method: str | None = context.get_start_method(allow_none=True)
    return method


def options_for_torch(loader: Any, *, generator: Any, keep_workers: bool) -> dict[str, Any]:
    """Return the options for the torch loader that holdfast's loader uses internally.

    Args:
        loader: The `DataLoader`, after torch's ``__init__`` has run.
        generator: The generator from which torch draws the workers' seeds.
        keep_workers: Whether the workers stay alive after an epoch.
    """
    options = {name: getattr(loader, name) for name in _OPTIONS_FOR_TORCH}
    options["generator"] = generator
    options["persistent_workers"] = keep_workers
    # The position is a single number, so batches that arrive out of order would be repeated or lost
    # after a resume.
    options["in_order"] = True
    return options


def check_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Both are taken from ``torch.distributed`` unless the user passed them.

    Args:
        rank: See `DataLoader`.
        world_size: See `DataLoader`.

    Raises:
        LoaderError: H607 if only one of the two was passed, or if the rank is out of range.
    """
    if rank is None and world_size is None:
        return ranks_now((0, 1))
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise _unusable(
            f"rank={rank}, world_size={world_size}",
            limit="rank and world_size must be passed together, and ranks count from 0",
            fix="pass both, with rank < world_size, or pass neither.",
        )
    return rank, world_size


def why_not_divided(dataset: Any, *, sharded: bool) -> str:
    """Return why a stream is not divided among ranks, or "" if it is.

    Args:
        dataset: The iterable dataset.
        sharded: Whether the dataset divides its items among workers itself.
    """
    if divides_among_ranks(dataset):
        # Dividing the items a second time would drop most of them.
        return "the dataset reads its rank, so it probably divides its items among ranks itself"
    if sharded:
        return (
            "the dataset divides its items among workers but does not appear to use its rank, so"
            " every rank gets all items. Pass rank= and world_size= to divide them among ranks"
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
    """Return an object that groups the samples of a map-style dataset into batches.

    Args:
        loader: The `DataLoader`, after torch's ``__init__`` has run and its seed is set.
        arguments: Torch's arguments by name.
        ranks: This rank and the number of ranks.
        repeats: See `DataLoader`.
        ranks_were_passed: Whether the user passed ``rank`` and ``world_size``.

    Raises:
        LoaderError: H603 for a sampler without a length. H607 if the user passed both ranks and a
            sampler, because the loader does not divide the user's sampler among ranks.
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
        # The user's sampler already yields only this rank's indices.
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
    # The loader divides an `Order` among ranks, but not a sampler that the user wrote.
    own_sampler = batch_sampler
    if batch_sampler is None and not isinstance(sampler, Order):
        own_sampler = sampler
    rank, world_size = ranks
    if own_sampler is not None and world_size != 1:
        raise _unusable(
            f"rank={rank}, world_size={world_size} with {type(own_sampler).__name__}",
            limit="if you pass a sampler, the sampler decides which samples a rank gets",
            fix="divide the samples among ranks in the sampler and omit rank= and world_size=, or"
            " replace the sampler by shuffle=True.",
        )


# --- positions ------------------------------------------------------------------------------------


def check_position(identity: dict[str, Any], state: dict[str, Any]) -> None:
    """Check that a saved state is a valid position in this loader's order.

    Args:
        identity: Properties of the loader, such as its seed. If they equal the saved ones, the
            position refers to the same samples.
        state: The state returned by `DataLoader.state_dict`.

    Raises:
        LoaderError: H604 if the state is not a position, or was saved with a different order.
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
            limit="load_state_dict() needs the state_dict() of a holdfast.DataLoader",
            fix="pass that state. The states of torch's loaders and samplers cannot be loaded.",
            rule="H604",
        )
    saved = state["order"]
    for name in {**saved, **identity}:
        if identity.get(name) != saved.get(name):
            raise LoaderError(
                f"the loader has {name}={identity.get(name)!r}, but the position was saved with"
                f" {name}={saved.get(name)!r}",
                limit="continuing in the middle of an epoch requires the same order of samples",
                fix="create the loader as in the saved run, or start in a new run directory.",
                rule="H604",
            )
