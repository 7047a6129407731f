"""Presets: the settings of published recipes, each value with the recipe that it comes from.

A preset is the weakest layer above the defaults: anything that you set yourself overrides it. It
contains only what the recipes specify. The fields are documented in ``policy``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from holdfast.core.errors import PolicyError, did_you_mean


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of a policy field, and the recipe, program or paper where it was published."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings of a domain, by field.

    A value may equal the default, if the recipes chose the same value.
    """

    name: str
    about: str
    settings: Mapping[str, Setting]


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by name.

    They are read from ``presets.json``, which maps each name to [about, {field: [value, source]}].
    """
    file = resources.files(__package__).joinpath("presets.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    presets_by_name = {}
    for name, (about, values) in content.items():
        settings = {field: Setting(value, source) for field, (value, source) in values.items()}
        presets_by_name[name] = Preset(name, about, settings)
    return presets_by_name


def find_preset(name: object, source: str = "") -> Preset:
    """Return a preset by its name.

    Args:
        name: The name; anything but the name of a preset is an error.
        source: Where the name came from, for the error.

    Raises:
        PolicyError: H110, naming the most similar preset.
    """
    if isinstance(name, str) and name in presets():
        return presets()[name]
    raise PolicyError(
        f"{name!r}{source} is not a preset",
        limit=f"the presets are {', '.join(presets())}",
        fix=did_you_mean(name, presets(), otherwise="use one of these."),
        rule="H110",
    )
