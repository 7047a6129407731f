"""Refuse settings with which a guarded step could not keep its promises.

A refusal names the setting, the reason and what to do instead. Checks that only one framework needs
are in its own package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from holdfast.core.errors import PolicyError

_T = TypeVar("_T")

# Accelerate's distributed types in which no engine owns the optimizer.
_PLAIN_DISTRIBUTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU")
# Maps Accelerate's names of precisions to those of `Policy.precision`.
_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def load(name: str) -> Any:
    """Import and return a module of a framework.

    Raises:
        PolicyError: H111 with the extra to install, if it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise unsupported(
            f"{package} cannot be imported ({error})",
            reason="this integration works inside it",
            fix='install the extra: pip install "torch-holdfast[integrations]".',
        ) from error


def unsupported(setting: str, *, reason: str, fix: str) -> PolicyError:
    """Return H111 for a setting of a framework that cannot be guarded.

    Args:
        setting: The setting and its value, as the user wrote it.
        reason: Why it cannot be guarded, as a clause.
        fix: What to do instead, as a sentence.
    """
    return PolicyError(setting, limit=reason, fix=fix, rule="H111")


def raise_first(rules: Iterable[Callable[[_T], PolicyError | None]], subject: _T) -> None:
    """Raise the first error that one of the rules returns for the subject."""
    for rule in rules:
        error = rule(subject)
        if error is not None:
            raise error


def check_one_process(count: int, name: str) -> None:
    """Refuse several processes or devices.

    Args:
        count: How many there are.
        name: The framework's name for their number.

    Raises:
        PolicyError: H108 if there are several.
    """
    if count <= 1:
        return
    raise PolicyError(
        f"{name}={count}",
        limit=(
            "this integration guards one process on one device; ranks that skip a step or stop on"
            " their own would diverge"
        ),
        fix=(
            "start one process on one device, for instance with CUDA_VISIBLE_DEVICES=0 and without"
            " torchrun; or leave holdfast out of the script and start the job under"
            " `holdfast run`, which watches any number of processes."
        ),
        rule="H108",
    )


def check_accelerator(accelerator: Any) -> str:
    """Return the precision of an ``accelerate.Accelerator`` in the spelling of the policy.

    It is "fp32" if the accelerator was configured for half precision but does not autocast, such as
    for fp16 on a CPU.

    Raises:
        PolicyError: H111 for an engine that owns the optimizer (any except
            ``DistributedDataParallel``), or for an unsupported precision.
    """
    distributed_type = str(
        getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    )
    if distributed_type not in _PLAIN_DISTRIBUTED_TYPES:
        raise unsupported(
            f"distributed_type={distributed_type}",
            reason=(
                "such an engine runs the backward pass and the optimizer itself, so a step cannot"
                " be undone"
            ),
            fix="train without it, or under `holdfast run` instead.",
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
