"""Determine which ranks train together, and how the model is distributed over them.

Creating a guard raises H108 for configurations that are not supported with several ranks.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.core.errors import PolicyError
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
    _check_is_one(wrapped, "in DistributedDataParallel")
    ((name, wrapper),) = wrapped.items()
    _check_wrapper(wrapper)
    _check_optimizers_train(parts, name)
    # Imported here for the same reason as `fsdp_ranks`.
    from holdfast.guard.ranks.ddp import ddp_ranks

    return ddp_ranks(parts, name, wrapper)


# The limit in H108 for models that the ranks cannot train together.
_ONE_MODEL = (
    "with several ranks, this version trains one model, either in DistributedDataParallel or"
    " entirely under fully_shard; otherwise the ranks could diverge when one of them retries, skips"
    " or stops"
)


def _check_is_one(models: Collection[str], how: str) -> None:
    """Raise H108 if the ranks train several models, as for a GAN.

    Args:
        models: The names of the models that the ranks train together.
        how: How the models are distributed over the ranks, as it follows "models" in a sentence.
    """
    if len(models) > 1:
        raise _refused(
            f"Guard received {len(models)} models {how}: {', '.join(map(repr, models))}",
            limit=_ONE_MODEL,
            fix=(
                "make the models submodules of one module, and wrap that module; it may have"
                " several optimizers. If each model has a loss of its own, as in a GAN, wrap it"
                " with DistributedDataParallel(module, find_unused_parameters=True), and step each"
                " optimizer by its name: guard.step(batch, loss_fn, optimizer=name). Or train"
                " without a Guard, under `holdfast run`."
            ),
        )


def _check_optimizers_train(parts: Parts, name: str) -> None:
    """Raise H108 for an optimizer with a parameter of a model that the ranks do not train together.

    Such a parameter is frozen, but if it is trained later, each rank trains it separately.

    Args:
        parts: The objects that the guard manages.
        name: The name of the model that the ranks train.
    """
    trained_together = {id(parameter) for parameter in parts.models[name].parameters()}
    names = {id(parameter): key for key, parameter in parts.named_parameters()}
    for optimizer_name, optimizer in parts.optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in trained_together:
                    raise _refused(
                        f"optimizer {optimizer_name!r} holds {names[id(parameter)]!r}, which does"
                        f" not belong to model {name!r}",
                        limit=(
                            f"the ranks only reduce the gradients of model {name!r}, so each rank"
                            " would train this parameter separately"
                        ),
                        fix=(
                            "leave the parameter out of the optimizer if it stays frozen. Otherwise"
                            " make its module a submodule of the model before you wrap or shard the"
                            " model."
                        ),
                    )


# --- DistributedDataParallel


def _check_models(parts: Parts) -> None:
    """Raise H108 for a model that is trained without DistributedDataParallel or wrapped twice."""
    for name, model in parts.models.items():
        if any(
            isinstance(part, (DistributedDataParallel, nn.DataParallel)) for part in model.modules()
        ):
            raise _refused(
                f"model {name!r} is wrapped twice or only in part",
                limit=_ONE_MODEL,
                fix="wrap the whole model once: DistributedDataParallel(model).",
            )
    if not parts.wrappers:
        raise _without_wrapper(parts)
    for name, model in parts.models.items():
        if name not in parts.wrappers and _is_trained(model):
            raise _refused(
                f"model {name!r} is a {type(model).__name__}, not a DistributedDataParallel as"
                f" {next(iter(parts.wrappers))!r} is",
                limit="its gradients would not be reduced, so each rank would train its own copy",
                fix=(
                    "make it a submodule of the model that you wrap, and call it in that model's"
                    " forward. If it is not trained, freeze it with requires_grad_(False)."
                ),
            )


def _without_wrapper(parts: Parts) -> PolicyError:
    """Return error H108 for a guard without any distributed model."""
    trained = [name for name, model in parts.models.items() if _is_trained(model)]
    names = trained or list(parts.models)
    name = names[0]
    model = parts.models[name]
    return _refused(
        f"model {name!r} is a {type(model).__name__}, not a DistributedDataParallel",
        limit="its gradients would not be reduced, so each rank would train its own copy",
        fix=(
            "pass the wrapper to Guard: model=DistributedDataParallel(model). Or call fully_shard"
            " on the model. If each process is to train its own model, leave out"
            " init_process_group, and give each process its own run directory."
        ),
    )


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _check_wrapper(wrapper: DistributedDataParallel) -> None:
    """Raise H108 for unsupported settings of DistributedDataParallel."""
    ignored = [
        key
        for key, p in wrapper.module.named_parameters()
        if p.requires_grad and key in wrapper.parameters_to_ignore
    ]
    if ignored:
        raise _refused(
            f"DistributedDataParallel ignores parameter {ignored[0]!r}",
            limit="its gradient would not be reduced, so each rank would train it separately",
            fix="freeze the parameter, or let DistributedDataParallel reduce its gradient.",
        )
    if wrapper.process_group.size() != distributed.get_world_size():
        raise _refused(
            f"only {wrapper.process_group.size()} of the ranks train the model",
            limit=_ONE_MODEL,
            fix=(
                "leave out process_group= of DistributedDataParallel, and start only as many"
                " processes as train the model."
            ),
        )
    if wrapper.mixed_precision is not None:
        raise _refused(
            "DistributedDataParallel has mixed_precision",
            limit="the guard runs the forward pass in the precision of its own policy",
            fix='pass precision="bf16" or "fp16" to Guard instead.',
        )
    if any(hasattr(state, "error_dict") for _, state in wrapper._comm_hooks):
        raise _refused(
            "DistributedDataParallel has a PowerSGD hook",
            limit="the hook would keep NaN from a step that is taken back",
            fix="remove the hook, or use fp16_compress_hook or bf16_compress_hook.",
        )


# --- fully_shard


def _check_sharded(parts: Parts, names: list[str]) -> None:
    """Raise H108 for an unsupported model under ``fully_shard``.

    Args:
        parts: The objects that the guard manages.
        names: The names of the sharded models.
    """
    _check_is_one([*names, *parts.wrappers], "under fully_shard or in DistributedDataParallel")
    if parts.averages:
        raise _refused(
            "averaged= is given with a sharded model",
            limit="torch averages only whole weights",
            fix="leave out averaged=, or wrap the model in DistributedDataParallel instead.",
        )
    _check_sharding(parts, names[0])
    _check_optimizers_train(parts, names[0])
    for name, optimizer in parts.optimizers.items():
        _check_optimizer_of_shards(parts, name, optimizer)


def _check_sharding(parts: Parts, name: str) -> None:
    """Raise H108 for a model that is not sharded as a whole and by rows.

    Args:
        parts: The objects that the guard manages.
        name: The name of the sharded model.
    """
    from torch.distributed.fsdp import FSDPModule

    from holdfast.guard.ranks.sharded import why_unsupported

    if not isinstance(parts.models[name], FSDPModule):
        raise _refused(
            f"only a part of model {name!r} was passed to fully_shard",
            limit=_ONE_MODEL,
            fix="call fully_shard on the model itself as well, after its layers.",
        )
    for model_name, model in parts.models.items():
        for parameter in model.parameters():
            problem = why_unsupported(parameter, distributed.get_world_size())
            if problem is not None:
                raise _refused(
                    f"model {model_name!r} {problem}",
                    limit=_ONE_MODEL,
                    fix=(
                        "call fully_shard on the whole model, without ignored_params and"
                        " shard_placement_fn, with one sharded mesh dimension that is the last one"
                        " of a mesh over all ranks."
                    ),
                )


def _check_optimizer_of_shards(parts: Parts, name: str, optimizer: Optimizer) -> None:
    """Raise H108 for an optimizer that cannot update shards, or whose state cannot be saved.

    Args:
        parts: The objects that the guard manages.
        name: The name of the optimizer.
        optimizer: The optimizer.
    """
    from holdfast.guard.ranks.sharded import too_few_rows_for_muon

    if not has_torch_layout(optimizer.state_dict()):
        raise _refused(
            f"the state_dict of optimizer {name!r}, a {type(optimizer).__name__}, does not have the"
            " layout of torch's optimizers",
            limit="each rank saves its rows of the moments, which it identifies by their names",
            fix="use a plain torch optimizer such as AdamW.",
        )
    matrix = too_few_rows_for_muon(optimizer)
    if matrix is not None:
        names = {id(parameter): key for key, parameter in parts.named_parameters()}
        raise _refused(
            f"optimizer {name!r} is a Muon with {names[id(matrix)]!r} of shape"
            f" {tuple(matrix.shape)} under fully_shard",
            limit=(
                "torch's Muon raises an error in its step for a sharded matrix with fewer rows than"
                " there are shards"
            ),
            fix=(
                "move this parameter to the optimizer of the other parameters, such as AdamW. Or"
                " wrap the model in DistributedDataParallel, where Muon has whole matrices."
            ),
        )


def _refused(what: str, *, limit: str, fix: str) -> PolicyError:
    """Return error H108 for an unsupported configuration.

    Args:
        what: A description of the configuration.
        limit: Why it is not supported.
        fix: What to do instead.
    """
    return PolicyError(
        f"world_size={distributed.get_world_size()}, and {what}",
        limit=limit,
        fix=fix,
        rule="H108",
    )
