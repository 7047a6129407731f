"""Determine which ranks train together, and how the model is distributed over them.

Creating a guard raises H108 for configurations that are not supported with several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.core.errors import PolicyError
from holdfast.core.text import counted
from holdfast.guard.optimizer_state import has_torch_layout
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.interface import Ranks
from holdfast.guard.ranks.single_process import SingleProcess


def ranks_of(parts: Parts) -> Ranks:
    """Return the ranks that train the models in `parts`.

    Raises:
        PolicyError: H108 for a configuration that is not supported with several ranks.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return SingleProcess()
    sharded = [
        name
        for name, model in parts.models.items()
        if any(hasattr(parameter, "placements") for parameter in model.parameters())
    ]
    if sharded:
        # Imported here, because torch builds without distributed support lack the modules it needs.
        from holdfast.guard.ranks.fsdp import fsdp_ranks

        _check_sharded(parts, sharded)
        return fsdp_ranks(parts, parts.models[sharded[0]])
    wrapped = {
        name: wrapper
        for name, wrapper in parts.wrappers.items()
        if isinstance(wrapper, DistributedDataParallel)
    }
    if distributed.get_world_size() == 1:
        # With one rank, the wrapper has nothing to reduce. Turn off its collectives, since a forked
        # copy of this process could not take part in them.
        for wrapper in wrapped.values():
            wrapper.require_backward_grad_sync = False
            wrapper.require_forward_param_sync = False
        return SingleProcess()
    _check_models(parts)
    _check_replicated(parts, wrapped)
    ((name, wrapper),) = wrapped.items()
    _check_wrapper(wrapper)
    # Imported here for the same reason as `fsdp_ranks`.
    from holdfast.guard.ranks.ddp import ddp_ranks

    return ddp_ranks(parts, name, wrapper)


# --- DistributedDataParallel


def _check_models(parts: Parts) -> None:
    """Raise H108 for a model that is trained without DistributedDataParallel or wrapped twice."""
    for name, model in parts.models.items():
        if name not in parts.wrappers and any(p.requires_grad for p in model.parameters()):
            raise _refused(
                f"model {name!r} is a {type(model).__name__}, not a DistributedDataParallel"
            )
        if any(
            isinstance(part, (DistributedDataParallel, nn.DataParallel)) for part in model.modules()
        ):
            raise _refused(f"model {name!r} is wrapped twice or only partly")


def _check_replicated(parts: Parts, wrapped: Mapping[str, DistributedDataParallel]) -> None:
    """Raise H108 unless there are exactly one wrapped model and one optimizer."""
    if len(wrapped) != 1 or len(parts.optimizers) != 1:
        raise _refused(
            f"Guard received {counted(len(wrapped), 'wrapped model')} and"
            f" {counted(len(parts.optimizers), 'optimizer')}"
        )


def _check_wrapper(wrapper: DistributedDataParallel) -> None:
    """Raise H108 for unsupported settings of DistributedDataParallel."""
    ignored = [
        key
        for key, p in wrapper.module.named_parameters()
        if p.requires_grad and key in wrapper.parameters_to_ignore
    ]
    if ignored:
        raise _refused(
            f"DistributedDataParallel ignores parameter {ignored[0]!r}, so each rank would train it"
            " separately"
        )
    if wrapper.process_group.size() != distributed.get_world_size():
        raise _refused(f"only {wrapper.process_group.size()} of the ranks train the model")
    if wrapper.mixed_precision is not None:
        raise _refused(
            "DistributedDataParallel has mixed_precision, which the guard's precision= replaces"
        )
    if any(hasattr(state, "error_dict") for _, state in wrapper._comm_hooks):
        raise _refused("a PowerSGD hook would keep NaN from a step that is undone")


# --- fully_shard


def _check_sharded(parts: Parts, names: list[str]) -> None:
    """Raise H108 for an unsupported model under ``fully_shard``.

    Args:
        parts: The objects that the guard manages.
        names: The names of the sharded models.
    """
    from torch.distributed.fsdp import FSDPModule

    from holdfast.guard.ranks.sharded import why_unsupported

    if parts.averages:
        raise _refused(
            "averaged= is set for a sharded model, but torch averages only unsharded weights"
        )
    if len(names) != 1 or len(parts.optimizers) != 1 or parts.wrappers:
        raise _refused(
            f"Guard received {counted(len(names), 'sharded model')},"
            f" {counted(len(parts.wrappers), 'wrapped model')} and"
            f" {counted(len(parts.optimizers), 'optimizer')}"
        )
    for name, model in parts.models.items():
        if name in names and not isinstance(model, FSDPModule):
            raise _refused(f"only a part of model {name!r} was passed to fully_shard")
        for parameter in model.parameters():
            problem = why_unsupported(parameter, distributed.get_world_size())
            if problem is not None:
                raise _refused(f"model {name!r} {problem}")
    (optimizer,) = parts.optimizers.values()
    if not has_torch_layout(optimizer.state_dict()):
        # Each rank saves its rows of the moments, which it identifies by their names.
        raise _refused(
            f"the state_dict of a {type(optimizer).__name__} does not have the layout of torch's"
            " optimizers"
        )


def _refused(what: str) -> PolicyError:
    """Return error H108 for the configuration that `what` describes."""
    return PolicyError(
        f"world_size={distributed.get_world_size()}, and {what}",
        limit=(
            "with several ranks, this version supports one model with one optimizer, either in"
            " DistributedDataParallel or entirely under fully_shard; otherwise the ranks could"
            " diverge when one of them retries, skips or stops"
        ),
        fix=(
            "wrap the model in DistributedDataParallel and pass the wrapper to Guard, or call"
            " fully_shard on it with a single sharded mesh dimension; or run one process per run"
            " directory."
        ),
        rule="H108",
    )
