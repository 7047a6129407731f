"""Changes of a run by name: options of its optimizers and fields of its policy, checked before they are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.core.policy import Policy
from holdfast.run.parts import Parts
from holdfast.run.schedules import scale

POLICY_FIELDS = tuple(field.name for field in dataclasses.fields(Policy))


def policy_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the changes that are fields of the policy."""
    return {name: value for name, value in changes.items() if name in POLICY_FIELDS}


def changed_policy(policy: Policy, changes: Mapping[str, Any]) -> Policy:
    """Return a policy with those of the changes that are its fields; a text ``"*0.1"`` multiplies.

    Raises:
        PolicyError: H102 or H704, for a value that does not fit.
    """
    changed = {}
    for name, value in policy_changes(changes).items():
        factor, old = _factor(name, value), getattr(policy, name)
        if factor is not None and not _is_number(old):
            raise _bad_change(name, value, f"it is {old!r} now")
        changed[name] = value if factor is None else type(old)(old * factor)
    return policy.replace(**changed) if changed else policy


def options_of(parts: Parts, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the changes that are options of the optimizers; each other one is a field of the policy."""
    groups = [group for optimizer in parts.optimizers.values() for group in optimizer.param_groups]
    options = sorted({key for group in groups for key in group if key != "params"})
    for name in changes:
        if name not in options and name not in POLICY_FIELDS:
            raise PolicyError(
                f"{name!r} is neither an option of the optimizer nor a policy field",
                limit=f"the options are {', '.join(options)}",
                fix=did_you_mean(name, [*options, *POLICY_FIELDS], otherwise="take one of these, or a policy field."),
                rule="H704",
            )
    return {name: value for name, value in changes.items() if name not in POLICY_FIELDS}


def apply_options(parts: Parts, options: Mapping[str, Any]) -> None:
    """Change options of all groups that have them; a learning rate so that its scheduler does not take it back.

    Raises:
        PolicyError: H704, for a value that does not fit.
    """
    optimizers = parts.optimizers
    for name, value in options.items():
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups if name in group]
        factor = _factor(name, value)
        if name == "lr":
            scale(parts.schedulers, optimizers, factor or _rate_factor(groups, value))
            continue
        for group in groups:
            old = group[name]
            if factor is not None and not _is_number(old):
                raise _bad_change(name, value, f"it is {old!r} now")
            group[name] = _like(name, old, value) if factor is None else old * factor


def _rate_factor(groups: Sequence[Mapping[str, Any]], value: Any) -> float:
    rates = {float(group["lr"]) for group in groups}
    if not (_is_number(value) and 0 < value < math.inf):
        raise _bad_change("lr", value, "a learning rate is a number above 0")
    if len(rates) > 1 or 0.0 in rates:
        raise _bad_change("lr", value, f"the groups have the rates {', '.join(map(str, sorted(rates)))}")
    return float(value) / rates.pop()


def _factor(name: str, value: Any) -> float | None:
    """Return what a text such as ``*0.1`` multiplies by; None for a plain value."""
    if not (isinstance(value, str) and value.startswith("*")):
        return None
    try:
        factor = float(value[1:])
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise _bad_change(name, value, "what follows the star is no number above 0")
    return factor


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _like(name: str, old: Any, value: Any) -> Any:
    """Return a value for an option, of the kind that it has now."""
    numbers = isinstance(value, (list, tuple)) and all(map(_is_number, value))
    if isinstance(old, tuple) and numbers and len(value) == len(old):
        return tuple(value)
    if isinstance(old, tuple) or (_is_number(old) and not _is_number(value)):
        raise _bad_change(name, value, f"it is {old!r} now")
    if isinstance(old, bool) and not isinstance(value, bool):
        raise _bad_change(name, value, f"it is {old!r} now")
    return value


def _bad_change(name: str, value: Any, why: str) -> PolicyError:
    return PolicyError(
        f"{name}={value!r}: {why}",
        limit="one number takes the place of one number",
        fix=f"multiply instead: {name}=*0.1.",
        rule="H704",
    )
