"""Call the user's factory and check its result. Error messages name the line of user code.

A factory is a function, usually called ``build``, that returns the job to trace as a dict::

    {"model": ..., "optimizer": ..., "loss_fn": f, "batch": ...}   f(batch) or f(model, batch)
                                                                   returns the loss
    {"model": ..., "optimizer": ..., "step": f, "batch": ...}      f(batch), f(model, batch) or
                                                                   f(guard, batch) runs a step
    {"model": ..., "optimizer": ..., "step": f}                    f(batch_size) runs a step

If the dict also has an ``"evaluate"`` function, f(batch) or f(model, batch), its memory is forecast
as well. The function is called in evaluation mode without gradients, on the ``"evaluation_batch"``
if there is one, and otherwise on the sample batch. A dict with only a model, an ``"evaluate"`` and
a batch describes a job that trains nothing.

To pass several models or optimizers, use a dict of them. The batch size is inferred unless the key
``"batch_size"`` is present. Other keys, such as ``"scheduler"``, are ignored. If the factory has a
parameter called ``micro_batch_size`` or ``batch_size``, it receives the micro-batch size. Its other
parameters can be set on the command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.forecast.trace.attribution import line_of

# Matches words that occur in the error messages of code that needs a real GPU.
_NEEDS_CUDA = re.compile(
    r"cuda|nvidia|cudnn|libc10_hip|flash[_-]attn|triton|apex|xformers|bitsandbytes", re.IGNORECASE
)
# Names of factory parameters that receive the micro-batch size.
_SIZE_PARAMETERS = ("micro_batch_size", "batch_size")

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How the job evaluates its models.

    Args:
        function: The function that evaluates one batch.
        batch: The batch that the function is called with. Only used if `has_batch` is True;
            otherwise, the function is called with the job's sample batch.
        has_batch: Whether the factory returned a batch for the evaluation.
    """

    function: Function
    batch: Any
    has_batch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltJob:
    """The job that a factory returned, after it was checked.

    Args:
        models: The models, keyed by name.
        optimizers: The optimizers, keyed by name.
        function: The loss function or the step function.
        is_step: Whether the factory returned `function` as its ``step``. A ``loss_fn`` may turn out
            to run backward or to step optimizers when it is called.
        batch: The sample batch.
        has_batch: Whether the factory returned a sample batch. A step may create its own batches.
        batch_size: The number of samples in the sample batch, or None if the factory neither
            received nor returned it.
        evaluation: How the job evaluates its models, or None if the factory returned no evaluation.
        only_evaluates: Whether the job trains nothing. In this case, `function` evaluates a batch,
            and there are no optimizers.
    """

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    function: Function
    is_step: bool
    batch: Any
    has_batch: bool
    batch_size: int | None = None
    evaluation: Evaluation | None = None
    only_evaluates: bool = False


def load_factory(name: str) -> Function:
    """Import and return the function named by ``module:function`` or ``file.py:function``.

    Raises:
        PolicyError: H411 if the function does not exist or its module cannot be imported, H410 if
            importing the module needs CUDA.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise _unusable(
            name,
            "because its name does not end with a colon and a function",
            "pass the factory as package.module:build or file.py:build.",
        )
    # A user's script that parses sys.argv must not see holdfast's arguments.
    sys.argv = [place]
    try:
        factory = getattr(_import_place(place), attribute)
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:
        # Importing the user's module may raise any exception.
        raise _failed(name, "while it was imported", error) from error
    if not callable(factory):
        raise _unusable(
            name,
            f"because it is a {type(factory).__name__}, not a function",
            "pass the name of a function that returns the job to trace.",
        )
    return factory  # type: ignore[no-any-return]


def _import_place(place: str) -> ModuleType:
    """Import a module by its dotted name, or a file by its path.

    Modules in the current directory are found as well. Any exception that the module itself raises
    is propagated.

    Raises:
        FileNotFoundError: If the file does not exist.
        ImportError: If the module does not exist.
    """
    if not place.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Register the module, so that data loader workers can unpickle its classes and functions.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def call_factory(
    name: str,
    factory: Function,
    *,
    size: int,
    arguments: Mapping[str, bool | int | float | str] = MappingProxyType({}),
) -> BuiltJob:
    """Call a factory and check its result.

    Args:
        name: The name of the factory, for error messages.
        factory: The factory.
        size: The micro-batch size, which is passed to all of the factory's `_SIZE_PARAMETERS`.
        arguments: The user's arguments for the factory, keyed by the name of the parameter.

    Raises:
        PolicyError: H410 or H411 if the factory raises, H412 if its result is not a job, H421 if
            the factory has no parameter for an argument.
    """
    parameters = inspect.signature(factory).parameters
    _check_arguments(name, arguments, parameters)
    sizes = {parameter: size for parameter in _SIZE_PARAMETERS if parameter in parameters}
    try:
        returned = factory(**arguments, **sizes)
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:
        # The user's function may raise any exception.
        when = "when it was called"
        if arguments:
            when += " with " + ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise _failed(name, when, error) from error
    built = _ResultChecker(name, factory).check(returned)
    if sizes:
        return dataclasses.replace(built, batch_size=size)
    return built


def _check_arguments(
    name: str, arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> None:
    """Check that the factory has a parameter for each argument (H421)."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = [argument for argument in arguments if argument not in parameters]
    if not unknown:
        return
    settable = [parameter for parameter in parameters if parameter not in _SIZE_PARAMETERS]
    has = f"it has {', '.join(settable)}" if settable else "it has none that can be set"
    raise PolicyError(
        f"factory {name!r} has no parameter {unknown[0]!r}",
        limit=f"an option can set or vary only the factory's own parameters; {has}",
        fix=f"add the parameter, as in `def build({unknown[0]}=1024):`, and use it.",
        rule="H421",
    )


class _ResultChecker:
    """Checks the result of a factory, and refuses anything that a forecast cannot use (H412)."""

    def __init__(self, name: str, factory: Function) -> None:
        self._name = name
        self._factory = factory

    def check(self, returned: Any) -> BuiltJob:
        if not isinstance(returned, Mapping):
            raise self._refusal(f"a {type(returned).__name__}")
        if "evaluate" in returned and not {"optimizer", "loss_fn", "step"} & returned.keys():
            return self._check_evaluation_only(returned)
        needed = ["model", "optimizer"]
        if "step" not in returned:
            needed.append("batch")
        missing = [key for key in needed if key not in returned]
        if missing:
            keys = ", ".join(map(repr, returned))
            raise self._refusal(f"a dict with {keys}, without {' and '.join(missing)}")
        size = returned.get("batch_size")
        return BuiltJob(
            function=self._function(returned),
            models=self._by_name(returned["model"], "model", nn.Module),
            optimizers=self._by_name(returned["optimizer"], "optimizer", Optimizer),
            is_step="step" in returned,
            batch=returned.get("batch"),
            has_batch="batch" in returned,
            batch_size=size if isinstance(size, int) else None,
            evaluation=self._evaluation(returned),
        )

    def _check_evaluation_only(self, returned: Mapping[str, Any]) -> BuiltJob:
        """Check the result of a factory for a job that trains nothing."""
        if "model" not in returned:
            raise self._refusal("'evaluate' without a model")
        evaluation = self._evaluation(returned)
        assert evaluation is not None
        size = returned.get("batch_size")
        return BuiltJob(
            function=evaluation.function,
            models=self._by_name(returned["model"], "model", nn.Module),
            optimizers={},
            is_step=False,
            batch=evaluation.batch if evaluation.has_batch else returned["batch"],
            has_batch=True,
            batch_size=size if isinstance(size, int) else None,
            only_evaluates=True,
        )

    def _function(self, returned: Mapping[str, Any]) -> Function:
        key = "step" if "step" in returned else "loss_fn"
        function = returned.get(key)
        if not callable(function):
            raise self._refusal(f"a {type(function).__name__} as {key}")
        return function  # type: ignore[no-any-return]

    def _evaluation(self, returned: Mapping[str, Any]) -> Evaluation | None:
        unknown = [
            key
            for key in returned
            if "eval" in str(key) and key not in ("evaluate", "evaluation_batch")
        ]
        if unknown:
            raise self._refusal(
                f"{unknown[0]!r}, which is not a key; an evaluation has the keys 'evaluate' and"
                " 'evaluation_batch'"
            )
        if "evaluate" not in returned:
            if "evaluation_batch" in returned:
                raise self._refusal("an evaluation_batch without an evaluate to call with it")
            return None
        function = returned["evaluate"]
        if not callable(function):
            raise self._refusal(f"a {type(function).__name__} as evaluate")
        has_batch = "evaluation_batch" in returned
        if not has_batch and "batch" not in returned:
            raise self._refusal("evaluate without a batch or evaluation_batch to call it with")
        return Evaluation(
            function=function, batch=returned.get("evaluation_batch"), has_batch=has_batch
        )

    def _by_name(self, value: Any, key: str, kind: type) -> dict[str, Any]:
        """Return the models or optimizers keyed by name. A single one is named after `key`.

        Args:
            value: A model or optimizer, or a dict of them.
            key: The key under which the factory returned `value`.
            kind: The class that each model or optimizer must have.
        """
        by_name = dict(value) if isinstance(value, Mapping) else {key: value}
        for part in by_name.values():
            if not isinstance(part, kind):
                raise self._refusal(_describe_wrong_kind(part, key))
        if not by_name:
            raise self._refusal(f"no {key}")
        if any(_has_torchscript(part) for part in by_name.values()):
            raise self._refusal(
                f"a {key} compiled by torch.jit, which cannot be traced: return it uncompiled"
            )
        return by_name

    def _refusal(self, what: str) -> PolicyError:
        return PolicyError(
            f"factory {self._name!r}{place_of(self._factory)} returned {what}",
            limit=(
                "a forecast needs a model, an optimizer, and either a loss function with a sample"
                " batch or a step; without training, a model, an evaluate and a batch"
            ),
            fix=(
                'return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch":'
                " batch}."
            ),
            rule="H412",
        )


def _describe_wrong_kind(part: Any, key: str) -> str:
    text = f"a {type(part).__name__} as {key}"
    if isinstance(part, (list, tuple)):
        text += f"; to return several, use a dict: {{'a': {key}_a, 'b': {key}_b}}"
    return text


def _has_torchscript(part: Any) -> bool:
    if not isinstance(part, nn.Module):
        return False
    return any(isinstance(module, torch.jit.ScriptModule) for module in part.modules())


def positional_parameters(function: Function) -> list[str]:
    """Return the names of a function's positional parameters that have no default value."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]


# --- errors ---------------------------------------------------------------------------------------


def place_of(function: Any) -> str:
    """Return where a function is defined, such as ``" (model.py:12)"``, or ``""`` if unknown."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    name = type(error).__name__
    message = str(error).strip()
    if not message:
        return name
    return f"{name}: {message.splitlines()[0].rstrip('.')}"


def _failed(name: str, when: str, error: BaseException) -> PolicyError:
    reason = f"{when}: {first_line(error)}"
    line = line_of(error)
    if line:
        reason += f", at {line}"
    if _NEEDS_CUDA.search(str(error)):
        return PolicyError(
            f"factory {name!r} needs CUDA {reason}",
            limit=(
                "a forecast runs without a GPU, and simulates only torch.cuda and tensors on"
                " device='cuda'"
            ),
            fix=(
                "import modules that need a real GPU inside the function that uses them, or replace"
                " them in build() with plain torch modules that need about as much memory."
            ),
            rule="H410",
        )
    return _unusable(
        name,
        reason,
        "fix this error. If the code reads the values of tensors: a forecast knows only shapes.",
    )


def _unusable(name: str, reason: str, fix: str) -> PolicyError:
    return PolicyError(
        f"factory {name!r} cannot be used {reason}",
        limit="a factory is a function in a module or a .py file that returns the job to trace",
        fix=fix,
        rule="H411",
    )
