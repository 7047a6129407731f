"""Where the values of a policy come from: YAML files, ``HOLDFAST_*`` variables, options of a command line.

Here text becomes values by field name. Whether a value is allowed is checked in ``policy_checks``, and which source
wins is decided in ``policy``.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.core.policy.checks import bad_value
from holdfast.core.policy.presets import presets

PREFIX = "HOLDFAST_"
PRESET = "preset"  # a key beside the fields: the name of the values that lie below all others
_MOST_BYTES, _DEEPEST, _LONGEST = 64 << 10, 8, 400
_LISTS = ("allow_split_with", "frozen", "ignore_rules")
_OPTION = "holdfast_"  # of the options' names in a namespace, which they share with the program's own


def naming_variables(error: PolicyError, keys: Iterable[str]) -> PolicyError:
    """Return an error about values that says which of them came from the environment, where nobody would look.

    `keys` are the fields that variables have set.
    """
    named = [PREFIX + key.upper() for key in keys if re.search(rf"\b{key}\b", error.what)]
    if not named:
        return error
    what = f"{error.what} (environment variable {' and '.join(named)})"
    return PolicyError(what, limit=error.limit, fix=error.fix, rule=error.rule)


def check_keys(keys: Iterable[str], fields: Iterable[str], variable: str = "") -> None:
    """Check that every key is a policy field, or ``"preset"``; H101 names the nearest field.

    `variable` is the environment variable that they come from, if they do.
    """
    known = [*fields, PRESET]
    for key in keys:
        if key not in known:
            raise PolicyError(
                f"{key!r}{variable and f' (environment variable {variable})'} is not a policy field",
                limit=f"the fields are {', '.join(known[:-1])}; and there is {PRESET}",
                fix=did_you_mean(key, known, otherwise="take one of these."),
                rule="H101",
            )


# --- YAML and variables -----------------------------------------------------------------------------------------


def from_yaml(path: Path, fields: Iterable[str]) -> dict[str, Any]:
    """Return what a YAML file sets; H101 for an unknown key, H103 for a file that is no YAML mapping."""
    found = {str(key): _plain(value, str(key)) for key, value in _mapping(path).items()}
    check_keys(found, fields)
    return found


def from_environment(environment: Mapping[str, str], fields: Iterable[str]) -> dict[str, Any]:
    """Return what the ``HOLDFAST_*`` variables set (H101 for an unknown field, H102 for what is no YAML value)."""
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if variable.startswith(PREFIX):
            key = variable.removeprefix(PREFIX).lower()
            check_keys([key], fields, variable)
            found[key] = _parsed(variable, key, text)
    return found


def _mapping(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            loaded = _loaded(file.read(_MOST_BYTES + 1).decode())
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"policy file {path} cannot be read ({error})",
            limit="a readable YAML file is needed",
            fix="check the path and the YAML syntax.",
            rule="H103",
        ) from error
    if loaded is not None and not isinstance(loaded, dict):
        raise PolicyError(
            f"policy file {path} holds a {type(loaded).__name__}",
            limit="a mapping of field names to values is needed",
            fix="write one `field: value` per line, for instance `max_grad_norm: 1.0`.",
            rule="H103",
        )
    return loaded or {}


def _loaded(text: str) -> Any:
    """Return what a YAML text says; ValueError if it says nothing clear, or more than a policy needs.

    An alias within aliases makes gigabytes of a few lines, and what is nested deeply takes seconds.
    """
    import yaml  # here, so that a process without such variables never loads it

    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                raise ValueError(f"it has an alias, or is nested more than {_DEEPEST} deep")
        return yaml.safe_load(text)
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, OverflowError) as error:  # `!!int ""`, `!!bool x`
        raise ValueError(str(error)[:_LONGEST]) from error


def _parsed(source: str, key: str, text: str) -> Any:
    """Return the value that a text means, as YAML reads it; lists may do without brackets."""
    if key in _LISTS and not text.lstrip().startswith("["):  # no YAML: a pattern may begin with a star
        return _items(text)
    try:
        value = _plain(_loaded(text), key)
    except ValueError as error:
        raise bad_value(source, text, "a YAML value such as 1.0, true, null or auto") from error
    return _items(text) if key == "recompute" and isinstance(value, str) else value


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _plain(value: Any, key: str = "") -> Any:
    if value in ("None", "none"):
        return None
    if value is False and key == "spike_action":
        return "off"  # YAML 1.1 takes the word for false
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as text: it wants a dot and a sign
        except ValueError:
            return value
    return value


# --- the command line -------------------------------------------------------------------------------------------


@functools.cache
def meanings_of(file: Path, name: str) -> dict[str, str]:
    """Return the text under each field of a class, by field, so that help and source cannot disagree.

    A module that has no source any more gives no texts.
    """
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except OSError:
        return {}
    (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        field.target.id: str(text.value.value)
        for field, text in itertools.pairwise(found.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def add_options(parser: argparse.ArgumentParser, defaults: Mapping[str, Any], meanings: Mapping[str, str]) -> None:
    """Add ``--preset``, ``--policy`` and one option for each field to a program's parser.

    Defaults, by field, are shown in the help beside their meanings, and put nothing into the namespace.
    """
    group = parser.add_argument_group("holdfast", "values are YAML: 1.0, true, none, auto; lists: a,b")
    add = functools.partial(group.add_argument, default=argparse.SUPPRESS)
    add("--preset", dest=_OPTION + PRESET, metavar="NAME", help=f"settings of a domain: {', '.join(presets())}")
    add("--policy", dest=_OPTION + "policy", metavar="FILE", help="YAML file of fields and values")
    for field, default in defaults.items():
        meaning = " ".join(meanings.get(field, "").replace("`", "").split())
        shown = f"{meaning} (default: {default!r})".replace("%", "%%").strip()
        add("--" + field.replace("_", "-"), dest=_OPTION + field, metavar="VALUE", help=shown)


def from_options(namespace: argparse.Namespace, fields: Iterable[str]) -> tuple[str | None, dict[str, Any]]:
    """Return the path given by ``--policy``, and what the options set; H102 for text that is no YAML value."""
    given = {key: getattr(namespace, _OPTION + key, None) for key in (PRESET, *fields)}
    found = {key: _parsed("--" + key.replace("_", "-"), key, text) for key, text in given.items() if text is not None}
    return getattr(namespace, _OPTION + "policy", None), found
