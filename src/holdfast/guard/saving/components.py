"""Convert the objects of a run to the components of a checkpoint, and load them back.

model, model.<name>          the state_dict of each model, as plain safetensors with the model's own
                             names
optimizer, optimizer.<name>  the state_dict of each optimizer
state.<name>                 the state_dict of each object passed as ``state=``, and of averages
training                     schedulers, loss scale, random state, position in the data, memory
                             ladder, counters
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
    """Return the component name of a model or optimizer, such as "model" or "model.critic"."""
    return kind if name == kind else f"{kind}.{name}"


def component_names(parts: Parts) -> list[str]:
    """Return the names of all components in a checkpoint of these objects."""
    return [
        *(component_of("model", name) for name in parts.models),
        *(component_of("optimizer", name) for name in parts.optimizers),
        *(f"state.{name}" for name in parts.states),
        "training",
    ]


def gather(parts: Parts, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a run by component.

    The tensors are not copied.

    Args:
        parts: The models, optimizers, schedulers and additional state.
        training: The guard's own state.
    """
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
    """Raise H310 if a model contains a tensor that a checkpoint cannot store."""
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
                    "store the values of this tensor as a dense or sparse COO tensor of floats,"
                    " integers or bools. Or create it in __init__, and keep it out of state_dict()"
                    " with register_buffer(..., persistent=False)."
                ),
                rule=error.rule,
            ) from error


def check_saveable(parts: Parts, names: Collection[str] | None = None) -> None:
    """Check before the first step that the state of schedulers and optimizers can be saved.

    Args:
        parts: The objects of the run, including its schedulers and optimizers.
        names: The names of the optimizers to check. None means all optimizers.

    Raises:
        PolicyError: H105 if a ``state_dict()`` raises an exception.
        CheckpointError: H310 if a checkpoint cannot store the state.
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
    """Return a context that replaces an exception raised by ``state_dict()`` with H105.

    Errors raised by holdfast and out-of-memory errors are not changed.

    Args:
        part: A description of the object, for the message.
        value: The object whose ``state_dict()`` is called.
    """
    try:
        yield
    except Exception as error:
        let_through(error)
        if not _is_of_the_part(error):
            raise
        raise PolicyError(
            f"state_dict() of {part}, a {type(value).__name__}, raises {_text_of(error)}",
            limit="no checkpoint could be saved",
            fix=(
                "make state_dict() work even before the first step, or use another class. With"
                " save_interval_steps=None, training runs without checkpoints."
            ),
            rule="H105",
        ) from error


def _is_of_the_part(error: Exception) -> bool:
    """Return whether the user's object itself has raised this error.

    This excludes holdfast's own errors and out-of-memory errors.
    """
    return not isinstance(error, HoldfastError) and find_out_of_memory(error) is None


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def states_now(parts: Parts) -> dict[str, Any]:
    """Return the current state of models and optimizers by component, without copying tensors."""
    trees: dict[str, Any] = {}
    for name, model in parts.models.items():
        trees[component_of("model", name)] = dict(model.state_dict())
    for name, optimizer in parts.optimizers.items():
        trees[component_of("optimizer", name)] = optimizer.state_dict()
    return trees


def live_tensors(parts: Parts) -> Groups:
    """Return the tensors of models and optimizers, by component and by name in the checkpoint."""
    return encode(copied(states_now(parts), local)).tensors


def _kinds(parts: Parts) -> dict[str, str]:
    """Return the class of each optimizer and scheduler, and an entry for each ``state=`` object."""
    kinds = {}
    for name, optimizer in parts.optimizers.items():
        kinds[f"optimizer {name!r}"] = type(optimizer).__name__
    for name, scheduler in parts.schedulers.items():
        kinds[f"scheduler {name!r}"] = type(scheduler).__name__
    for name in parts.states:
        # The class of other state may change, so only its name is recorded.
        kinds[f"state {name!r}"] = "saved"
    return kinds


# --- changes made without a step


def changes_without_a_step(parts: Parts, entry: Entry) -> bool:
    """Return whether the script has changed state since a checkpoint, without running a step.

    This compares the ``state=`` objects, the schedulers and the optimizers' parameter groups. It
    computes the digests of all tensors in them.
    """
    trees: dict[str, Any] = {}
    for name, stateful in parts.states.items():
        trees[f"state.{name}"] = stateful.state_dict()
    for name, optimizer in parts.optimizers.items():
        state = optimizer.state_dict()
        if has_torch_layout(state):
            state = {"param_groups": state["param_groups"]}
        trees[component_of("optimizer", name)] = state
    trees["training"] = {
        "schedulers": {name: state_of(scheduler) for name, scheduler in parts.schedulers.items()}
    }
    live = encode(trees)
    all_saved = read_state(entry)
    for component, state in live.state.items():
        saved = all_saved.get(component)
        if not component.startswith("state."):
            # Only some entries of this component are compared.
            saved = {key: saved.get(key) for key in state} if isinstance(saved, dict) else None
        if saved != json.loads(json.dumps(state)):
            return True
        if not same_tensors(entry, component, live.tensors[component]):
            return True
    return False


def has_weights_of(parts: Parts, entry: Entry) -> bool:
    """Return whether weights, buffers and optimizer moments are the same as in a checkpoint.

    This computes the digests of all tensors.
    """
    for component, tensors in live_tensors(parts).items():
        live = {name: tensor for name, tensor in tensors.items() if not _is_of_a_group(name)}
        saved = {name for name in saved_names(entry, component) if not _is_of_a_group(name)}
        if set(live) != saved or not same_tensors(entry, component, live):
            return False
    return True


def _is_of_a_group(name: str) -> bool:
    """Return whether a tensor is a setting of a parameter group, such as a learning rate."""
    return "param_groups" in name.split(".")


# --- restoring the objects


def check_fits(trees: Mapping[str, Any], live: Mapping[str, Any], parts: Parts, where: str) -> None:
    """Check that a checkpoint fits the guard's objects, before it is loaded into any of them.

    Args:
        trees: The contents of the checkpoint, by component.
        live: The return value of `states_now` for the same parts.
        parts: The objects into which the contents will be loaded.
        where: The name of the checkpoint, for messages.

    Raises:
        RunDirectoryError: H304 if the checkpoint belongs to another model.
        CheckpointError: H313 if the checkpoint has other optimizers, schedulers or state.
        TypeError, ValueError or LookupError: If a guard cannot have written the contents.
    """
    for name in parts.models:
        component = component_of("model", name)
        if component not in trees:
            raise _other_run(f"it has no model {name!r}", where)
        _check_model(component, trees[component], live[component], where)
        metadata = trees["training"]["model_metadata"][name]
        if not all(isinstance(entry, dict) for entry in metadata.values()):
            raise TypeError("the metadata of a module is not a mapping")
    _check_kinds(trees["training"]["kinds"], _kinds(parts), where)
    for name in parts.optimizers:
        component = component_of("optimizer", name)
        # For a wrapper such as Lookahead, its own load_state_dict checks the state.
        if has_torch_layout(live[component]):
            _check_groups(name, trees[component], live[component], where)


def _check_kinds(saved: Mapping[str, str], live: Mapping[str, str], where: str) -> None:
    """Check that optimizers, schedulers and other state have the same names and classes."""
    for name in itertools.chain(saved, live):
        if name not in live:
            raise _other_parts(f"it has {name}, which Guard did not receive", where)
        if name not in saved:
            raise _other_parts(f"it has no {name}", where)
        if saved[name] != live[name]:
            raise _other_parts(f"{name} was a {saved[name]} and is now a {live[name]}", where)


def _check_groups(name: str, saved: Any, live: Mapping[str, Any], where: str) -> None:
    """Check that each parameter group has the same number of parameters as in the checkpoint."""
    if not has_torch_layout(saved):
        raise TypeError("the optimizer's state does not have the layout of a torch optimizer")
    saved_groups = saved["param_groups"]
    was = [len(group["params"]) for group in saved_groups]
    if len({key for group in saved_groups for key in group["params"]}) != sum(was):
        raise ValueError("a parameter appears twice in the optimizer's groups")
    now = [len(group["params"]) for group in live["param_groups"]]
    if was != now:
        raise _other_parts(
            f"optimizer {name!r} had {was} tensors in its parameter groups and now has {now}", where
        )


def _check_model(
    component: str, saved: Mapping[str, Any], live: Mapping[str, Any], where: str
) -> None:
    """Check that a model has the same tensors as the checkpoint, by name, shape and dtype."""
    for key in itertools.chain(saved, live):
        if key not in live or key not in saved:
            place = "the checkpoint" if key in saved else "the model"
            raise _other_run(f"{component}: tensor {key!r} is only in {place}", where)
        was = saved[key]
        now = live[key]
        # A module may return any value as its extra state.
        must_be_tensor = isinstance(now, torch.Tensor) and not key.endswith("_extra_state")
        if must_be_tensor and not isinstance(was, torch.Tensor):
            raise TypeError(f"a {type(was).__name__} in place of the tensor {key!r}")
        if isinstance(was, torch.Tensor) and (was.shape != now.shape or was.dtype != now.dtype):
            change = f"was {was.dtype} {tuple(was.shape)} and is now {now.dtype} {tuple(now.shape)}"
            raise _other_run(f"{component}: tensor {key!r} {change}", where)


def _other_run(difference: str, where: str) -> HoldfastError:
    return RunDirectoryError(
        f"{where} belongs to another model: {difference}",
        limit="a run can only continue with the model that it was started with",
        fix="use another run directory for the changed model, or undo the change.",
        rule="H304",
    )


def _other_parts(difference: str, where: str) -> HoldfastError:
    return CheckpointError(
        f"{where} does not fit the objects passed to Guard: {difference}",
        limit="without the saved state of every object, the resume would not be exact",
        fix=(
            "pass the same optimizers, schedulers and state to Guard as before, or use a new run"
            " directory."
        ),
        rule="H313",
    )


def load(trees: Mapping[str, Any], parts: Parts) -> None:
    """Load saved state into the objects, each through its own ``load_state_dict``.

    Args:
        trees: The state by component, which `check_fits` has accepted.
        parts: The objects into which the state is loaded.

    Raises:
        CheckpointError: H313 if an object raises an error. The checkpoint itself is not damaged.
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
    """Return a context that replaces an exception raised by ``load_state_dict`` with H313.

    Args:
        part: A description of the object, for the message.
        value: The object whose ``load_state_dict`` is called.
    """
    try:
        yield
    except Exception as error:
        let_through(error)
        if not _is_of_the_part(error):
            raise
        raise CheckpointError(
            f"{part}, a {type(value).__name__}, cannot load the state that it saved"
            f" ({_text_of(error)})",
            limit="the checkpoint is intact and was left unchanged",
            fix="make its load_state_dict accept what its state_dict returns, then start again.",
            rule="H313",
        ) from error


def _load_model(model: nn.Module, saved: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    state: OrderedDict[str, Any] = OrderedDict(saved)
    state._metadata = metadata  # type: ignore[attr-defined]
    with made_dense([*model.parameters(), *model.buffers()]):
        model.load_state_dict(state)
