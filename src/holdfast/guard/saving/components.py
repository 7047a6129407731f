"""From live objects to the components of a checkpoint, and back into the same objects.

model, model.<name>            state_dict of each model: plain safetensors with the model's own tensor names
optimizer, optimizer.<name>    state_dict of each optimizer
state.<name>                   the caller's further state
training                       schedulers, scaler, random state, position, memory ladder, counters
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from holdfast.checkpoint.buffers import Groups
from holdfast.checkpoint.expanded import made_dense
from holdfast.checkpoint.saver import encode, read_state, same_tensors, saved_names
from holdfast.checkpoint.store import Entry
from holdfast.core.errors import CheckpointError, HoldfastError, RunDirectoryError
from holdfast.guard.parts import Parts
from holdfast.guard.state.trees import copied
from holdfast.numerics.gradients import local


def component_of(kind: str, name: str) -> str:
    """Return the component that holds the model or the optimizer of this name."""
    return kind if name == kind else f"{kind}.{name}"


def component_names(parts: Parts) -> list[str]:
    """Return the components that hold the state of these parts."""
    return [
        *(component_of("model", name) for name in parts.models),
        *(component_of("optimizer", name) for name in parts.optimizers),
        *(f"state.{name}" for name in parts.states),
        "training",
    ]


def gather(parts: Parts, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trees of a checkpoint; their tensors are the live ones."""
    metadata = {}
    trees: dict[str, Any] = {}
    for name, model in parts.models.items():
        state = model.state_dict()
        metadata[name] = dict(getattr(state, "_metadata", {}))
        trees[component_of("model", name)] = dict(state)
    for name, optimizer in parts.optimizers.items():
        trees[component_of("optimizer", name)] = optimizer.state_dict()
    for name, stateful in parts.states.items():
        trees[f"state.{name}"] = stateful.state_dict()
    trees["training"] = {
        **training,
        "model_metadata": metadata,
        "schedulers": {name: scheduler.state_dict() for name, scheduler in parts.schedulers.items()},
        "kinds": _kinds(parts),
    }
    return trees


def check_can_be_saved(parts: Parts) -> None:
    """Raise H310 for a model with a tensor that no checkpoint can hold, before anything was trained."""
    for name, model in parts.models.items():
        state = {
            key: local(value) if isinstance(value, torch.Tensor) else value
            for key, value in model.state_dict().items()
            if not isinstance(value, (UninitializedParameter, UninitializedBuffer))
        }
        try:
            encode({component_of("model", name): state})
        except CheckpointError as error:
            raise CheckpointError(
                error.what,
                limit=error.limit,
                fix="keep the values of this tensor as a dense or a sparse COO tensor of floats, integers or "
                "bools; or make it in __init__, and keep it out of state_dict() with "
                "register_buffer(..., persistent=False).",
                rule=error.rule,
            ) from error


def live_tensors(parts: Parts) -> Groups:
    """Return the tensors of models and optimizers, by component and by their name in a checkpoint."""
    trees: dict[str, Any] = {}
    trees |= {component_of("model", name): dict(each.state_dict()) for name, each in parts.models.items()}
    trees |= {component_of("optimizer", name): each.state_dict() for name, each in parts.optimizers.items()}
    return encode(copied(trees, local)).tensors


def _kinds(parts: Parts) -> dict[str, str]:
    described = {f"optimizer {name!r}": type(value).__name__ for name, value in parts.optimizers.items()}
    described |= {f"scheduler {name!r}": type(value).__name__ for name, value in parts.schedulers.items()}
    return described | dict.fromkeys((f"state {name!r}" for name in parts.states), "saved")


# --- what has changed without a step --------------------------------------------------------------------------


def changes_without_a_step(parts: Parts, entry: Entry) -> bool:
    """Return whether something differs from a checkpoint that may do so between two steps.

    That is the caller's state, schedulers and groups of optimizers. Cost: digests of the caller's state.
    """
    trees: dict[str, Any] = {f"state.{name}": each.state_dict() for name, each in parts.states.items()}
    for name, optimizer in parts.optimizers.items():
        trees[component_of("optimizer", name)] = {"param_groups": optimizer.state_dict()["param_groups"]}
    trees["training"] = {"schedulers": {name: each.state_dict() for name, each in parts.schedulers.items()}}
    now, then = encode(trees), read_state(entry)
    for component, state in now.state.items():
        saved = then.get(component)
        if not component.startswith("state."):
            saved = {key: saved.get(key) for key in state} if isinstance(saved, dict) else None
        if saved != json.loads(json.dumps(state)) or not same_tensors(entry, component, now.tensors[component]):
            return True
    return False


def has_weights_of(parts: Parts, entry: Entry) -> bool:
    """Return whether weights, buffers and moments are those of a checkpoint. Cost: digests of all tensors."""
    for component, found in live_tensors(parts).items():
        names = {name for name in found if not name.startswith("param_groups")}  # such as a rate that is a tensor
        saved = {name for name in saved_names(entry, component) if not name.startswith("param_groups")}
        if names != saved or not same_tensors(entry, component, {name: found[name] for name in names}):
            return False
    return True


# --- back into the objects ------------------------------------------------------------------------------------


def check_fits(trees: Mapping[str, Any], parts: Parts, where: str) -> None:
    """Check that a checkpoint was made by the same models, optimizers and state, before anything is loaded."""
    for name, model in parts.models.items():
        component = component_of("model", name)
        if component not in trees:
            raise _other_run(f"it holds no model {name!r}", where)
        _check_model(component, trees[component], model.state_dict(), where)
        if not all(isinstance(each, dict) for each in trees["training"]["model_metadata"][name].values()):
            raise TypeError("what is known of a module is no mapping")
    saved, here = trees["training"]["kinds"], _kinds(parts)
    for name in itertools.chain(saved, here):
        if name not in here:
            raise _other_parts(f"it holds {name}, which is missing now", where)
        if name not in saved:
            raise _other_parts(f"it holds no {name}", where)
        if saved[name] != here[name]:
            raise _other_parts(f"{name} was a {saved[name]} and is a {here[name]}", where)
    for name, optimizer in parts.optimizers.items():
        saved_groups = trees[component_of("optimizer", name)]["param_groups"]
        _ = {**trees[component_of("optimizer", name)]["state"]}  # a mapping
        was = [len(group["params"]) for group in saved_groups]
        if len({key for group in saved_groups for key in group["params"]}) != sum(was):
            raise ValueError("a parameter of the optimizer is there twice")
        now = [len(group["params"]) for group in optimizer.param_groups]
        if was != now:
            raise _other_parts(f"optimizer {name!r} had parameter groups of {was} tensors and has {now}", where)


def _check_model(component: str, saved: Mapping[str, Any], live: Mapping[str, Any], where: str) -> None:
    for key in itertools.chain(saved, live):
        if key not in live or key not in saved:
            place = "the checkpoint" if key in saved else "the model"
            raise _other_run(f"{component}: tensor {key!r} is only in {place}", where)
        was, now = saved[key], live[key]
        if isinstance(now, torch.Tensor) > isinstance(was, torch.Tensor) and not key.endswith("_extra_state"):
            raise TypeError(f"a {type(was).__name__} in place of the tensor {key!r}")
        if isinstance(was, torch.Tensor) and (was.shape != now.shape or was.dtype != now.dtype):
            differs = f"was {was.dtype} {tuple(was.shape)} and is {now.dtype} {tuple(now.shape)}"
            raise _other_run(f"{component}: tensor {key!r} {differs}", where)


def _other_run(what: str, where: str) -> HoldfastError:
    return RunDirectoryError(
        f"{where} belongs to another model: {what}",
        limit="a run continues only with the model that it was started with",
        fix="use another run directory for the changed model, or undo the change.",
        rule="H304",
    )


def _other_parts(what: str, where: str) -> HoldfastError:
    return CheckpointError(
        f"{where} does not fit what was given to Guard: {what}",
        limit="every part must find its own state again, or the resume would not be exact",
        fix="give Guard the same optimizers, schedulers and state as before, or start in a new run directory.",
        rule="H313",
    )


def load(trees: Mapping[str, Any], parts: Parts) -> None:
    """Put saved state into the objects. `check_fits` was called before."""
    training = trees["training"]
    for name, model in parts.models.items():
        _load_model(model, trees[component_of("model", name)], training["model_metadata"][name])
    for name, optimizer in parts.optimizers.items():
        _load_optimizer(optimizer, trees[component_of("optimizer", name)])
    for name, scheduler in parts.schedulers.items():
        scheduler.load_state_dict(training["schedulers"][name])
    for name, stateful in parts.states.items():
        stateful.load_state_dict(trees[f"state.{name}"])


def _load_model(model: nn.Module, saved: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    state: OrderedDict[str, Any] = OrderedDict(saved)
    state._metadata = metadata  # type: ignore[attr-defined]
    with made_dense([*model.parameters(), *model.buffers()]):
        model.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    optimizer.load_state_dict(saved)
    # torch casts state to the type of its parameter; fp32 moments of bf16 weights would lose their bits.
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, parameter in zip(ids, parameters, strict=True):
        for entry, value in saved["state"].get(key, {}).items():
            now = optimizer.state[parameter][entry]
            if isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][entry] = value.to(now.device)
