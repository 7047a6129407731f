"""`holdfast presets` as a user calls it: all with their sources, one as YAML, JSON, and a misspelt name."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.core.policy.policy import Policy
from holdfast.core.policy.presets import presets

app = make_app()


def _call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["presets", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_all_presets_are_listed_with_their_sources() -> None:
    """The table names every preset, what it sets and who published it."""
    shown = _call()
    assert all(name in shown for name in presets())
    assert "max_grad_norm: 5.0" in shown
    assert "2005.14165" in shown


def test_a_preset_can_be_pasted_into_a_policy_file(tmp_path: Path) -> None:
    """The YAML of a preset, read as a file, is the policy of the preset, and each value has its source above it."""
    file = tmp_path / "policy.yaml"
    for name, preset in presets().items():
        file.write_text(_call(name))
        assert Policy.from_yaml(file) == Policy.preset(name)
        for setting in preset.settings.values():
            assert f"# {setting.source}\n" in file.read_text()


def test_presets_for_machines() -> None:
    """JSON holds value and source by field, of all presets or of one."""
    everything = json.loads(_call("--json"))
    assert [preset["name"] for preset in everything] == list(presets())
    one = json.loads(_call("tts", "--json"))
    assert one == everything[list(presets()).index("tts")]
    assert one["settings"]["max_grad_norm"]["value"] == 1.0


def test_a_misspelt_preset_is_exit_code_2() -> None:
    """An unknown name is an error that proposes the nearest one, also as JSON."""
    result = CliRunner().invoke(app, ["presets", "ts", "--json"])
    assert result.exit_code == 2
    error = json.loads(result.output)["error"]
    assert (error["rule"], error["fix"]) == ("H110", "did you mean 'tts'?")
