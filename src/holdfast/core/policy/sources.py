"""Where the values of a policy come from.

YAML files, ``HOLDFAST_*`` variables, options of a command line.

All three give texts by field name, each with its source. What a text means is decided in ``kinds``
by the type of the field, alike for all of them; which source wins is decided in ``policy``.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.core.files import read_file
from holdfast.core.policy.presets import presets

PREFIX = "HOLDFAST_"
PRESET = "preset"  # a key beside the fields: the name of the values that lie below all others
_MOST_BYTES, _DEEPEST, _LONGEST = 64 << 10, 8, 400
_AROUND = " \t\n'\""
_NONE = ("", "~", "null", "none")
# Of the options' names in a namespace, which they share with the program's own
_OPTION = "holdfast_"


class Sourced(NamedTuple):
    """A value that is no argument: a text, a list of texts, or what a preset says.

    And where it stands.
    """

    value: Any
    source: str

    def readings(self) -> tuple[Any, ...]:
        """Return what the value can mean, to be tried in this order.

        Itself or None, or the parts between commas.

        Brackets around the parts, and quotes, are as in YAML, and need not be.
        """
        if not isinstance(self.value, str):
            return (self.value,)
        whole = self.value.strip(_AROUND)
        inner = whole[1:-1] if whole.startswith("[") and whole.endswith("]") else whole
        parts = [each.strip(_AROUND) for each in inner.split(",")]
        return None if whole.lower() in _NONE else whole, [
            each for each in parts if each.lower() not in _NONE
        ]


def named(*given: Any) -> str:
    """Return in brackets where values came from, for the end of what an error says of them."""
    sources = dict.fromkeys(
        each.source if isinstance(each, Sourced) else "argument" for each in given
    )
    return f" ({' and '.join(sources)})"


def check_keys(given: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Check that every key is a policy field, or ``"preset"``; H101 names the nearest field."""
    known = [*fields, PRESET]
    for key, value in given.items():
        if key not in known:
            others = "`python -c 'import holdfast; help(holdfast.Policy)'` lists them."
            otherwise = "pass a file as Guard(policy=FILE)." if key == "policy" else others
            raise PolicyError(
                f"{key!r:.100}{named(value)} is not a policy field",
                limit=f"holdfast.Policy has {len(known) - 1} of them, and there is {PRESET}",
                fix=did_you_mean(key, known, otherwise=otherwise),
                rule="H101",
            )


# --- YAML and variables
# ------------------------------------------------------------------------


def from_environment() -> dict[str, Sourced]:
    """Return the texts of the ``HOLDFAST_*`` variables."""
    return {
        variable.removeprefix(PREFIX).lower(): Sourced(text, f"environment variable {variable}")
        for variable, text in os.environ.items()
        if variable.startswith(PREFIX) and text.strip()  # an empty one is one that is not set
    }


def from_yaml(path: Path) -> dict[str, Sourced]:
    """Return the texts of a YAML file by key, with their lines.

    H103 for a file that is no YAML mapping.
    """
    import yaml  # here, so that a process without such a file never loads it

    try:
        return _texts(read_file(Path(os.path.realpath(path)), _MOST_BYTES).decode(), path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PolicyError(
            f"policy file {path} cannot be read ({str(error)[:_LONGEST]})",
            limit="a YAML mapping of field names to values is needed, each name once",
            fix=(
                "check the path, and write one `field: value` per line, for instance"
                " `max_grad_norm: 1.0`."
            ),
            rule="H103",
        ) from error


def _texts(text: str, path: Path) -> dict[str, Sourced]:
    """Return what a YAML mapping says, each scalar as its text.

    ValueError for more than a policy needs.

    An alias within aliases makes gigabytes of a few lines, what is nested deeply takes seconds, and
    a tag asks for a type of its own.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, yaml.BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST or getattr(event, "tag", None):
            raise ValueError(f"it has an alias or a tag, or is nested more than {_DEEPEST} deep")
    loader = yaml.BaseLoader(text)  # which makes nothing but texts, lists and dicts
    root = loader.get_single_node()
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it is no mapping")  # noqa: TRY004 - of the file
    found = loader.construct_document(root)
    marks = [(key.value, key.start_mark) for key, _ in root.value]
    first = dict(reversed(marks))
    for key, mark in marks:
        if mark is not first[key]:
            raise ValueError(
                f"line {mark.line + 1}: {key!r} stands in line {first[key].line + 1} already"
            )
    return {key: Sourced(found[key], f"{path}, line {mark.line + 1}") for key, mark in marks}


# --- the command line
# ------------------------------------------------------------------------


@functools.cache
def meanings_of(file: Path, name: str) -> dict[str, str]:
    """Return the text under each field of a class, by field, so that help and source cannot
    disagree.

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


def add_options(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any], meanings: Mapping[str, str]
) -> None:
    """Add ``--preset``, ``--policy`` and one option for each field to a program's parser.

    Defaults, by field, are shown in the help beside their meanings, and put nothing into the
    namespace.
    """
    group = parser.add_argument_group(
        "holdfast", "values are as in YAML: 1.0, true, none, auto; lists: a,b"
    )
    add = functools.partial(group.add_argument, default=argparse.SUPPRESS)
    add(
        "--preset",
        dest=_OPTION + PRESET,
        metavar="NAME",
        help=f"settings of a domain: {', '.join(presets())}",
    )
    add("--policy", dest=_OPTION + "policy", metavar="FILE", help="YAML file of fields and values")
    for field, default in defaults.items():
        meaning = " ".join(meanings.get(field, "").replace("`", "").split())
        shown = f"{meaning} (default: {default!r})".replace("%", "%%").strip()
        add("--" + field.replace("_", "-"), dest=_OPTION + field, metavar="VALUE", help=shown)


def from_options(
    namespace: argparse.Namespace, fields: Iterable[str]
) -> tuple[str | None, dict[str, Sourced]]:
    """Return the path given by ``--policy``, and the texts of the options."""
    given = {key: getattr(namespace, _OPTION + key, None) for key in (PRESET, *fields)}
    found = {
        key: Sourced(text, f"option --{key.replace('_', '-')}")
        for key, text in given.items()
        if text is not None
    }
    return getattr(namespace, _OPTION + "policy", None), found
