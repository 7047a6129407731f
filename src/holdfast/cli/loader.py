"""`holdfast loader FACTORY`: what loading costs here, what could go wrong with workers, and how many are worth it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json
from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.core.text import size
from holdfast.core.user_modules import import_user_module
from holdfast.core.warned import ignoring

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from holdfast.loader.auto_workers import WorkerProbe

_CORRECT = "correct the loader that it returns, or its dataset."


def run(
    factory: Annotated[str, typer.Argument(help="module:function or file.py:function; it returns a DataLoader.")],
    step_seconds: Annotated[
        float, typer.Option(min=0, help="Time of a training step; 0: as fast as batches come.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Run a loader with 0, 1, 2, 4 ... workers, and print what each number gives, and the one to take.

    Exit code 0: done. 1: the loader as it is would certainly fail. 2: it could not be measured.
    """
    with failing_clearly(as_json=as_json):
        found = _measure(factory, make_loader(factory), step_seconds)
    print_json(found) if as_json else _print(found)
    if any(concern["certain"] for concern in found["concerns"]):
        raise typer.Exit(CHECK_FAILED)


def load_factory(factory: str) -> Callable[[], Any]:
    """Return the function that ``module:function`` or ``file.py:function`` names.

    Raises:
        PolicyError: H703.
    """
    place, _, name = factory.rpartition(":")
    if not place or not name:
        raise unusable_factory(factory, "there is no function after a colon")
    try:
        found = getattr(import_user_module(place), name)
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        fix = "correct what the message names, in the module or in the function."
        raise unusable_factory(factory, f"{type(error).__name__}: {error}", fix) from error
    if not callable(found):
        raise unusable_factory(factory, f"it is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def unusable_factory(
    factory: str, why: str, fix: str = "write package.module:build or path/to/file.py:build."
) -> PolicyError:
    """Return the error that says why a factory cannot be used: H703."""
    return PolicyError(
        f"factory {factory!r} cannot be used ({why})",
        limit="it names a function of a module, or of a file that ends with .py",
        fix=fix,
        rule="H703",
    )


def make_loader(factory: str) -> DataLoader[Any]:
    """Return the loader that the function makes; H703 for anything else."""
    build = load_factory(factory)
    from torch.utils.data import DataLoader  # here, since torch takes seconds to import

    try:
        with ignoring(UserWarning, "This DataLoader will create"):
            made = build()
    except Exception as error:  # whatever the user's function does
        raise unusable_factory(factory, f"{type(error).__name__}: {error}", _CORRECT) from error
    if not isinstance(made, DataLoader):
        raise unusable_factory(factory, f"it returned a {type(made).__name__}, no DataLoader", "return one.")
    return made


def _measure(factory: str, given: DataLoader[Any], step_seconds: float) -> dict[str, Any]:
    """Return what the probe of ``num_workers="auto"`` finds, and what speaks against the loader as it is."""
    from torch.utils.data import IterableDataset

    from holdfast.loader.loader import DataLoader
    from holdfast.loader.machine import Machine, concerns

    what: dict[str, Any] = {"batch_sampler": given.batch_sampler}
    if isinstance(given.dataset, IterableDataset):
        what = {"batch_size": given.batch_size, "drop_last": given.drop_last}
        what["sharded"] = getattr(given, "sharded", None)
    elif given.batch_sampler is None:
        what = {"batch_size": None, "sampler": given.sampler}
    for name in ("collate_fn", "worker_init_fn", "multiprocessing_context"):
        what[name] = getattr(given, name)
    loader = DataLoader(given.dataset, **what, num_workers="auto", quarantine=0, repeats=True)
    probe = loader.probe
    assert probe is not None
    try:
        while probe.chosen is None and _has_batches(loader, probe, step_seconds):
            pass
    except HoldfastError:
        raise
    except Exception as error:  # whatever the user's dataset does
        raise unusable_factory(factory, f"its loader raised {type(error).__name__}: {error}", _CORRECT) from error
    if probe.chosen is None:
        raise unusable_factory(factory, "its loader has no batch", _CORRECT)
    machine = Machine.of_this_rank()
    depth = given.prefetch_factor or 2
    load = dataclasses.replace(probe.load, num_workers=given.num_workers, prefetch_factor=depth)
    return {
        "machine": dataclasses.asdict(machine),
        "concerns": [dataclasses.asdict(each) for each in concerns(load, machine)],
        "batch_bytes": load.batch_bytes,
        "measured": [{**dataclasses.asdict(each), "wait_share": each.wait_share} for each in probe.measured],
        "num_workers": probe.chosen,
        "reason": probe.reason,
    }


def _has_batches(loader: Iterable[Any], probe: WorkerProbe, step_seconds: float) -> bool:
    """Train on an epoch, with a processor that is busy, until workers are chosen; return whether it had a batch."""
    has_any = False
    for _ in loader:
        has_any, end = True, time.perf_counter() + step_seconds
        while probe.chosen is None and time.perf_counter() < end:
            pass
        if probe.chosen is not None:
            break
    return has_any


def _print(found: dict[str, Any]) -> None:
    machine = found["machine"]
    shared = size(machine["shared_memory_free_bytes"] or 0)
    typer.echo(f"machine: {machine['cpu_quota']:g} processors, {shared} free in /dev/shm")
    typer.echo(f"a batch: {size(found['batch_bytes'])}")
    for concern in found["concerns"]:
        kind = "error" if concern["certain"] else "warning"
        typer.echo(f"{kind} [{concern['rule']}]: {concern['what']}; {concern['limit']}.\n  Fix: {concern['fix']}")
    table = Table("workers", "batches/s", "waiting", "")
    for each in found["measured"]:
        rate = 1 / max(each["wait_seconds"] + each["step_seconds"], 1e-9)
        mark = "chosen" if each["num_workers"] == found["num_workers"] else ""
        table.add_row(str(each["num_workers"]), f"{rate:.4g}", f"{each['wait_share']:.1%}", mark)
    console().print(table)
    typer.echo(f"choice: num_workers={found['num_workers']}\nwhy: {found['reason']}")
