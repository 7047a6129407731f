"""Check at the first optimizer step whether a script can be resumed exactly."""

from __future__ import annotations

import torch

from holdfast.guard.unchanged.loops.loop import Loop
from holdfast.guard.unchanged.loops.places import LoopPlace
from holdfast.guard.unchanged.refusal import cannot_be_saved
from holdfast.loader.foreign.promises import resume_promise

# A fix that every script can apply, as the end of an error message.
_USE_GUARD = "use a Guard in the script."


def place_of_training_loop(loops: list[Loop]) -> LoopPlace:
    """Return the place of the loop in which the script trains, after checking all running loops.

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
    outermost, *inner_loops = loops
    place = _supported_place(outermost)
    for loop in inner_loops:
        if _is_same_statement(_supported_place(loop), place):
            # For example, a `for` statement that iterates `zip(loader, other_loader)`.
            raise cannot_be_saved(
                f"the loop at {place.name} takes batches from several loaders",
                f"iterate one loader, or {_USE_GUARD}",
            )
    _check_loader(outermost, place)
    return place


def _supported_place(loop: Loop) -> LoopPlace:
    """Return the statement that requests the batches of a loop.

    Raises:
        UnchangedScriptError: H738 if there is none yet, or if it cannot be resumed.
    """
    if loop.place is None:
        raise cannot_be_saved(
            f"the iterator created at {loop.created_at} has not been used yet, and no checkpoint"
            " would hold its position",
            "create the iterator in the `for` statement.",
        )
    if loop.place.problem is not None:
        raise cannot_be_saved(f"the loop at {loop.place.name} {loop.place.problem}", loop.place.fix)
    return loop.place


def _check_loader(loop: Loop, place: LoopPlace) -> None:
    """Check that the loader of a loop yields the same batches again."""
    promise = resume_promise(loop.loader)
    if promise.startswith("none"):
        raise cannot_be_saved(
            f"the loader of the loop at {place.name} cannot return to a position:"
            f" {promise.removeprefix('none, ')}",
            _USE_GUARD,
        )


def _is_same_statement(place: LoopPlace, other: LoopPlace) -> bool:
    return (place.code, place.offset) == (other.code, other.offset)


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
