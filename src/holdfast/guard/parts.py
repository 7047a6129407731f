"""The objects that a run is made of, checked and named once.

A single model is named ``"model"``, a single optimizer ``"optimizer"``; of a dict the keys are used. These names
appear in gradient norms, in error messages and in the files of a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.core.policy.kinds import Precision
from holdfast.guard.phase import RunState
from holdfast.numerics.eager import as_written

_PLAIN = (bool, int, float, str, type(None))
_NOTHING = contextlib.nullcontext()
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved and put back."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Put the state back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a guard takes care of."""

    models: dict[str, nn.Module]  # modules by name
    optimizers: dict[str, Optimizer]  # by name
    schedulers: dict[str, Any]  # by the name of the optimizer that they drive, or by any name
    states: dict[str, Stateful]  # further state by name, averages included
    averages: Mapping[str, AveragedModel] = field(default_factory=dict)  # of weights, by the name of their model
    wrappers: Mapping[str, nn.Module] = field(default_factory=dict)  # what models were given in, for several ranks
    compiled: bool = False  # whether a model, or a part of one, was given compiled. What else is compiled shows later

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of every model with its full name."""
        single = len(self.models) == 1 and "model" in self.models
        for name, model in self.models.items():
            prefix = "" if single else f"{name}."
            for key, parameter in model.named_parameters():
                yield prefix + key, parameter

    def optimizer_names(self, chosen: str | Sequence[str] | None) -> list[str]:
        """Return the names of the optimizers that a step moves; None: all."""
        known = list(self.optimizers)
        if chosen is None:
            return known
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        for name in names:
            if name not in known:
                raise PolicyError(
                    f"optimizer={name!r}",
                    limit=f"the optimizers of this guard are {', '.join(map(repr, known))}",
                    fix=did_you_mean(name, known, otherwise="take one of these."),
                    rule="H104",
                )
        return names

    def devices(self) -> list[torch.device]:
        """Return the accelerator devices that hold parameters."""
        found = {p.device for model in self.models.values() for p in model.parameters()}
        return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)

    def device_type(self) -> str:
        """Return the kind of device that computes, such as ``"cuda"`` or ``"cpu"``."""
        devices = self.devices()
        return devices[0].type if devices else "cpu"

    def settings(self) -> dict[str, Any]:
        """Return the plain settings of optimizers and schedulers, by names such as ``"optimizer.0.lr"``."""
        found: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                found |= {f"{name}.{index}.{key}": value for key, value in group.items()}
        for name, scheduler in self.schedulers.items():
            if isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
                found |= {f"scheduler {name}.{key}": value for key, value in vars(scheduler).items()}
        found = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
        return {key: value for key, value in found.items() if isinstance(value, _PLAIN) or _is_numbers(value)}

    def rates(self) -> list[float]:
        """Return the learning rates of all parameter groups."""
        return [float(group["lr"]) for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def update_averages(self, moved: Sequence[torch.Tensor]) -> None:
        """Let each average whose model holds one of the parameters that were moved take in the weights of now."""
        ids = set(map(id, moved))
        for name, average in self.averages.items():
            if any(id(parameter) in ids for parameter in self.models[name].parameters()):
                average.update_parameters(self.models[name])

    @contextlib.contextmanager
    def averages_swapped_in(self, state: RunState) -> Iterator[None]:
        """Have averaged parameters and buffers in the models, which must not be saved then."""
        used = [name for name, average in self.averages.items() if average.n_averaged > 0]
        own = [each.detach() for name in used for _, each in _tensors(self.models[name])]
        others = [each.detach() for name in used for _, each in _tensors(self.averages[name].module)]
        trained, state.averaged = [each.clone() for each in own], True
        try:
            for tensor, other in zip(own, others, strict=True):
                tensor.copy_(other)
            yield
        finally:
            for tensor, other in zip(own, trained, strict=True):
                tensor.copy_(other)
            state.averaged = False


def _averages(given: Any, models: Mapping[str, nn.Module]) -> dict[str, AveragedModel]:
    found = dict(given) if isinstance(given, Mapping) else {} if given is None else {"model": given}
    for name, each in found.items():
        form = [] if name not in models else [(key, tensor.shape) for key, tensor in _tensors(models[name])]
        if not isinstance(each, AveragedModel) or form != [(key, t.shape) for key, t in _tensors(each.module)]:
            raise PolicyError(
                f"averaged={type(each).__name__}(...) is no average of a model {name!r}",
                limit="a torch.optim.swa_utils.AveragedModel takes in a model, tensor by tensor, after each step",
                fix="make it of the bare module, AveragedModel(net), before that is compiled or wrapped; by name, "
                'averaged={"generator": ...}, where models have names. Another kind of average goes into state=, and '
                "your loop updates it after each guard.step(...) that is not skipped.",
                rule="H105",
            )
    return found


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, (int, float)) for each in value)


def autocast(device_type: str, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward pass; fp32 needs none."""
    dtype = _AUTOCAST.get(precision)
    return _NOTHING if dtype is None else torch.autocast(device_type, dtype)


def gather_parts(model: Any, optimizer: Any, scheduler: Any, state: Any, averaged: Any = None) -> Parts:
    """Check and name what the caller gave."""
    models: dict[str, nn.Module] = _named(model, "model", nn.Module)
    optimizers: dict[str, Optimizer] = _named(optimizer, "optimizer", Optimizer)
    models, compiled = as_written(models)
    wrappers = {name: each for name, each in models.items() if isinstance(each, DistributedDataParallel)}
    if wrappers:  # names are those of the bare model, whatever it is trained in
        bare: dict[str, nn.Module] = {**models, **{name: each.module for name, each in wrappers.items()}}
        models, _ = as_written(bare)
    averages = _averages(averaged, models)
    named = {"averaged" + f".{name}" * (name != "model"): each for name, each in averages.items()}
    states = {} if state is None or (isinstance(state, dict) and not state) else _named(state, "state", Stateful)
    if both := named.keys() & states.keys():
        raise _wrong(f"state {min(both)!r} and averaged= are saved by one name", "each must have its own")
    parts = Parts(
        compiled=compiled,
        wrappers=wrappers,
        models=models,
        optimizers=optimizers,
        schedulers={} if scheduler is None else _named(scheduler, "scheduler", Stateful),
        states={**states, **named},
        averages=averages,
    )
    owned = {id(parameter) for _, parameter in parts.named_parameters()}
    for name, each in optimizers.items():
        _check_optimizer(name, each, owned)
    return parts


def _named(given: Any, what: str, kind: type) -> dict[str, Any]:
    found = dict(given) if isinstance(given, Mapping) else {what: given}
    for name, value in found.items():
        fine = isinstance(value, kind) and isinstance(name, str) and name != "" and "/" not in name
        if not fine:
            needed = "something with state_dict and load_state_dict" if kind is Stateful else f"a torch {what}"
            raise _wrong(f"{what} {name!r} is a {type(value).__name__}", f"{needed} is needed, or a dict of such")
    if not found:
        raise _wrong(f"{what}={given!r}", "at least one is needed")
    return found


def _wrong(what: str, limit: str) -> PolicyError:
    fix = 'pass one object, or a dict of named ones such as {"generator": ..., "discriminator": ...}.'
    return PolicyError(what, limit=limit, fix=fix, rule="H105")


def _check_optimizer(name: str, optimizer: Optimizer, owned: set[int]) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PolicyError(
            f"optimizer {name!r} is LBFGS",
            limit="its step evaluates the loss several times, which is not one transaction",
            fix="use an optimizer whose step() needs no closure, for instance AdamW.",
            rule="H107",
        )
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    if strangers:
        raise PolicyError(
            f"optimizer {name!r} holds {len(strangers)} parameter(s) of no model given to Guard, "
            f"the first of shape {tuple(strangers[0].shape)}",
            limit="they would be missing from every checkpoint",
            fix='pass the module that owns them too: model={"net": net, "loss": loss_module}; if the model was '
            "moved or copied after the optimizer was made, make the optimizer last.",
            rule="H106",
        )
