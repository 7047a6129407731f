"""Presets: what published recipes of a domain set, each figure with the recipe that it comes from.

A preset is the weakest layer above the defaults; anything that you give yourself wins over it. Only
what a recipe decides is in here. What a field means is said in ``policy``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from holdfast.core.errors import PolicyError, did_you_mean


class Setting(NamedTuple):
    """A value of a policy field, and the recipe, program or paper where it was published."""

    value: Any
    source: str


class Preset(NamedTuple):
    """The settings of a domain, by field.

    A value may equal the default, since the recipes chose it too.
    """

    name: str
    about: str
    settings: Mapping[str, Setting]

    def values(self) -> dict[str, Any]:
        """Return the values by field, as `Policy` takes them."""
        return {field: setting.value for field, setting in self.settings.items()}


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by name, from ``presets.json``: ``name: [about, {field.

    [value, source]}]``.
    """
    found = json.loads(
        resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    )
    return {
        name: Preset(name, about, {field: Setting(*each) for field, each in settings.items()})
        for name, (about, settings) in found.items()
    }


def find_preset(name: object, source: str = "") -> Preset:
    """Return a preset by its name; H110 names the nearest one, and the source of the name."""
    found = presets().get(name) if isinstance(name, str) else None
    if found is None:
        raise PolicyError(
            f"{name!r}{source} is not a preset",
            limit=f"the presets are {', '.join(presets())}",
            fix=did_you_mean(name, presets(), otherwise="take one of these."),
            rule="H110",
        )
    return found
