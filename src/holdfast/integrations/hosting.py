"""A guard inside a framework's loop, and the state that it adds to the framework's checkpoints.

The state that holdfast stores in a framework's checkpoint is called the *carried state*. It holds
everything that later steps need from earlier ones, such as the memory ladder, the counters and the
random state. It is a dict of JSON values, with all tensors stored under the key ``"tensors"``.

The module ``saving`` writes and finds the framework's checkpoints.
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

# The base class of mixins. It stands in for the framework class with which a mixin is combined,
# which type checkers cannot know.
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
    """Return a guard that continues from the framework's checkpoint, or starts a new run.

    Args:
        run_dir: The run directory.
        policy: The policy returned by `hosted_policy`.
        scaler: The framework's ``GradScaler``, or None. The guard takes over its loss scale.
        checkpoints: The framework's checkpoint folder, and a pattern that checkpoint names match.
            None if the framework saves no checkpoints.
        carried: The carried state from the loaded checkpoint. None if no checkpoint was loaded, or
            if the checkpoint was written without holdfast.
        resumed: Whether the framework has loaded a checkpoint.
        **parts: The model, optimizer and other arguments of `Guard`.

    Raises:
        CheckpointError: H312 if no checkpoint was loaded although the folder contains one that is a
            broken link.
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
    """Raise H312 if a checkpoint is a broken link, for example to a disk that is not mounted."""
    for path in paths_in(folder):
        if name_pattern.fullmatch(path.name) and path.is_symlink() and not path.exists():
            raise out_of_reach(path, "it is a broken link")


# --- Carried state --------------------------------------------------------------------------------


def carried_state(guard: HostedGuard, devices: list[torch.device], **trees: Any) -> dict[str, Any]:
    """Return the carried state for a framework's checkpoint.

    Args:
        guard: The run's guard.
        devices: The devices, apart from the CPU, whose random state is saved.
        **trees: Additional state by name, as nested containers of values and tensors. Read it with
            `decode_carried`.
    """
    encoder = Encoder("holdfast")
    trees["random_state"] = capture(devices).to_tree()
    encoded = {name: encoder.encode(tree, (name,)) for name, tree in trees.items()}
    return {"guard": guard.state_dict(), "trees": encoded, "tensors": encoder.tensors}


def decode_carried(carried: Mapping[str, Any], name: str) -> Any:
    """Return the tree that was passed to `carried_state` as the keyword `name`, or None."""
    tree = carried.get("trees", {}).get(name)
    return decode(tree, dict(carried.get("tensors", {})))


def restore_random_state(carried: Mapping[str, Any]) -> None:
    """Restore the random state that was current when `carried_state` was called.

    If the number of ranks has not changed since the save, each rank gets its own random state back.
    Otherwise, each rank derives a new state from that of the rank that saved.
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
    """Warn before training if a resume would restart the loader's persistent workers.

    Restarted workers draw different random numbers.

    Args:
        loaders: The framework's training loader, or a dict or list of loaders. Loaders may have
            been prepared by Accelerate.
        emit: Function that records the event. If None, the event is logged.
    """
    if not any(keeps_workers(loader) for loader in _torch_loaders(loaders)):
        return
    why = (
        "not known, because a resume restarts persistent workers (persistent_workers=True), which"
        " then draw different random numbers, so the order, augmentation and dropout may differ"
        " from then on. With holdfast.DataLoader they stay the same"
    )
    emit_or_log(emit, run_events.ResumeMayDiffer(why=why))


def _torch_loaders(loaders: Any) -> Iterator[TorchDataLoader[Any]]:
    """Yield the torch data loaders in a loader, dict or list, unwrapping a prepared loader.

    A `holdfast.DataLoader` is left out.
    """
    loaders = getattr(loaders, "base_dataloader", loaders)
    if isinstance(loaders, Mapping):
        loaders = loaders.values()
    elif not isinstance(loaders, (list, tuple)):
        loaders = [loaders]
    for loader in loaders:
        if isinstance(loader, TorchDataLoader) and not isinstance(loader, DataLoader):
            yield loader
