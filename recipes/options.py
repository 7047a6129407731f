"""Options of a recipe.

The fields of a dataclass, on the command line and in a YAML file, beside holdfast's policy.

Strongest first: an option of the command line, the file of ``--config``, the default of the field.
Those of the policy are read by `holdfast.Policy`: an option, ``HOLDFAST_*``, the file of
``--policy``, which is the recipe's own ``policy.yaml`` unless another is given. What a recipe's own
options mean for the policy has the strength of the place where they stand: `RunOptions.settle`.

Values that make no training are refused here, before data are made or a run directory:
`RunOptions.check`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import inspect
import math
import time
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import yaml

from holdfast import HoldfastError, Policy
from holdfast.core.policy.sources import from_environment, from_options, meanings_of
from holdfast.loader.quarantine import QuarantineLedger

_Options = TypeVar("_Options", bound="RunOptions")
_OF_THE_POLICY = {*(field.name for field in dataclasses.fields(Policy)), "preset"}
_MOST = 2**63  # that torch and numpy take
_MOST_WORKERS = 1024  # more would take a machine down


class OptionError(ValueError):
    """An option whose value makes no training: which, what is needed, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What stands on the command line, and the file that lies below it.

    Args:
        options: Names of the recipe's own options.
        fields: Fields of the policy, with their values.
        policy_file: Of the policy: that of ``--policy``, else the recipe's.
    """

    options: frozenset[str]
    fields: Mapping[str, Any]
    policy_file: str | None

    def stronger(self) -> set[str]:
        """Return the fields of the policy that the command line or a variable sets.

        No file may change them.
        """
        return {*self.fields, *variables()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What every recipe has."""

    run_dir: Path = Path("runs/recipe")
    """Directory of the run: checkpoints, records, report.html and result.json."""

    resume: bool = False
    """Insist on a checkpoint in the run directory to go on from. Without it a run goes on if there
    is one, and begins if there is none."""

    max_steps: int = 1000
    """Optimizer steps, counted over all restarts of the run."""

    seed: int = 0
    """Of weights, order, augmentation and dropout."""

    device: str = "auto"
    """Where to train: cuda, cuda:1, cpu, or auto, which is the first GPU if there is one."""

    num_workers: int = 0
    """Processes that load samples beside the training."""

    def check(self) -> None:
        """Look at each option by itself and beside the others; `read_options` does.

        A recipe's own begins with ``RunOptions.check(self)``: super() does not know the class that
        slots=True makes.

        Raises:
            OptionError: One has a value that makes no training.
        """
        self.at_least({"max_steps": 0, "num_workers": 0, "seed": 0})
        self.at_most({"num_workers": _MOST_WORKERS})
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            self.insist(
                field.name,
                not isinstance(value, int) or value < _MOST,
                f"a number below {_MOST} is needed",
            )
        is_folder = self.run_dir.is_dir() or not self.run_dir.exists()
        self.insist("run_dir", is_folder, "a directory is needed, and that is a file")

    def settle(self, given: Given) -> tuple[Self, Policy]:
        """Return the options as they count, and the policy.

        Args:
            given: Where they come from.

        Raises:
            OptionError: Two of them say different things at the same place.
            PolicyError: A value of the policy cannot be used.
        """
        return self, Policy.of(given.policy_file, **given.fields)

    def at_least(self, limits: Mapping[str, float]) -> None:
        """Insist that options are not below their limits, by name; None is left to the recipe."""
        for name, limit in limits.items():
            value = getattr(self, name)
            self.insist(name, value is None or value >= limit, f"at least {limit} is needed")

    def at_most(self, limits: Mapping[str, float]) -> None:
        """Insist that options are not above their limits, by name; None is left to the recipe."""
        for name, limit in limits.items():
            value = getattr(self, name)
            self.insist(name, value is None or value <= limit, f"at most {limit} is possible")

    def above_zero(self, *names: str) -> None:
        """Insist that options are more than 0."""
        for name in names:
            self.insist(name, getattr(self, name) > 0, "a number above 0 is needed")

    def insist(self, name: str, kept: bool, needed: str) -> None:  # noqa: FBT001 - reads as a sentence
        """Refuse the value of an option unless a condition is kept.

        Args:
            name: Of the field.
            kept: The condition.
            needed: What it asks for, as the rest of a sentence.

        Raises:
            OptionError: It is not kept.
        """
        if not kept:
            usual = next(field.default for field in dataclasses.fields(self) if field.name == name)
            raise OptionError(
                f"{_flag(name)} {getattr(self, name)}; {needed}\n"
                f"Fix: pass another value, or leave it out: {usual} is the default."
            )


class _Parser(argparse.ArgumentParser):
    """Names the nearest option where one is misspelt, and may take its time to list all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **settings
        )

    # Its own overloads say no more
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            self.error(
                f"{unknown[0]!r} is not an option{_meant(unknown[0].partition('=')[0], known)}"
            )
        return found

    def error(self, message: str) -> NoReturn:
        """End the process with what is wrong, without all options before it."""
        self.exit(2, f"{self.prog}: {message}\nRun with --help for all options.\n")


def _meant(name: str, known: Iterable[str]) -> str:
    """Return a question after the name that is most like another one; nothing if none is alike."""
    bare = {each.lstrip("-"): each for each in known}
    alike = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    return f"; did you mean {bare[alike[0]]!r}?" if alike else ""


def insist_on_a_batch(batch_size: int, there: int, what: str) -> None:
    """Refuse a batch that is larger than all that there is to learn.

    Args:
        batch_size: Of the option.
        there: Samples to learn.
        what: They are.

    Raises:
        OptionError: It is larger.
    """
    if there < batch_size:
        raise OptionError(
            f"--batch-size {batch_size}; there are {there} {what} to learn\n"
            f"Fix: pass {there} or less, or give more to learn."
        )


def insist_on_usable(troubles: Sequence[str], samples: int, quarantine: float) -> None:
    """Refuse data of which more is known to be unusable than may be quarantined, before there is a
    run.

    Args:
        troubles: Why, of each sample that cannot be used.
        samples: All that there are.
        quarantine: What may be quarantined, as `holdfast.DataLoader` takes it.

    Raises:
        OptionError: There are too many.
    """
    allowed = most_quarantined(quarantine, samples)
    if len(troubles) > allowed:
        first, _, fix = troubles[0].partition("\nFix: ")
        raise OptionError(
            f"{len(troubles)} of {samples} samples cannot be used, such as: {first}\nLimit:"
            f" --quarantine {quarantine:g} sets {allowed} of these aside.\nFix:"
            f" {fix or 'repair them or leave them out.'} Or raise --quarantine, if you can do"
            " without them."
        )


def insist_on_installed(*packages: str) -> None:
    """Insist now, and not when they are needed, that packages can be imported.

    Raises:
        OptionError: One is not installed.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"{', '.join(missing)}: not installed.\nFix: pip install {' '.join(missing)}"
        )


def most_quarantined(quarantine: float, samples: int) -> int:
    """Return how many of so many samples `holdfast.DataLoader` quarantines at most."""
    return QuarantineLedger(quarantine, samples, time.time).limit


def read_options(
    cls: type[_Options], argv: Sequence[str] | None = None, *, policy_file: Path | None = None
) -> tuple[_Options, Policy]:
    """Return a recipe's options and its policy.

    What cannot be used ends the process with a message and exit code 2.

    Args:
        cls: Dataclass of the options, a text under each field being its help. Fields are int,
            float, str, bool, Path, a Literal, or one of these or None.
        argv: Arguments; None: those of the process.
        policy_file: Policy of the recipe.
    """
    module = inspect.getmodule(cls)
    parser = _Parser(
        prog=f"python -m {module.__package__ if module else ''}", description=inspect.getdoc(cls)
    )
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="YAML file of these options, by name"
    )
    group, hints, meanings = (
        parser.add_argument_group("recipe"),
        typing.get_type_hints(cls),
        _meanings(cls),
    )
    for field in dataclasses.fields(cls):
        settings: dict[str, Any] = {
            "type": _reader(hints[field.name]),
            "metavar": _shape(hints[field.name]),
        }
        if hints[field.name] is bool:
            settings = {"action": argparse.BooleanOptionalAction}
        meaning = " ".join(meanings.get(field.name, "").split()).replace("%", "%%")
        group.add_argument(
            _flag(field.name), default=field.default, help=meaning or None, **settings
        )
    Policy.add_arguments(parser)
    if policy_file is not None:
        parser.set_defaults(holdfast_policy=str(policy_file))
    first, _ = parser.parse_known_args(argv)
    if first.config is not None:
        parser.set_defaults(**_from_file(parser, Path(first.config), hints))
    found = parser.parse_args(argv)
    options = cls(**{field.name: getattr(found, field.name) for field in dataclasses.fields(cls)})
    try:
        options, policy = options.settle(_given(parser, argv, found, hints))
        options.check()
    except (HoldfastError, OptionError) as error:
        parser.exit(2, f"{error}\n")
    if options.resume and not options.run_dir.is_dir():  # before data are made there
        parser.exit(2, nothing_to_resume(options.run_dir))
    return options, policy


def _given(
    parser: _Parser, argv: Sequence[str] | None, found: argparse.Namespace, hints: Mapping[str, Any]
) -> Given:
    nothing = object()
    names = [*hints, *(action.dest for action in parser._actions if action.dest != "help")]
    told = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names, nothing)))
    at_the_line = {name for name in names if getattr(told, name) is not nothing}
    policy_file, fields = from_options(found, _OF_THE_POLICY - {"preset"})
    return Given(
        options=frozenset(at_the_line.intersection(hints)),
        fields=fields,
        policy_file=policy_file,
    )


def variables() -> Mapping[str, Any]:
    """Return the fields of the policy that ``HOLDFAST_*`` variables set, with what they say."""
    return from_environment()


def nothing_to_resume(run_dir: Path) -> str:
    """Return what is said where ``--resume`` finds no checkpoint."""
    return (
        f"--resume: {run_dir} holds no checkpoint to go on from.\n"
        "Fix: name the directory of the earlier run with --run-dir, or leave --resume out.\n"
    )


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
        parser.error(
            f"--config {path} holds {type(given).__name__}; a mapping of options to values is"
            " needed"
        )
    found = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in hints and name in _OF_THE_POLICY:
            how = f"write it into a file for --policy, or pass {_flag(name)}"
            parser.error(f"{path}: {key!r} is a value of the policy: {how}")
        if name not in hints:
            parser.error(f"{path}: {key!r} is not an option of this recipe{_meant(name, hints)}")
        try:
            found[name] = _of_yaml(value, hints[name])
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(f"{path}: {key}: {value!r} cannot be used: {error}")
    return found


def _of_yaml(value: Any, hint: Any) -> Any:
    """Return what a value of a YAML file means.

    Yes, no, on and off are truth values there, which are no texts.
    """
    allowed, kind = _alternatives(hint), type(value)
    if kind in (list, dict) or (kind in (bool, type(None)) and kind not in allowed):
        _refuse(
            str(value),
            f"one of {_shape(hint)} is needed; a text that YAML reads otherwise goes into quotes",
        )
    return _reader(hint)("none" if value is None else str(value))


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
            # The shell does this where it reads the option, and a YAML file has none
            if each is Path:
                value = value.expanduser() if text else _refuse(text, "a path is needed")
            return value
        return _refuse(text, f"one of {_shape(hint)} is needed")

    return read


def _refuse(text: str, why: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{text!r}: {why}")
