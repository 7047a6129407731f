"""Compute the memory of one GPU when a step runs on several, from the trace of one GPU.

Model states are the parameters, the gradients and the optimizer's states. Which of them are divided
among N GPUs is described in section 5 of the ZeRO paper (arXiv 1910.02054), "Deep Dive into
ZeRO-DP". With P, G and O bytes of these states on one GPU, each of N GPUs holds:

========= ===================== ===================
kind      model states          section of the paper
========= ===================== ===================
``ddp``   P + G + O             2.1
``zero1`` P + G + O / N         5.1
``zero2`` P + (G + O) / N       5.2
``full``  (P + G + O) / N       5.3
========= ===================== ===================

Activations are not divided: each GPU has its own samples.

The implementations need buffers as well, which are added; see `_buffers`. Not computed: the memory
of the communication library outside torch's allocator, fragmentation by buffers that come and go,
and the time for communication. The margin has to cover these, so it is the one for devices on which
no forecast was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from holdfast.forecast.trace.events import (
    OWNERS,
    PHASES,
    Assumption,
    Trace,
    allocation_of,
    free_of,
    is_allocation,
    storage_of,
)

_BACKWARD = PHASES.index("backward")
Kind = Literal["ddp", "zero1", "zero2", "full"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# The model states that each kind divides.
_DIVIDED: dict[Kind, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("optimizer state",),
    "zero2": ("optimizer state", "gradients"),
    "full": ("optimizer state", "gradients", "parameters"),
}
# The implementation whose buffers are added.
IMPLEMENTATIONS: dict[Kind, str] = {
    "ddp": "DistributedDataParallel",
    "zero1": "DistributedDataParallel, with optimizer states in equal parts",
    "zero2": "fully_shard with reshard_after_forward=False for each repeated block",
    "full": "fully_shard for each repeated block",
}
# Storages that an optimizer's step allocates for the parameters that it updates. They are divided
# if the optimizer states are.
_TEMPORARY = tuple(OWNERS.index(owner) for owner in ("activations", "scratch", "other"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a step is distributed over GPUs.

    Args:
        gpus: The number of GPUs.
        kind: Which model states are divided among them.
    """

    gpus: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShare:
    """The bytes of one kind of model state.

    Args:
        state: ``"parameters"``, ``"gradients"`` or ``"optimizer state"``.
        whole_bytes: Their size on a single GPU.
        gpu_bytes: The part that each GPU holds during the whole step.
        buffer_bytes: Buffers for this state, such as the parameters that are gathered for a block.
    """

    state: str
    whole_bytes: int
    gpu_bytes: int
    buffer_bytes: int


def sharded(trace: Trace, sharding: Sharding) -> Trace:
    """Return the step of one GPU when it runs on several.

    Buffers are counted during the whole step, because the trace does not say when they are needed.

    Args:
        trace: The step with the samples of one GPU, as if that GPU were the only one.
        sharding: How the step is distributed.
    """
    sizes = trace.size_bytes.copy()
    for owner in _DIVIDED[sharding.kind]:
        is_divided = trace.owner == OWNERS.index(owner)
        sizes[is_divided] = _divided(sizes[is_divided], sharding.gpus)
    if "optimizer state" in _DIVIDED[sharding.kind]:
        temporary = _optimizer_temporaries(trace)
        sizes[temporary] = _divided(sizes[temporary], sharding.gpus)
    assumption = Assumption(
        what=(
            f"each of {sharding.gpus} GPUs holds its part of the model states as in"
            f" {IMPLEMENTATIONS[sharding.kind]} (ZeRO paper, section 5); memory of NCCL outside"
            " torch's allocator and the time for communication are not computed"
        )
    )
    divided = replace(trace, size_bytes=sizes, assumptions=(*trace.assumptions, assumption))
    return _with_resident(divided, _buffers(trace, sharding))


def state_shares(trace: Trace, sharding: Sharding) -> tuple[StateShare, ...]:
    """Return the size of each kind of model state on one GPU and in the whole.

    Args:
        trace: The step with the samples of one GPU, as if that GPU were the only one.
        sharding: How the step is distributed.
    """
    buffers = _buffers(trace, sharding)
    result = []
    for state in ("parameters", "gradients", "optimizer state"):
        whole_bytes = _state_bytes(trace, state)
        gpu_bytes = whole_bytes
        if state in _DIVIDED[sharding.kind]:
            gpu_bytes = _part_of(whole_bytes, sharding.gpus)
        result.append(
            StateShare(
                state=state,
                whole_bytes=whole_bytes,
                gpu_bytes=gpu_bytes,
                buffer_bytes=buffers.get(state, 0),
            )
        )
    return tuple(result)


def _part_of(size_bytes: int, gpus: int) -> int:
    """Return an equal part of a size, rounded up."""
    return -(-size_bytes // gpus)


def _divided(sizes: npt.NDArray[np.int64], gpus: int) -> npt.NDArray[np.int64]:
    """Return an equal part of each size, rounded up as `fully_shard` pads its parameters."""
    result: npt.NDArray[np.int64] = -(-sizes // gpus)
    return result


def _optimizer_temporaries(trace: Trace) -> npt.NDArray[np.int32]:
    """Return the storages that are allocated in the optimizers' steps and are no model states."""
    parts = [trace.events[begin:end] for begin, end in trace.optimizer_steps]
    events = np.concatenate([np.zeros(0, dtype=np.int32), *parts])
    storages = storage_of(events[is_allocation(events)])
    temporary: npt.NDArray[np.int32] = storages[np.isin(trace.owner[storages], _TEMPORARY)]
    return temporary


# --- buffers --------------------------------------------------------------------------------------


def _buffers(trace: Trace, sharding: Sharding) -> dict[str, int]:
    """Return the bytes of the buffers for communication, keyed by the state that they hold.

    - `DistributedDataParallel` copies all gradients into buckets, unless `gradient_as_bucket_view`
      is set (pytorch PR 41954: with it, RoBERTa-base needs 1 GB less).
    - `fully_shard` gathers the parameters of a block before it uses them, and those of the next
      block in advance.
    - The parameters outside the blocks stay gathered from the forward pass to the backward pass, as
      documented for the root module. With `reshard_after_forward=False`, all parameters do.
    - The gradients of a block are computed in full, and copied once for the reduce-scatter. Those
      outside the blocks are reduced last, so they exist at the same time.
    """
    if sharding.gpus == 1:
        return {}
    if sharding.kind in ("ddp", "zero1"):
        return {"gradients": _state_bytes(trace, "gradients")}
    root_bytes, block_bytes = _unit_bytes(trace)
    gathered_bytes = root_bytes + 2 * block_bytes
    if sharding.kind == "zero2":
        # The trace already counts all parameters. The shards, which the optimizer updates, are
        # added.
        gathered_bytes = _part_of(_state_bytes(trace, "parameters"), sharding.gpus)
    buffers = {"parameters": gathered_bytes}
    # An evaluation has no backward pass.
    if (trace.event_phase == _BACKWARD).any():
        buffers["gradients"] = root_bytes + max(root_bytes, 2 * block_bytes)
    return buffers


def _unit_bytes(trace: Trace) -> tuple[int, int]:
    """Return the bytes of the parameters outside all blocks, and of the largest block."""
    outside_bytes = 0
    block_bytes = dict.fromkeys(trace.blocks, 0)
    for storage in _resident_of(trace, "parameters"):
        block = _block_of(trace.modules[trace.module[storage]], trace.blocks)
        size_bytes = int(trace.size_bytes[storage])
        if block is None:
            outside_bytes += size_bytes
        else:
            block_bytes[block] += size_bytes
    return outside_bytes, max(block_bytes.values(), default=0)


def _block_of(path: str, blocks: Iterable[str]) -> str | None:
    """Return the block that contains a module, or None."""
    for block in blocks:
        if path == block or path.startswith(f"{block}."):
            return block
    return None


def _state_bytes(trace: Trace, state: str) -> int:
    """Return the bytes of a model state on a single GPU."""
    resident = _resident_of(trace, state)
    if len(resident) or state != "gradients":
        return int(trace.size_bytes[resident].sum())
    # The step leaves no gradients behind, so count those that it computes.
    return int(trace.size_bytes[trace.owner == OWNERS.index("gradients")].sum())


def _resident_of(trace: Trace, owner: str) -> npt.NDArray[np.int64]:
    """Return the storages of an owner that exist when the step begins."""
    resident = np.array(trace.resident, dtype=np.int64)
    result: npt.NDArray[np.int64] = resident[trace.owner[resident] == OWNERS.index(owner)]
    return result


def _with_resident(trace: Trace, buffers: dict[str, int]) -> Trace:
    """Return the trace with a further resident storage for each buffer, which is never freed."""
    buffers = {owner: size_bytes for owner, size_bytes in buffers.items() if size_bytes}
    position = len(trace.resident)
    added = len(buffers)

    # Resident storages have the lowest numbers, so all others move up.
    def renumbered(storage: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        moved: npt.NDArray[np.int32] = np.where(storage >= position, storage + added, storage)
        return moved

    storages = renumbered(storage_of(trace.events))
    events = np.where(is_allocation(trace.events), allocation_of(storages), free_of(storages))
    carried = renumbered(np.array(trace.carried, dtype=np.int32).reshape(-1, 2))
    owners = [OWNERS.index(owner) for owner in buffers]
    return replace(
        trace,
        events=events.astype(np.int32),
        size_bytes=np.insert(trace.size_bytes, position, list(buffers.values())),
        owner=np.insert(trace.owner, position, owners),
        module=np.insert(trace.module, position, [0] * added),
        line=np.insert(trace.line, position, [0] * added),
        resident=tuple(range(position + added)),
        carried=tuple((int(new), int(old)) for new, old in carried),
    )
