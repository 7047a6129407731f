"""Presets: the settings of published recipes, with the source of each value.

A preset overrides only the defaults: every value that you set yourself overrides the preset. A
preset contains only the values that the recipes specify. For the meaning of the fields, see
``policy``.
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
    """The value of a policy field, and the recipe, program or paper that published it."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings for one domain, such as text to speech.

    Args:
        name: The name by which users select the preset.
        about: A description of the domain.
        settings: The settings by policy field. A value may be the same as the default, if the
            recipes use that value.
    """

    name: str
    about: str
    settings: Mapping[str, Setting]


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by name.

    The file ``presets.json`` maps each name to [about, {field: [value, source]}].
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
        name: The name of a preset. Any other value, including one of another type, is an error.
        source: Where the name came from, to append to the name in the error message.

    Raises:
        PolicyError: H110 for an unknown name. The message suggests the most similar preset.
    """
    if isinstance(name, str) and name in presets():
        return presets()[name]
    raise PolicyError(
        f"{name!r}{source} is not a preset",
        limit=f"the presets are {', '.join(presets())}",
        fix=did_you_mean(name, presets(), otherwise="use one of these."),
        rule="H110",
    )
