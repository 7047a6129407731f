"""`holdfast loader FACTORY`: what loading costs here, what could go wrong with workers, and how many are worth it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from holdfast.cli.factories import load_factory, unusable_factory
from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json
from holdfast.core.errors import PolicyError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from holdfast.loader.tuning.choice import LoaderPlan
    from holdfast.loader.tuning.machine import Machine
    from holdfast.loader.tuning.preflight import Concern, Load

_MEASURED_SECONDS = 1.0  # of each option in each of two rounds


_CORRECT = "correct the dataset or the loader that it returns."
_RETURN = "return one, or a dict with the key 'loader'."


def run(
    factory: Annotated[
        str, typer.Argument(help="module:function or file.py:function; it returns a DataLoader or a dataset.")
    ],
    step_seconds: Annotated[
        float, typer.Option(min=0, help="Time of a training step; 0: as fast as batches come.")
    ] = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="If the function returns a dataset.")] = 1,
    batches: Annotated[int, typer.Option(min=1, max=10, help="To load before deciding.")] = 8,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run every option, and say what the choice reaches.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure a loader in this process, print every number of workers with what it would give, and the choice.

    Exit code 0: done. 1: the loader as it is, or with --measure with workers, would certainly fail, so that nothing
    more is measured. 2: it could not be measured.
    """
    with failing_clearly(as_json=as_json):
        loader = make_loader(factory, batch_size)
        found = _decide(factory, loader, step_seconds, batches, measure=measure)
        if measure and not any(concern.severity == "error" for concern in found["concerns"]):
            found["measured"] = _measure(factory, loader, found["plan"], step_seconds)
    if as_json:
        print_json({name: _plain(value) for name, value in found.items()})
    else:
        _print(found)
    if any(concern.severity == "error" for concern in found["concerns"]):
        raise typer.Exit(CHECK_FAILED)


def make_loader(factory: str, batch_size: int) -> DataLoader[Any]:
    """Return the loader that the function makes, or one over its dataset.

    Raises:
        PolicyError: H703.
    """
    build = load_factory(factory)
    from torch.utils.data import DataLoader  # here, since torch takes seconds to import

    try:
        with _unworried():
            made = build()
    except Exception as error:  # whatever the user's function does
        raise unusable_factory(factory, f"{type(error).__name__}: {error}", _CORRECT) from error
    if isinstance(made, dict) and "loader" in made:
        made = made["loader"]
    if isinstance(made, DataLoader):
        return made
    # A dict may be a dataset, if its keys are numbers.
    named = isinstance(made, dict) and bool(made) and 0 not in made
    if named or (not hasattr(made, "__getitem__") and not hasattr(made, "__iter__")):
        raise unusable_factory(
            factory,
            f"it returned a {type(made).__name__}, no DataLoader or dataset",
            "return one, or a dict with the key 'loader'.",
        )
    return DataLoader(made, batch_size)


def _decide(
    factory: str, loader: DataLoader[Any], step_seconds: float, batches: int, *, measure: bool
) -> dict[str, Any]:
    import torch

    from holdfast.loader.streams.sharding import EACH_READS_ALL
    from holdfast.loader.tuning import choice, probing
    from holdfast.loader.tuning.machine import Machine
    from holdfast.loader.tuning.preflight import Load, preflight, weigh

    machine = Machine.of_this_rank()
    try:
        samples, batch = probing.probe(iter(probing.without_workers(loader)), None, batches)
    except Exception as error:  # whatever the user's dataset does
        raise _raised(factory, error) from error
    if not samples:
        raise unusable_factory(factory, "its loader has no batch", _CORRECT)
    size, tensors = weigh(batch)
    workers = loader.num_workers if isinstance(loader.num_workers, int) else 0
    load = Load(
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor if workers and isinstance(loader.prefetch_factor, int) else 2,
        batch_bytes=size,
        batch_tensors=tensors,
        start_method=_start_method(loader),
        sharing_strategy=torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
    )
    try:
        transfer = probing.measure_transfer(
            batch, step_seconds=step_seconds, start_method=load.start_method, machine=machine
        )
    except Exception as error:  # noqa: BLE001 - a table of assumptions is better than none
        typer.echo(f"what sending a batch costs is assumed: {type(error).__name__}: {error}", err=True)
        transfer = probing.Transfer.assumed(size, tensors)
    pace = choice.pace_of(samples, transfer, step_seconds=step_seconds)
    most = _most_workers(loader)
    plan = choice.decide_workers(pace, machine, load, most_workers=most)
    if most is not None:
        plan = dataclasses.replace(plan, reason=f"{plan.reason}; {EACH_READS_ALL}")
    parts = {name: getattr(loader, name) for name in ("dataset", "collate_fn", "worker_init_fn")}
    some = measure and any(option.fits for option in plan.options if option.num_workers)
    started = dataclasses.replace(load, num_workers=max(workers, int(some)))
    return {
        "machine": machine,
        "concerns": preflight(started, machine, batch=batch, **parts),
        "load": load,
        "samples": samples,
        "plan": plan,
    }


def _most_workers(loader: DataLoader[Any]) -> int | None:
    from holdfast.loader.streams.sharding import most_useful_workers, shards_itself

    said = getattr(loader, "sharded", None)  # holdfast's own, to which it may have been told
    sharded = shards_itself(loader.dataset, loader.worker_init_fn) if said is None else said
    return most_useful_workers(loader.dataset, sharded=sharded)


def _raised(factory: str, error: Exception) -> PolicyError:
    """Return the error that says what loading raised; torch puts the whole traceback of a worker into its message."""
    what = f"{type(error).__name__}: {error}"
    if "\nOriginal Traceback" in what:
        what = f"in a worker {what.rstrip().splitlines()[-1]}"
    return unusable_factory(factory, f"its loader raised {what}", _CORRECT)


def _start_method(loader: DataLoader[Any]) -> str:
    import torch

    from holdfast.loader.tuning.probing import context_of

    context = context_of(loader)
    if isinstance(context, str):
        return context
    return str(torch.multiprocessing.get_start_method() if context is None else context.get_start_method())


def _measure(factory: str, loader: DataLoader[Any], plan: LoaderPlan, step_seconds: float) -> list[float | None]:
    """Return the batches per second of every option, each the better of two rounds.

    Raises:
        PolicyError: H703, for what the loader raises beyond the first batches, or in workers alone.
    """
    from holdfast.loader.tuning.probing import measure_throughput, with_workers

    rates: list[list[float]] = [[] for _ in plan.options]
    with _unworried():
        for _ in range(2):
            for option in random.sample(plan.options, len(plan.options)):
                if not option.fits:
                    continue
                copy = with_workers(loader, option.num_workers, option.prefetch_factor)
                try:
                    rate = measure_throughput(copy, _busy_for(step_seconds), _MEASURED_SECONDS)
                except Exception as error:  # whatever the user's dataset does
                    raise _raised(factory, error) from error
                if rate is not None:
                    rates[option.num_workers].append(rate)
    return [max(each, default=None) for each in rates]


@contextlib.contextmanager
def _unworried() -> Iterator[None]:
    """Leave out torch's warning about more workers than processors, which this command judges itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def _busy_for(seconds: float) -> Callable[[Any], None]:
    def step(_: Any) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return step


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _print(found: dict[str, Any]) -> None:
    _print_machine(found["machine"], found["concerns"])
    plan, load = found["plan"], found["load"]
    _print_pace(plan, load, len(found["samples"]))
    _print_options(plan, found.get("measured"))
    depth = "" if plan.prefetch_factor is None else f", prefetch_factor={plan.prefetch_factor}"
    typer.echo(f"choice: num_workers={plan.num_workers}{depth}")
    typer.echo(f"why: {plan.reason}")
    rates = [rate for rate in found.get("measured", []) if rate is not None]
    if rates and (reached := found["measured"][plan.num_workers]) is not None:
        typer.echo(f"measured: the choice reaches {reached / max(rates):.0%} of the best option")


def _print_machine(machine: Machine, concerns: Sequence[Concern]) -> None:
    typer.echo(
        f"machine: {machine.cpu_quota:g} processors, {_size(machine.shared_memory_free_bytes)} free of "
        f"{_size(machine.shared_memory_total_bytes)} in /dev/shm, {_size(machine.memory_available_bytes)} of memory, "
        f"{machine.open_files} of {machine.open_files_limit or 'unlimited'} files open"
    )
    for concern in concerns:
        typer.echo(f"{concern.severity} [{concern.rule}]: {concern.what}; {concern.limit}.\n  Fix: {concern.fix}")


def _print_pace(plan: LoaderPlan, load: Load, batches: int) -> None:
    pace = plan.pace
    typer.echo(
        f"measured on {batches} batches of {_size(load.batch_bytes)}: a batch loads in "
        f"{_milliseconds(sum(pace.load_seconds) / len(pace.load_seconds))}, "
        f"{_milliseconds(pace.load_cpu_seconds)} of it on a processor; sending it from a worker costs training "
        f"{_milliseconds(pace.transfer.hand_over_seconds)}; a step takes {_milliseconds(pace.step_seconds[0])}"
    )


def _print_options(plan: LoaderPlan, measured: Sequence[float | None] | None) -> None:
    table = Table("workers", "prefetch", "batches/s", "waiting", "shared memory", "memory", "")
    if measured is not None:
        table.add_column("measured batches/s")
    for option in plan.options:
        mark = "chosen" if option is plan.chosen else "" if option.fits else "does not fit"
        cells = [
            str(option.num_workers),
            str(option.prefetch_factor or "-"),
            f"{option.batches_per_second:.4g}",
            f"{option.wait_share:.1%}",
            _size(option.shared_memory_bytes),
            _size(option.memory_bytes),
            mark,
        ]
        if measured is not None:
            rate = measured[option.num_workers]
            cells.append("-" if rate is None else f"{rate:.4g}")
        table.add_row(*cells)
    console().print(table)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return (
        f"{count / 2**30:.1f} GiB"
        if count >= 2**30
        else f"{count / 2**20:.1f} MiB"
        if count >= 2**20
        else f"{count} B"
    )
