"""What every integration does, whatever the framework.

    agree   with the other ranks, before a guard does: `on_all`
    refuse  what a guarded step cannot keep its promises with: `excluded`, `check_one_process`,
            `check_accelerator`
    open    a guard in the framework's loop, at its place in the framework's checkpoint:
            `open_guard`
    carry   what later steps need of earlier ones, in the framework's checkpoint: `carried_by`,
            `carried_tree`
    save    only a state that is finite, and go on where the disk refuses: `may_save`,
            `attempt_save`
    resume  from the newest checkpoint that verifies: `newest_checkpoint`

Does not: name any framework, but for its import.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import distributed
from torch.utils.data import DataLoader as TorchDataLoader

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.checkpoint.newest import newest_good, out_of_reach, paths_in
from holdfast.checkpoint.read_errors import DAMAGED
from holdfast.checkpoint.saver import on_all as among_ranks
from holdfast.core.errors import PolicyError
from holdfast.core.events import run_events
from holdfast.core.events.event import EventData
from holdfast.core.policy.policy import Policy
from holdfast.guard.directory import check_found
from holdfast.guard.guard import take_scale
from holdfast.guard.hosted import HostedGuard
from holdfast.loader.loader import DataLoader
from holdfast.loader.order.ranks import ranks_now
from holdfast.loader.random_state import RandomState, capture, of_another_rank, restore
from holdfast.loader.torch_workers import keeps_workers

if TYPE_CHECKING:
    Framework: TypeAlias = Any  # what a mixin is put before: a class of the framework
else:
    Framework = object

_T = TypeVar("_T")
_log = logging.getLogger("holdfast")
_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_MOST_TEXT = 500
Emit = Callable[[EventData], None]  # records an event, such as `Guard.emit`


def load(name: str) -> Any:
    """Import a module of a framework; if that fails, raise H111 with the extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise excluded(
            f"{name.partition('.')[0]} cannot be imported ({error})",
            "this integration works inside it",
            'install the extra: pip install "torch-holdfast[integrations]".',
        ) from error


def excluded(what: str, why: str, fix: str) -> PolicyError:
    """Return the error about a setting of a framework that a guarded step cannot keep its
    promises with.
    """
    return PolicyError(what, limit=why, fix=fix, rule="H111")


def check_one_process(count: int, what: str) -> None:
    """Refuse several processes or devices (H108).

    `what` is the framework's name of their number.
    """
    if count > 1:
        raise PolicyError(
            f"{what}={count}",
            limit=(
                "this is guarded in one process on one device; ranks that skip or stop alone would"
                " diverge"
            ),
            fix=(
                "start one process on one device, for instance with CUDA_VISIBLE_DEVICES=0 and"
                " without torchrun; or leave holdfast out of the script and start the job under"
                " `holdfast run`, which watches any number."
            ),
            rule="H108",
        )


def on_all(act: Callable[[], _T]) -> _T:
    """Do this rank's part of what all ranks do.

    Raise its error after the others have heard of it, and theirs.
    """
    rank, world_size = ranks_now((0, 1))

    def gathered(said: list[Any]) -> list[Any]:
        found = [said] * world_size
        if world_size > 1:
            distributed.all_gather_object(found, [None, said[1]])
        found[rank] = said
        return found

    return among_ranks(act, gathered)[rank]


def check_accelerator(accelerator: Any) -> str:
    """Return the precision of an ``accelerate.Accelerator``, as the policy spells it.

    Of fp16 on a CPU, fp32.

    H111 for an engine that owns the optimizer, as all but ``DistributedDataParallel`` do, or
    another precision.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise excluded(
            f"distributed_type={kind}",
            "such an engine runs backward and the optimizer itself, so that a step cannot be taken"
            " back",
            "train without it, or under `holdfast run` instead.",
        )
    found = str(accelerator.mixed_precision)
    if found not in _PRECISIONS:
        raise excluded(
            f"mixed_precision={found!r}",
            "a guarded step knows fp32, bf16 and fp16",
            "use one of these.",
        )
    return _PRECISIONS[found] if accelerator.native_amp else "fp32"


def warn_of_kept_workers(loaders: Any, emit: Emit | None) -> None:
    """Say before training that a resume starts workers again that the framework's loader keeps from
    epoch to epoch.

    Args:
        loaders: The framework's loader for training, prepared or not, or a dict or list of such.
        emit: Records the event; None: it is logged.
    """
    inner = getattr(loaders, "base_dataloader", loaders)  # of one that Accelerate has prepared
    if isinstance(inner, Mapping):
        inner = list(inner.values())
    for loader in inner if isinstance(inner, (list, tuple)) else [inner]:
        if (
            isinstance(loader, TorchDataLoader)
            and not isinstance(loader, DataLoader)
            and keeps_workers(loader)
        ):
            why = (
                "not known, because workers that live from epoch to epoch (persistent_workers=True)"
                " are started again by a resume, which draws other random numbers: order,"
                " augmentation and dropout may differ from there on. holdfast.DataLoader keeps them"
            )
            (emit or log_event)(run_events.ResumeMayDiffer(why=why))
            return


def log_event(data: EventData) -> None:
    """Log an event, where no guard is there yet that could record it."""
    _log.warning("%s", data)


def open_guard(
    run_dir: str | os.PathLike[str],
    *,
    policy: Policy,
    scaler: Any,
    saves_in: tuple[Path, re.Pattern[str]] | None,
    carried: Mapping[str, Any] | None,
    resumed: bool,
    **parts: Any,
) -> HostedGuard:
    """Return a guard inside a framework's loop, which stands where the framework stands.

    `saves_in` is the framework's folder of checkpoints, and what their names match; None: it saves
    nothing. `carried` is `carried_by` of the checkpoint that was loaded; None: none was, or one
    without holdfast. H312 for a new start beside a checkpoint that is a link to a disk which is not
    there.
    """
    if saves_in is not None and not resumed:
        for path in paths_in(saves_in[0]):
            if saves_in[1].fullmatch(path.name) and path.is_symlink() and not path.exists():
                raise out_of_reach(path, "the link leads nowhere")
    guard = HostedGuard(run_dir, policy=policy, **parts)
    take_scale(guard, scaler)
    if saves_in is not None:
        guard.saves_in(saves_in[0], resumed=resumed)
    if carried is None:
        guard.replaced_state()
    else:
        guard.load_state_dict(carried["guard"], carried_tree(carried, "ranks"))
    return guard


def carried_by(guard: HostedGuard, devices: list[torch.device], **trees: Any) -> dict[str, Any]:
    """Return what a checkpoint of the framework must hold.

    Tensors under ``"tensors"``, and JSON values.

    The trees are for `carried_tree`, by name; of the devices, other than the CPU, the random state
    is added.
    """
    encoder = Encoder("holdfast")
    trees["random_state"] = capture(devices).to_tree()
    encoded = {name: encoder.encode(tree, (name,)) for name, tree in trees.items()}
    return {"guard": guard.state_dict(), "trees": encoded, "tensors": encoder.tensors}


def carried_tree(carried: Mapping[str, Any], name: str) -> Any:
    """Return one of the trees that `carried_by` was given; None, if it was not given."""
    return decode(carried.get("trees", {}).get(name), dict(carried.get("tensors", {})))


def restore_random_state(carried: Mapping[str, Any]) -> None:
    """Go back to the random numbers of the moment when `carried_by` was called."""
    rank, world_size = ranks_now((0, 1))
    each = (carried_tree(carried, "ranks") or {"each": []})["each"]
    state = RandomState.from_tree(carried_tree(carried, "random_state"))
    if len(each) == world_size:
        state = RandomState.from_tree(each[rank]["random_state"])
    elif world_size > 1:
        state = of_another_rank(state, rank)
    restore(state)


def may_save(guard: HostedGuard | None) -> bool:
    """Return whether the state is finite.

    Else the run has returned to the last good one, or H501 is raised.

    H301 if another run has taken the run directory meanwhile: it would save into the same folder.
    """
    if guard is None:
        return True
    guard.check_lock()
    why = guard.nonfinite_state()
    if why is None:
        return True
    guard.emit(run_events.SaveRefused(why=why))
    guard.return_from(why)
    return False


def attempt_save(
    write: Callable[[], None], name: str, emit: Emit | None, undo: Callable[[], None]
) -> bool:
    """Return whether a checkpoint was written and sealed.

    A disk that refuses does not end training.

    Of a save that failed `undo` removes what was written. An error of `write` that has another
    cause than the disk is raised: the next save would fail too.
    """
    try:
        write()
    except Exception as error:
        undo()
        # torch and safetensors wrap what the system said.
        text = str(error).lower()
        if (
            not isinstance(error, OSError)
            and "pytorchstreamwriter" not in text
            and "os error" not in text
        ):
            raise
        failed = run_events.SaveFailed(
            checkpoint=name, error=f"{type(error).__name__}: {error}"[:_MOST_TEXT]
        )
        (emit or log_event)(failed)
        return False
    if emit is not None:
        emit(run_events.Saved(checkpoint=name))
    return True


def newest_checkpoint(
    candidates: Iterable[Path], emit: Emit | None = None, run_dir: Path | None = None
) -> Path | None:
    """Return the newest checkpoint that verifies.

    Those before it that do not are moved aside, with an event.

    H312, if one was whole, or is said by the recording in `run_dir` to have been saved, and none
    verifies or can be reached; H307, if one cannot be read now.
    """

    def refused(path: Path, why: str) -> None:
        damaged = run_events.CheckpointDamaged(
            checkpoint=path.name, why=why, kept=DAMAGED + path.name
        )
        (emit or log_event)(damaged)

    good = newest_good(candidates, refused, renames=True)
    if good is None and run_dir is not None:
        check_found(run_dir, anew="ask for a new start, ")
    return good


def checkpoints_in(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the folders in a folder whose names match, in no order.

    Links that lead nowhere are among them.
    """
    return [path for path in paths_in(folder) if name.fullmatch(path.name) and not path.is_file()]
