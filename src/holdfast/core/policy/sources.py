"""Read the values of a policy from YAML files, ``HOLDFAST_*`` variables and command-line options.

For each source, a function returns strings by field name, each with a description of its origin.
``kinds`` converts the strings to the types of the fields, in the same way for all sources.
``policy`` defines the precedence of the sources.
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
# The key that selects a preset. Values from any other source override those of the preset.
PRESET = "preset"

# Limits on the size and nesting depth of a policy file, far above what a policy needs.
_MAX_FILE_BYTES = 64 << 10
_MAX_DEPTH = 8
# Longer messages from the YAML parser are truncated.
_MAX_MESSAGE_CHARACTERS = 400
_QUOTES = "'\""
# Characters that are stripped from both ends of a part of a list.
_AROUND = f" \t\n{_QUOTES}"
# Strings that mean None, compared in lower case.
_NONE_TEXTS = ("", "~", "null", "none")
# The prefix of holdfast's options in the argparse namespace, which also contains the program's own
# options.
_OPTION_PREFIX = "holdfast_"


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value that was not passed as a Python argument, together with its source.

    Args:
        value: A string or a list of strings from a file, a variable or an option; or any value from
            a preset.
        source: Where the value came from, such as ``"policy.yaml, line 2"``.
    """

    value: Any
    source: str

    def readings(self) -> tuple[Any, ...]:
        """Return the possible interpretations of the value, in the order in which to try them.

        A string has two interpretations: the string itself (or None, if it means None), and a list
        of its comma-separated parts. As in YAML, a list may have brackets, and its parts may be
        quoted.
        """
        if not isinstance(self.value, str):
            return (self.value,)
        text = _without_quotes(self.value)
        inner = text
        if text.startswith("[") and text.endswith("]"):
            inner = text[1:-1]
        parts = [part.strip(_AROUND) for part in inner.split(",")]
        parts = [part for part in parts if not _is_none(part)]
        return (None if _is_none(text) else text, parts)


def _without_quotes(text: str) -> str:
    """Return a text without whitespace around it, and without quotation marks around all of it.

    A quotation mark at only one end belongs to the text, as in ``notify-send "my title"``.
    """
    text = text.strip()
    while len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1].strip()
    return text


def _is_none(text: str) -> bool:
    return text.lower() in _NONE_TEXTS


def describe_sources(*values: Any) -> str:
    """Return the sources of the given values, in parentheses, to append to an error message."""
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
    """Return the values of all ``HOLDFAST_*`` environment variables by field, except empty ones."""
    return {
        variable.removeprefix(PREFIX).lower(): SourcedValue(
            text, f"environment variable {variable}"
        )
        for variable, text in os.environ.items()
        if variable.startswith(PREFIX) and text.strip()
    }


def from_yaml(path: Path) -> dict[str, SourcedValue]:
    """Return the values in a YAML file by key, each with its line number as part of its source.

    Raises:
        PolicyError: H103 if the file cannot be read or is not a YAML mapping.
    """
    # Imported here so that a process without a policy file never imports yaml.
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

    Args:
        text: The YAML text.
        path: The file that contained the text, to name in the sources of the values.

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
    # This call also rejects keys that are not scalars.
    values = loader.construct_document(root)
    lines = _lines_of_keys(root)
    return {key: SourcedValue(values[key], f"{path}, line {line}") for key, line in lines.items()}


def _check_is_simple(text: str) -> None:
    """Raise an error for YAML that is dangerous to load.

    Nested aliases can expand a few lines to gigabytes, deeply nested text takes seconds to parse,
    and tags request custom types.

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
        # PyYAML counts lines from 0.
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ValueError(f"line {line}: {key!r} is already set in line {lines[key]}")
        lines[key] = line
    return lines


# --- the command line -----------------------------------------------------------------------------


@functools.cache
def meanings_of(file: Path, name: str) -> dict[str, str]:
    """Return the docstring below each field of a class, by field name.

    The command-line help and the documentation are generated from these docstrings, so they always
    agree with the source.

    Args:
        file: The source file of the module. If it does not exist, the result is empty.
        name: The name of the class.
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
        parser: The parser. Its namespace contains only those options that the user passes.
        defaults: The default of each field, which the help shows.
        meanings: The description of each field, as returned by `meanings_of`.
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
            # Double each "%", because argparse formats help texts with the % operator.
            help=f"{meaning} (default: {default!r})".replace("%", "%%").strip(),
        )


def _option(field: str) -> str:
    """Return a field's option, such as ``"--max-grad-norm"`` for ``"max_grad_norm"``."""
    return "--" + field.replace("_", "-")


def from_options(
    namespace: argparse.Namespace, fields: Iterable[str]
) -> tuple[str | None, dict[str, SourcedValue]]:
    """Return the path passed as ``--policy``, or None, and the values of other options by field."""
    values = {}
    for field in (PRESET, *fields):
        text = getattr(namespace, _OPTION_PREFIX + field, None)
        if text is not None:
            values[field] = SourcedValue(text, f"option {_option(field)}")
    return getattr(namespace, _OPTION_PREFIX + "policy", None), values
