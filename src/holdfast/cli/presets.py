"""`holdfast presets [NAME]`: what each preset sets and where it was published, or one as YAML to paste."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from holdfast.cli.output import Json, console, failing_clearly, print_json
from holdfast.core.policy.presets import Preset, find_preset, presets


def run(
    name: Annotated[str | None, typer.Argument(help="Preset to print as YAML, such as tts; none lists all.")] = None,
    as_json: Json = False,
) -> None:
    """List the presets with the source of each figure, or print one as YAML for a policy file."""
    with failing_clearly(as_json=as_json):
        found = list(presets().values()) if name is None else [find_preset(name)]
    if as_json:
        print_json([_describe(preset) for preset in found] if name is None else _describe(found[0]))
    elif name is None:
        table = Table("preset", "for", "sets", "source")
        for preset in found:
            for number, (field, setting) in enumerate(preset.settings.items()):
                first = (preset.name, preset.about) if number == 0 else ("", "")
                table.add_row(*first, f"{field}: {_as_yaml(setting.value)}", setting.source)
        console().print(table)
    else:
        typer.echo(_as_file(found[0]))


def _describe(preset: Preset) -> dict[str, object]:
    settings = {
        field: {"value": setting.value, "source": setting.source} for field, setting in preset.settings.items()
    }
    return {"name": preset.name, "about": preset.about, "settings": settings}


def _as_file(preset: Preset) -> str:
    lines = [f"# {preset.about}; the same as `preset: {preset.name}`"]
    for field, setting in preset.settings.items():
        lines += [f"# {setting.source}", f"{field}: {_as_yaml(setting.value)}"]
    return "\n".join(lines)


def _as_yaml(value: object) -> str:
    return json.dumps(value)  # numbers, null and quoted text are the same in YAML
