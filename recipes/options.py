"""Options of a recipe: the fields of a dataclass, on the command line and in a YAML file, beside holdfast's policy.

Strongest first: an option of the command line, the file of ``--config``, the default of the field. Those of the
policy are read by `holdfast.Policy`: an option, ``HOLDFAST_*``, the file of ``--policy``, which is the recipe's own
``policy.yaml`` unless another is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from holdfast import HoldfastError, Policy
from holdfast.core.policy_sources import meanings_of

_Options = TypeVar("_Options", bound="RunOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What every recipe has."""

    run_dir: Path = Path("runs/recipe")
    """Directory of the run: checkpoints, records, report.html and result.json."""

    resume: bool = False
    """Insist on a checkpoint in the run directory to go on from. Without it a run goes on if there is one, and begins
    if there is none."""

    max_steps: int = 1000
    """Optimizer steps, counted over all lives of the run."""

    seed: int = 0
    """Of weights, order, augmentation and dropout."""

    device: str = "auto"
    """Where to train: cuda, cuda:1, cpu, or auto, which is the first GPU if there is one."""

    num_workers: int = 0
    """Processes that load samples beside the training."""


class _Parser(argparse.ArgumentParser):
    """Names the nearest option where one is misspelt, and may take its time to list all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **settings)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # its own overloads say no more
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            nearest = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.0)[0]
            self.error(f"{unknown[0]!r} is not an option; did you mean {nearest!r}?")
        return found


def read_options(
    cls: type[_Options], argv: Sequence[str] | None = None, *, policy_file: Path | None = None
) -> tuple[_Options, Policy]:
    """Return a recipe's options and its policy; what cannot be used ends the process with a message and exit code 2.

    Args:
        cls: Dataclass of the options, a text under each field being its help. Fields are int, float, str, bool, Path,
            a Literal, or one of these or None.
        argv: Arguments; None: those of the process.
        policy_file: Policy of the recipe.
    """
    module = inspect.getmodule(cls)
    parser = _Parser(prog=f"python -m {module.__package__ if module else ''}", description=inspect.getdoc(cls))
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file of these options, by name")
    group, hints, meanings = parser.add_argument_group("recipe"), typing.get_type_hints(cls), _meanings(cls)
    for field in dataclasses.fields(cls):
        settings: dict[str, Any] = {"type": _reader(hints[field.name]), "metavar": _shape(hints[field.name])}
        if hints[field.name] is bool:
            settings = {"action": argparse.BooleanOptionalAction}
        meaning = " ".join(meanings.get(field.name, "").split()).replace("%", "%%")
        group.add_argument(_flag(field.name), default=field.default, help=meaning or None, **settings)
    Policy.add_arguments(parser)
    if policy_file is not None:
        parser.set_defaults(holdfast_policy=str(policy_file))
    first, _ = parser.parse_known_args(argv)
    if first.config is not None:
        parser.set_defaults(**_from_file(parser, Path(first.config), hints))
    found = parser.parse_args(argv)
    try:
        policy = Policy.from_arguments(found)
    except HoldfastError as error:
        parser.exit(2, f"{error}\n")
    return cls(**{field.name: getattr(found, field.name) for field in dataclasses.fields(cls)}), policy


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _meanings(cls: type) -> Mapping[str, str]:
    """Return the text under each field, those of the classes above it too."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if dataclasses.is_dataclass(each):
            found |= meanings_of(Path(inspect.getfile(each)), each.__name__)
    return found


def _from_file(parser: _Parser, path: Path, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a YAML file sets."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"--config {path} cannot be read: {error}")
    if not isinstance(given, dict):
        parser.error(f"--config {path} holds {type(given).__name__}; a mapping of options to values is needed")
    found = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            nearest = difflib.get_close_matches(name, hints, n=1, cutoff=0.0)[0]
            parser.error(f"{path}: {key!r} is not an option of this recipe; did you mean {nearest!r}?")
        try:
            found[name] = _reader(hints[name])("none" if value is None else str(value))
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(f"{path}: {key}: {value!r} cannot be used: {error}")
    return found


def _alternatives(hint: Any) -> list[Any]:
    """Return what a value may be: types, and the texts of a Literal."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [each for part in typing.get_args(hint) for each in _alternatives(part)]
    return list(typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else [hint]


def _shape(hint: Any) -> str:
    return "|".join(
        each if isinstance(each, str) else "none" if each is type(None) else each.__name__.upper()
        for each in _alternatives(hint)
    )


def _reader(hint: Any) -> Any:
    """Return what turns a text into a value of a type."""
    allowed = _alternatives(hint)

    def read(text: str) -> Any:
        for each in allowed:
            if each is type(None) and text.lower() in ("none", "null"):
                return None
            if isinstance(each, str) and text == each:
                return text
            if each is bool and text.lower() in ("true", "false"):
                return text.lower() == "true"
        for each in (each for each in allowed if each in (int, float, str, Path)):
            try:
                value = each(text)
            except ValueError:
                continue
            if each is float and not math.isfinite(value):
                _refuse(text, "it is not finite")
            return value
        return _refuse(text, f"one of {_shape(hint)} is needed")

    return read


def _refuse(text: str, why: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{text!r}: {why}")
