"""Refuse settings under which a guarded step could not keep its promises.

Each error names the setting, the reason and the fix. Checks that concern a single framework are in
that framework's package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from holdfast.core.errors import PolicyError

_T = TypeVar("_T")

# Accelerate's distributed types without an engine, such as DeepSpeed, to run the optimizer.
_PLAIN_DISTRIBUTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU")
# Maps Accelerate's precision names to the values of `Policy.precision`.
_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def load(name: str) -> Any:
    """Import and return a framework's module.

    Raises:
        PolicyError: H111 if the import fails. The message names the package to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise unsupported(
            f"{package} cannot be imported ({error})",
            reason="this integration requires it",
            fix=f"pip install {package}, or repair the installation that the message names.",
        ) from error


def unsupported(setting: str, *, reason: str, fix: str) -> PolicyError:
    """Return an H111 error for a framework setting that cannot be guarded.

    Args:
        setting: The setting with its value, as the user would write it.
        reason: Why a step with this setting cannot be guarded, as a clause.
        fix: What the user should do instead, as a sentence.
    """
    return PolicyError(setting, limit=reason, fix=fix, rule="H111")


def raise_first(rules: Iterable[Callable[[_T], PolicyError | None]], subject: _T) -> None:
    """Call the rules with the subject in order, and raise the first error that a rule returns."""
    for rule in rules:
        error = rule(subject)
        if error is not None:
            raise error


def check_one_process(count: int, name: str) -> None:
    """Refuse to train with more than one process or device.

    Args:
        count: The number of processes or devices.
        name: The framework's setting that determines the number, for the error message.

    Raises:
        PolicyError: H108 if the count is above 1.
    """
    if count <= 1:
        return
    raise PolicyError(
        f"{name}={count}",
        limit=(
            "this integration guards a single process on a single device, because ranks that skip"
            " steps or stop independently would diverge"
        ),
        fix=(
            "start one process on one device, for example with CUDA_VISIBLE_DEVICES=0 and without"
            " torchrun. Or remove holdfast from the script and start the job under `holdfast run`,"
            " which supervises any number of processes."
        ),
        rule="H108",
    )


def check_accelerator(accelerator: Any) -> str:
    """Check that an ``accelerate.Accelerator`` can be guarded, and return its precision.

    Returns:
        The precision as a value of `Policy.precision`. This is ``"fp32"`` if the accelerator is
        configured for half precision but does not apply autocast, as for fp16 on a CPU.

    Raises:
        PolicyError: H111 if an engine such as DeepSpeed or FSDP runs the optimizer, or if the
            precision is not supported.
    """
    distributed_type = str(
        getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    )
    if distributed_type not in _PLAIN_DISTRIBUTED_TYPES:
        raise unsupported(
            f"distributed_type={distributed_type}",
            reason=(
                "this engine runs the backward pass and the optimizer itself, so the guard cannot"
                " undo a step"
            ),
            fix="train without this engine, or supervise the job with `holdfast run` instead.",
        )
    precision = str(accelerator.mixed_precision)
    if precision not in _PRECISIONS:
        raise unsupported(
            f"mixed_precision={precision!r}",
            reason="a guarded step supports fp32, bf16 and fp16",
            fix="use one of these.",
        )
    if not accelerator.native_amp:
        return "fp32"
    return _PRECISIONS[precision]
