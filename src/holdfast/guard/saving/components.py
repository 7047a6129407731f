"""From live objects to the components of a checkpoint, and back into the same objects.

model, model.<name>          state_dict of each model: plain safetensors with the model's own tensor
                             names
optimizer, optimizer.<name>  state_dict of each optimizer
state.<name>                 the caller's further state
training                     schedulers, scaler, random state, position, memory ladder, counters
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.buffers import Groups
from holdfast.checkpoint.expanded import made_dense
from holdfast.checkpoint.loading import read_state, same_tensors, saved_names
from holdfast.checkpoint.saver import encode
from holdfast.checkpoint.store import Entry
from holdfast.core.errors import CheckpointError, HoldfastError, PolicyError, RunDirectoryError
from holdfast.guard.optimizer_state import has_torch_layout, load_optimizer
from holdfast.guard.parts import Parts
from holdfast.guard.scheduler_state import load_state, state_of
from holdfast.guard.state.trees import copied
from holdfast.loader.signalled import let_through
from holdfast.memory.oom import find_out_of_memory
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
        "schedulers": {name: state_of(scheduler) for name, scheduler in parts.schedulers.items()},
        "kinds": _kinds(parts),
    }
    return trees


def check_models_can_be_saved(parts: Parts) -> None:
    """Raise H310 for a model with a tensor that no checkpoint can hold."""
    for name, model in parts.models.items():
        state = {
            key: local(value) if isinstance(value, torch.Tensor) else value
            for key, value in model.state_dict().items()
        }
        try:
            encode({component_of("model", name): state})
        except CheckpointError as error:
            raise CheckpointError(
                error.what,
                limit=error.limit,
                fix=(
                    "keep the values of this tensor as a dense or a sparse COO tensor of floats,"
                    " integers or bools; or make it in __init__, and keep it out of state_dict()"
                    " with register_buffer(..., persistent=False)."
                ),
                rule=error.rule,
            ) from error


def check_saveable(parts: Parts, names: Collection[str] | None = None) -> None:
    """Check that the state of schedulers and optimizers can be saved, before the first step.

    Args:
        parts: The parts of the run.
        names: The names of the optimizers to check; None checks all.

    Raises:
        PolicyError: H105, if ``state_dict()`` raises an exception.
        CheckpointError: H310, for state that a checkpoint cannot hold.
    """
    trees: dict[str, Any] = {}
    for name in parts.optimizers if names is None else names:
        optimizer = parts.optimizers[name]
        with _asking_for_state(f"optimizer {name!r}", optimizer):
            trees[component_of("optimizer", name)] = optimizer.state_dict()
    for name, scheduler in parts.schedulers.items():
        with _asking_for_state(f"scheduler {name!r}", scheduler):
            trees[f"scheduler.{name}"] = state_of(scheduler)
    encode(copied(trees, local))


@contextlib.contextmanager
def _asking_for_state(part: str, value: Any) -> Iterator[None]:
    """Turn an exception of ``state_dict()`` of a part into H105, except for those of holdfast
    and out of memory.
    """
    try:
        yield
    except Exception as error:
        let_through(error)
        if not _is_of_the_part(error):
            raise
        raise PolicyError(
            f"{part}, a {type(value).__name__}, raises {_text_of(error)} when it is asked for its"
            " state_dict()",
            limit="no checkpoint could be saved",
            fix=(
                "let state_dict() work before the first step too, or use another one; "
                "save_interval_steps=None trains without checkpoints."
            ),
            rule="H105",
        ) from error


def _is_of_the_part(error: Exception) -> bool:
    """Return whether a part of the caller's raised this itself.

    Not holdfast, and not for lack of memory.
    """
    return not isinstance(error, HoldfastError) and find_out_of_memory(error) is None


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def states_now(parts: Parts) -> dict[str, Any]:
    """Return the state of models and optimizers as it is now, by component.

    Their tensors are the live ones.
    """
    trees: dict[str, Any] = {}
    trees |= {
        component_of("model", name): dict(each.state_dict()) for name, each in parts.models.items()
    }
    trees |= {
        component_of("optimizer", name): each.state_dict()
        for name, each in parts.optimizers.items()
    }
    return trees


def live_tensors(parts: Parts) -> Groups:
    """Return the tensors of models and optimizers, by component and by their name in a
    checkpoint.
    """
    return encode(copied(states_now(parts), local)).tensors


def _kinds(parts: Parts) -> dict[str, str]:
    described = {
        f"optimizer {name!r}": type(value).__name__ for name, value in parts.optimizers.items()
    }
    described |= {
        f"scheduler {name!r}": type(value).__name__ for name, value in parts.schedulers.items()
    }
    return described | dict.fromkeys((f"state {name!r}" for name in parts.states), "saved")


# --- what has changed without a step


def changes_without_a_step(parts: Parts, entry: Entry) -> bool:
    """Return whether something differs from a checkpoint that may do so between two steps.

    That is the caller's state, schedulers and groups of optimizers. Cost: digests of the caller's
    state.
    """
    trees: dict[str, Any] = {
        f"state.{name}": each.state_dict() for name, each in parts.states.items()
    }
    for name, optimizer in parts.optimizers.items():
        state = optimizer.state_dict()
        if has_torch_layout(state):
            state = {"param_groups": state["param_groups"]}
        trees[component_of("optimizer", name)] = state
    trees["training"] = {
        "schedulers": {name: state_of(each) for name, each in parts.schedulers.items()}
    }
    now, then = encode(trees), read_state(entry)
    for component, state in now.state.items():
        saved = then.get(component)
        if not component.startswith("state."):
            saved = {key: saved.get(key) for key in state} if isinstance(saved, dict) else None
        if saved != json.loads(json.dumps(state)) or not same_tensors(
            entry, component, now.tensors[component]
        ):
            return True
    return False


def has_weights_of(parts: Parts, entry: Entry) -> bool:
    """Return whether weights, buffers and moments are those of a checkpoint.

    Cost: digests of all tensors.
    """
    for component, found in live_tensors(parts).items():
        names = {name for name in found if not _is_of_a_group(name)}
        saved = {name for name in saved_names(entry, component) if not _is_of_a_group(name)}
        if names != saved or not same_tensors(
            entry, component, {name: found[name] for name in names}
        ):
            return False
    return True


def _is_of_a_group(name: str) -> bool:
    """Return whether a tensor belongs to a group of parameters, such as a rate that is a tensor."""
    return "param_groups" in name.split(".")


# --- back into the objects


def check_fits(trees: Mapping[str, Any], live: Mapping[str, Any], parts: Parts, where: str) -> None:
    """Check that a checkpoint was made by the same models, optimizers and state, before anything is
    loaded.

    Args:
        trees: What was read, by component.
        live: `states_now` of the same parts.
        parts: What it is to be loaded into.
        where: The name of the checkpoint, for messages.
    """
    for name in parts.models:
        component = component_of("model", name)
        if component not in trees:
            raise _other_run(f"it holds no model {name!r}", where)
        _check_model(component, trees[component], live[component], where)
        if not all(
            isinstance(each, dict) for each in trees["training"]["model_metadata"][name].values()
        ):
            raise TypeError("what is known of a module is no mapping")
    saved, here = trees["training"]["kinds"], _kinds(parts)
    for name in itertools.chain(saved, here):
        if name not in here:
            raise _other_parts(f"it holds {name}, which is missing now", where)
        if name not in saved:
            raise _other_parts(f"it holds no {name}", where)
        if saved[name] != here[name]:
            raise _other_parts(f"{name} was a {saved[name]} and is a {here[name]}", where)
    for name in parts.optimizers:
        component = component_of("optimizer", name)
        # What lies in the state of a wrapper, such as Lookahead, is checked by its own
        # load_state_dict.
        if has_torch_layout(live[component]):
            _check_groups(name, trees[component], live[component], where)


def _check_groups(name: str, saved: Any, live: Mapping[str, Any], where: str) -> None:
    if not has_torch_layout(saved):
        raise TypeError("the state of the optimizer is not that of a torch optimizer")
    saved_groups = saved["param_groups"]
    was = [len(group["params"]) for group in saved_groups]
    if len({key for group in saved_groups for key in group["params"]}) != sum(was):
        raise ValueError("a parameter of the optimizer is there twice")
    now = [len(group["params"]) for group in live["param_groups"]]
    if was != now:
        raise _other_parts(
            f"optimizer {name!r} had parameter groups of {was} tensors and has {now}", where
        )


def _check_model(
    component: str, saved: Mapping[str, Any], live: Mapping[str, Any], where: str
) -> None:
    for key in itertools.chain(saved, live):
        if key not in live or key not in saved:
            place = "the checkpoint" if key in saved else "the model"
            raise _other_run(f"{component}: tensor {key!r} is only in {place}", where)
        was, now = saved[key], live[key]
        if isinstance(now, torch.Tensor) > isinstance(was, torch.Tensor) and not key.endswith(
            "_extra_state"
        ):
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
        fix=(
            "give Guard the same optimizers, schedulers and state as before, or start in a new run"
            " directory."
        ),
        rule="H313",
    )


def load(trees: Mapping[str, Any], parts: Parts) -> None:
    """Put saved state into the objects, each through its own ``load_state_dict``.

    `check_fits` was called before.

    Raises:
        CheckpointError: H313, for an object that raises something. The checkpoint is as good as it
            was.
    """
    training = trees["training"]
    for name, model in parts.models.items():
        with _loading(f"model {name!r}", model):
            _load_model(model, trees[component_of("model", name)], training["model_metadata"][name])
    for name, optimizer in parts.optimizers.items():
        with _loading(f"optimizer {name!r}", optimizer):
            load_optimizer(optimizer, trees[component_of("optimizer", name)])
    for name, scheduler in parts.schedulers.items():
        with _loading(f"scheduler {name!r}", scheduler):
            load_state(scheduler, training["schedulers"][name])
    for name, stateful in parts.states.items():
        with _loading(f"state {name!r}", stateful):
            stateful.load_state_dict(trees[f"state.{name}"])


@contextlib.contextmanager
def _loading(part: str, value: Any) -> Iterator[None]:
    """Name the part that cannot take back what it has saved."""
    try:
        yield
    except Exception as error:
        let_through(error)
        if not _is_of_the_part(error):
            raise
        raise CheckpointError(
            f"{part}, a {type(value).__name__}, cannot load the state that it saved"
            f" ({_text_of(error)})",
            limit="the checkpoint verifies and was left as it is",
            fix="make its load_state_dict take what its state_dict returns, then start again.",
            rule="H313",
        ) from error


def _load_model(model: nn.Module, saved: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    state: OrderedDict[str, Any] = OrderedDict(saved)
    state._metadata = metadata  # type: ignore[attr-defined]
    with made_dense([*model.parameters(), *model.buffers()]):
        model.load_state_dict(state)
