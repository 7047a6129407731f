"""Check at the first optimizer step whether a script can be resumed exactly."""

from __future__ import annotations

import torch

from holdfast.guard.unchanged.loop_places import LoopPlace
from holdfast.guard.unchanged.loops import Loop
from holdfast.guard.unchanged.refusal import cannot_be_saved
from holdfast.loader.foreign.promises import resume_promise

# A fix that every script can apply, as the end of an error message.
_USE_GUARD = "use a Guard in the script."


def check_loops(loops: list[Loop]) -> LoopPlace:
    """Return the place of the loop in which the script trains.

    Args:
        loops: The loops that are running, outermost first.

    Raises:
        UnchangedScriptError: H738 if the script cannot be resumed exactly.
    """
    if not loops:
        raise cannot_be_saved(
            "it steps its optimizer outside of a loop over a torch DataLoader",
            f"iterate a DataLoader, or {_USE_GUARD}",
        )
    outermost = loops[0]
    for loop in loops:
        if loop.place is None:
            raise cannot_be_saved(
                f"the iterator created at {loop.created_at} has not been used yet, and no"
                " checkpoint would hold its position",
                "create the iterator in the `for` statement.",
            )
        if loop.place.problem is not None:
            raise cannot_be_saved(
                f"the loop at {loop.place.name} {loop.place.problem}", loop.place.fix
            )
        if loop is not outermost and _is_same_statement(loop.place, outermost.place):
            # For example, a `for` statement that iterates `zip(loader, other_loader)`.
            raise cannot_be_saved(
                f"the loop at {loop.place.name} takes batches from several loaders",
                f"iterate one loader, or {_USE_GUARD}",
            )
    assert outermost.place is not None
    promise = resume_promise(outermost.loader)
    if promise.startswith("none"):
        raise cannot_be_saved(
            f"the loader of the loop at {outermost.place.name} cannot return to a position:"
            f" {promise.removeprefix('none, ')}",
            _USE_GUARD,
        )
    return outermost.place


def _is_same_statement(place: LoopPlace, other: LoopPlace | None) -> bool:
    return other is not None and (place.code, place.offset) == (other.code, other.offset)


def check_process() -> None:
    """Check that the script trains in a single process.

    Raises:
        UnchangedScriptError: H738 if it belongs to a process group with several ranks.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size()
        if world_size > 1:
            raise cannot_be_saved(
                f"it trains on {world_size} ranks",
                "use a Guard, which supports DistributedDataParallel and fully_shard.",
            )
