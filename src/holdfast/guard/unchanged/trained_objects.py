"""Find the models and optimizers of the script in its variables.

They are named after the variables that refer to them, so that each attempt finds the same objects
under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from holdfast.guard.optimizers import optimizers_inside
from holdfast.guard.unchanged.frames import is_module_level
from holdfast.guard.unchanged.refusal import cannot_be_saved
from holdfast.guard.unchanged.variables.kinds import (
    CONTAINERS,
    MAPPINGS,
    attributes_of_object,
    has_type,
    kind_of,
)
from holdfast.guard.unchanged.variables.namespaces import namespaces

# The number of attributes and containers that the search follows from a variable to an object.
_MAX_DEPTH = 6
# Containers with more entries are considered to be data, and are not searched.
_MAX_ENTRIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedObjects:
    """The models and optimizers of a script, by name."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    # The gradient scaler of the script, or None.
    scaler: GradScaler | None


def find_trained_objects(
    frames: list[FrameType], stepping: Optimizer | None = None
) -> TrainedObjects:
    """Return the models and optimizers to which the script's variables refer.

    Only models with a parameter that an optimizer updates are returned. A model that is part of
    another one is left out.

    Args:
        frames: The frames of the script on the stack, from the loop outward.
        stepping: The optimizer that is about to step. It must be among those that are found. None
            if no optimizer steps now.

    Raises:
        UnchangedScriptError: H738 if an optimizer or the model of an optimizer cannot be found.
    """
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, Optimizer] = {}
    scaler = None
    for name, value in _reachable(frames):
        if has_type(value, nn.Module):
            modules[_unique(name, modules)] = value
        elif has_type(value, Optimizer):
            optimizers[_unique(name, optimizers)] = value
        elif has_type(value, GradScaler) and scaler is None:
            scaler = value
    if stepping is not None:
        _check_is_found(stepping, optimizers)
    models = _outermost_with_parameters(modules, optimizers)
    _check_parameters_have_models(models, optimizers)
    return TrainedObjects(models=models, optimizers=optimizers, scaler=scaler)


def _check_is_found(stepping: Optimizer, optimizers: dict[str, Optimizer]) -> None:
    stepping_class = type(stepping).__name__
    for name, optimizer in optimizers.items():
        if optimizer is stepping:
            return
        if any(inner is stepping for inner in optimizers_inside(optimizer)):
            # SAM, for example, changes the weights before and after it calls `step` of its base
            # optimizer, and its own state_dict lacks the state of the base optimizer.
            raise cannot_be_saved(
                f"it steps the {stepping_class} inside of {name!r}, a {type(optimizer).__name__}"
                " whose own step() is not called",
                "use a Guard, and pass the inner optimizer to it.",
            )
    raise cannot_be_saved(
        f"no variable of the script refers to the {stepping_class} that is stepped",
        "keep the optimizer in a variable or an attribute.",
    )


def _outermost_with_parameters(
    modules: dict[str, nn.Module], optimizers: dict[str, Optimizer]
) -> dict[str, nn.Module]:
    """Return the modules with a parameter of an optimizer, without those inside another one."""
    optimized = {id(parameter) for parameter in _parameters_of(optimizers)}
    trained = {
        name: module
        for name, module in modules.items()
        if any(id(parameter) in optimized for parameter in module.parameters())
    }
    inner = {
        id(part) for module in trained.values() for part in module.modules() if part is not module
    }
    return {name: module for name, module in trained.items() if id(module) not in inner}


def _check_parameters_have_models(
    models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
) -> None:
    owned = {id(parameter) for model in models.values() for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        if not all(id(parameter) in owned for parameter in _parameters_of({name: optimizer})):
            raise cannot_be_saved(
                f"optimizer {name!r} updates tensors that do not belong to a model to which a"
                " variable of the script refers",
                "put them into a torch.nn.Module, and keep it in a variable.",
            )


def _parameters_of(optimizers: dict[str, Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            yield from group["params"]


def _unique(name: str, taken: dict[str, Any]) -> str:
    """Return a name that can be part of a file name and is not taken yet."""
    name = name.replace("/", "_")
    number = 2
    unique = name
    while unique in taken:
        unique = f"{name}_{number}"
        number += 1
    return unique


def _reachable(frames: list[FrameType]) -> Iterator[tuple[str, Any]]:
    """Yield the names and objects to which the script's variables refer, directly or not.

    The nearest ones come first: the local variables of functions before global ones, and variables
    before what they refer to.
    """
    functions = [frame.f_locals for frame in frames if not is_module_level(frame)]
    spaces = {id(variables): variables for variables in functions}
    spaces |= {id(variables): variables for variables in namespaces(frames).values()}
    level = [(name, value) for variables in spaces.values() for name, value in variables.items()]
    visited: set[int] = set()
    for _ in range(_MAX_DEPTH):
        next_level: list[tuple[str, Any]] = []
        for name, value in level:
            if id(value) in visited:
                continue
            visited.add(id(value))
            yield name, value
            next_level += _parts_of(name, value)
        level = next_level


def _parts_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the objects to which an object of the script refers, with their names."""
    if has_type(value, (FunctionType, ModuleType, str, torch.Tensor)):
        return []
    if type(value) in MAPPINGS and len(value) <= _MAX_ENTRIES:
        return [(str(key), item) for key, item in value.items()]
    if type(value) in CONTAINERS and len(value) <= _MAX_ENTRIES:
        return [(f"{name}_{number}", item) for number, item in enumerate(value)]
    if kind_of(value) == "object":
        return list(attributes_of_object(value).items())
    if kind_of(value) == "module":
        own = vars(nn.Module())
        return [(key, item) for key, item in vars(value).items() if key not in own]
    return []
