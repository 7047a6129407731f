"""Where the values of a policy come from: YAML files, ``HOLDFAST_*`` variables and options.

Each of these yields strings by field, together with where each string came from. ``kinds`` converts
the strings to the types of the fields, in the same way for all sources. ``policy`` decides which
source wins.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.core.files import read_file
from holdfast.core.policy.presets import presets

if TYPE_CHECKING:
    import yaml

PREFIX = "HOLDFAST_"
# The key that names a preset. Values from any other source override those of the preset.
PRESET = "preset"

# Limits on the size and the nesting of a policy file, far above what one needs.
_MAX_FILE_BYTES = 64 << 10
_MAX_DEPTH = 8
# Longer messages of the YAML parser are cut.
_MAX_MESSAGE_CHARACTERS = 400
# Characters that are stripped from both ends of a string: white space and quotes.
_AROUND = " \t\n'\""
# Strings that mean None, in lower case.
_NONE_TEXTS = ("", "~", "null", "none")
# The prefix of our options in the argparse namespace, which also holds the program's own options.
_OPTION_PREFIX = "holdfast_"


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value that did not come from a Python argument, and its source.

    Args:
        value: A string or a list of strings from a file, a variable or an option; or any value from
            a preset.
        source: Where the value came from, such as ``"policy.yaml, line 2"``.
    """

    value: Any
    source: str

    def readings(self) -> tuple[Any, ...]:
        """Return the possible interpretations of the value, in the order in which to try them.

        A string is read as itself or None, or as a list of comma-separated parts. As in YAML, a
        list may have brackets and its parts may be quoted.
        """
        if not isinstance(self.value, str):
            return (self.value,)
        text = self.value.strip(_AROUND)
        inner = text
        if text.startswith("[") and text.endswith("]"):
            inner = text[1:-1]
        parts = [part.strip(_AROUND) for part in inner.split(",")]
        parts = [part for part in parts if not _is_none(part)]
        return (None if _is_none(text) else text, parts)


def _is_none(text: str) -> bool:
    return text.lower() in _NONE_TEXTS


def describe_sources(*values: Any) -> str:
    """Return the sources of some values, in parentheses, to append to an error message."""
    sources = [value.source if isinstance(value, SourcedValue) else "argument" for value in values]
    return f" ({' and '.join(dict.fromkeys(sources))})"


def check_keys(values: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Check that every key is a policy field or ``"preset"``.

    Raises:
        PolicyError: H101 for an unknown key. The message suggests the most similar field.
    """
    known_keys = [*fields, PRESET]
    for key, value in values.items():
        if key in known_keys:
            continue
        fix = "run `python -c 'import holdfast; help(holdfast.Policy)'` to list the fields."
        if key == "policy":
            fix = "pass a policy file as Guard(policy=FILE)."
        raise PolicyError(
            f"{key!r:.100}{describe_sources(value)} is not a policy field",
            limit=f"Policy has {len(known_keys) - 1} fields, plus {PRESET!r}",
            fix=did_you_mean(key, known_keys, otherwise=fix),
            rule="H101",
        )


# --- YAML and variables ---------------------------------------------------------------------------


def from_environment() -> dict[str, SourcedValue]:
    """Return the values of ``HOLDFAST_*`` variables by field. Empty variables count as unset."""
    return {
        variable.removeprefix(PREFIX).lower(): SourcedValue(
            text, f"environment variable {variable}"
        )
        for variable, text in os.environ.items()
        if variable.startswith(PREFIX) and text.strip()
    }


def from_yaml(path: Path) -> dict[str, SourcedValue]:
    """Return the values in a YAML file by key, each with its line.

    Raises:
        PolicyError: H103, if the file cannot be read or is not a YAML mapping.
    """
    # Imported here, so that a process without a policy file never loads yaml.
    import yaml

    try:
        text = read_file(Path(os.path.realpath(path)), _MAX_FILE_BYTES).decode()
        return _read_mapping(text, path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PolicyError(
            f"policy file {path} cannot be read ({str(error)[:_MAX_MESSAGE_CHARACTERS]})",
            limit="it must be a YAML mapping of field names to values, each name once",
            fix=(
                "check the path, and write one `field: value` per line, for instance"
                " `max_grad_norm: 1.0`."
            ),
            rule="H103",
        ) from error


def _read_mapping(text: str, path: Path) -> dict[str, SourcedValue]:
    """Return the contents of a YAML mapping, with each scalar as a string.

    Raises:
        ValueError: If the text is not a mapping, repeats a key, or uses YAML features that a policy
            does not need.
    """
    import yaml

    _check_is_simple(text)
    # The base loader creates only strings, lists and dicts.
    loader = yaml.BaseLoader(text)
    root = loader.get_single_node()
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it is not a mapping")  # noqa: TRY004 - the content of the file is wrong
    # This also rejects keys that are not strings.
    values = loader.construct_document(root)
    lines = _lines_of_keys(root)
    return {key: SourcedValue(values[key], f"{path}, line {line}") for key, line in lines.items()}


def _check_is_simple(text: str) -> None:
    """Refuse YAML that is dangerous to load.

    Nested aliases can expand a few lines to gigabytes, deep nesting takes seconds to parse, and
    tags request custom types.

    Raises:
        ValueError: If the text contains an alias or a tag, or is nested too deeply.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, yaml.BaseLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        is_tagged = bool(getattr(event, "tag", None))
        if isinstance(event, yaml.AliasEvent) or depth > _MAX_DEPTH or is_tagged:
            raise ValueError(f"it has an alias or a tag, or is nested more than {_MAX_DEPTH} deep")


def _lines_of_keys(root: yaml.MappingNode) -> dict[str, int]:
    """Return the line number of each key.

    Raises:
        ValueError: If a key occurs twice.
    """
    lines: dict[str, int] = {}
    for key_node, _ in root.value:
        key = key_node.value
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ValueError(f"line {line}: {key!r} is already set in line {lines[key]}")
        lines[key] = line
    return lines


# --- the command line -----------------------------------------------------------------------------


@functools.cache
def meanings_of(file: Path, name: str) -> dict[str, str]:
    """Return the docstring below each field of a class, by field.

    The command-line help and the documentation are generated from these docstrings, so they always
    agree with the source. If the module's source file is not installed, the result is empty.
    """
    try:
        module = ast.parse(file.read_text(encoding="utf-8"))
    except OSError:
        return {}
    (class_node,) = [
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    meanings = {}
    for statement, next_statement in itertools.pairwise(class_node.body):
        match statement, next_statement:
            case (
                ast.AnnAssign(target=ast.Name(id=field)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                meanings[field] = text
    return meanings


def add_options(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any], meanings: Mapping[str, str]
) -> None:
    """Add ``--preset``, ``--policy`` and one option for each field to a program's parser.

    Args:
        parser: The parser. Options that are not given do not appear in its namespace.
        defaults: The default of each field, shown in the help.
        meanings: The description of each field, from `meanings_of`.
    """
    group = parser.add_argument_group(
        "holdfast", "values are as in YAML: 1.0, true, none, auto; lists: a,b"
    )
    add_option = functools.partial(group.add_argument, default=argparse.SUPPRESS)
    add_option(
        "--preset",
        dest=_OPTION_PREFIX + PRESET,
        metavar="NAME",
        help=f"settings for a domain: {', '.join(presets())}",
    )
    add_option(
        "--policy",
        dest=_OPTION_PREFIX + "policy",
        metavar="FILE",
        help="YAML file of fields and values",
    )
    for field, default in defaults.items():
        meaning = " ".join(meanings.get(field, "").replace("`", "").split())
        add_option(
            _option(field),
            dest=_OPTION_PREFIX + field,
            metavar="VALUE",
            # argparse formats help texts with the % operator.
            help=f"{meaning} (default: {default!r})".replace("%", "%%").strip(),
        )


def _option(field: str) -> str:
    """Return ``"--max-grad-norm"`` for ``"max_grad_norm"``."""
    return "--" + field.replace("_", "-")


def from_options(
    namespace: argparse.Namespace, fields: Iterable[str]
) -> tuple[str | None, dict[str, SourcedValue]]:
    """Return the path given by ``--policy``, and the values of the field options by field."""
    values = {}
    for field in (PRESET, *fields):
        text = getattr(namespace, _OPTION_PREFIX + field, None)
        if text is not None:
            values[field] = SourcedValue(text, f"option {_option(field)}")
    return getattr(namespace, _OPTION_PREFIX + "policy", None), values
