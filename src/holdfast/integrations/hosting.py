"""A guard inside a framework's loop, and the state that it adds to the framework's checkpoints.

The part of a framework's checkpoint that belongs to holdfast is called the *carried state*: the
state that later steps need from earlier ones, such as the memory ladder, counters and random state.
It is a dict of JSON values, with tensors under ``"tensors"``.

``saving`` writes and finds the checkpoints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.checkpoint.newest import out_of_reach, paths_in
from holdfast.core.events import run_events
from holdfast.core.policy.policy import Policy
from holdfast.guard.guard import take_scale
from holdfast.guard.hosted import HostedGuard
from holdfast.integrations.saving import Emit, emit_or_log
from holdfast.loader.foreign.torch_workers import keeps_workers
from holdfast.loader.loader import DataLoader
from holdfast.loader.order.ranks import ranks_now
from holdfast.loader.random_state import RandomState, capture, of_another_rank, restore

# The framework's class that a mixin is combined with, which a type checker cannot know.
if TYPE_CHECKING:
    Framework: TypeAlias = Any
else:
    Framework = object


def open_guard(
    run_dir: str | os.PathLike[str],
    *,
    policy: Policy,
    scaler: Any,
    checkpoints: tuple[Path, re.Pattern[str]] | None,
    carried: Mapping[str, Any] | None,
    resumed: bool,
    **parts: Any,
) -> HostedGuard:
    """Return a guard that resumes where the framework resumes.

    Args:
        run_dir: Where the run is recorded.
        policy: The policy, as `hosted_policy` returns it.
        scaler: The framework's ``GradScaler``, whose scale the guard takes over, or None.
        checkpoints: The framework's folder of checkpoints, and the pattern of their names. None if
            it saves none.
        carried: The carried state in the checkpoint that was loaded. None if no checkpoint was
            loaded, or if it was written without holdfast.
        resumed: Whether the framework has loaded a checkpoint.
        **parts: The model, optimizer and so on, as `Guard` takes them.

    Raises:
        CheckpointError: H312 if a new run would start beside a checkpoint that is a broken link.
    """
    if checkpoints is not None and not resumed:
        _check_links(*checkpoints)
    guard = HostedGuard(run_dir, policy=policy, **parts)
    take_scale(guard, scaler)
    if checkpoints is not None:
        guard.note_checkpoint_folder(checkpoints[0], resumed=resumed)
    if carried is None:
        guard.note_state_replaced()
    else:
        guard.load_state_dict(carried["guard"], decode_carried(carried, "ranks"))
    return guard


def _check_links(folder: Path, name_pattern: re.Pattern[str]) -> None:
    """Raise H312 for a checkpoint that is a link to a disk that is not mounted."""
    for path in paths_in(folder):
        if name_pattern.fullmatch(path.name) and path.is_symlink() and not path.exists():
            raise out_of_reach(path, "it is a broken link")


# --- Carried state --------------------------------------------------------------------------------


def carried_state(guard: HostedGuard, devices: list[torch.device], **trees: Any) -> dict[str, Any]:
    """Return the state that a checkpoint of the framework must hold for holdfast.

    Args:
        guard: The guard of the run.
        devices: Devices other than the CPU whose random state is saved.
        **trees: Further nested containers of values and tensors, for `decode_carried`.
    """
    encoder = Encoder("holdfast")
    trees["random_state"] = capture(devices).to_tree()
    encoded = {name: encoder.encode(tree, (name,)) for name, tree in trees.items()}
    return {"guard": guard.state_dict(), "trees": encoded, "tensors": encoder.tensors}


def decode_carried(carried: Mapping[str, Any], name: str) -> Any:
    """Return one of the trees that were passed to `carried_state`, or None if it was not passed."""
    tree = carried.get("trees", {}).get(name)
    return decode(tree, dict(carried.get("tensors", {})))


def restore_random_state(carried: Mapping[str, Any]) -> None:
    """Restore the random state at the time when `carried_state` was called.

    On the same number of ranks as at the save, each rank gets its own state back. On a different
    number, all ranks derive theirs from the state of the rank that saved.
    """
    rank, world_size = ranks_now((0, 1))
    ranks = decode_carried(carried, "ranks")
    if ranks is not None and len(ranks["each"]) == world_size:
        restore(RandomState.from_tree(ranks["each"][rank]["random_state"]))
        return
    state = RandomState.from_tree(decode_carried(carried, "random_state"))
    if world_size > 1:
        state = of_another_rank(state, rank)
    restore(state)


# --- Loaders --------------------------------------------------------------------------------------


def warn_of_persistent_workers(loaders: Any, emit: Emit | None) -> None:
    """Warn before training that a resume will restart the loader's persistent workers.

    Args:
        loaders: The framework's training loader, prepared or not, or a dict or list of loaders.
        emit: Called with the event, or None to log it.
    """
    if not any(keeps_workers(loader) for loader in _torch_loaders(loaders)):
        return
    why = (
        "not known, because workers that live from epoch to epoch (persistent_workers=True)"
        " are started again by a resume and then draw other random numbers: order,"
        " augmentation and dropout may differ from there on. holdfast.DataLoader keeps them"
    )
    emit_or_log(emit, run_events.ResumeMayDiffer(why=why))


def _torch_loaders(loaders: Any) -> Iterator[TorchDataLoader[Any]]:
    """Yield torch's loaders, including those inside loaders that Accelerate has prepared."""
    loaders = getattr(loaders, "base_dataloader", loaders)
    if isinstance(loaders, Mapping):
        loaders = loaders.values()
    elif not isinstance(loaders, (list, tuple)):
        loaders = [loaders]
    for loader in loaders:
        if isinstance(loader, TorchDataLoader) and not isinstance(loader, DataLoader):
            yield loader
