"""Presets: what they set, where they stand among the sources, and that each figure names its
source.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import PolicyError
from holdfast.core.policy.policy import Policy
from holdfast.core.policy.presets import find_preset, presets


def test_every_preset_is_a_policy_and_names_its_sources() -> None:
    """The values of a preset pass every check, and clip as published recipes do.

    Each figure has its source.
    """
    limits = {name: Policy.preset(name).max_grad_norm for name in presets()}
    assert limits == {
        "asr": 5.0,
        "speaker": 5.0,
        "tts": 1.0,
        "separation": 5.0,
        "language_model": 1.0,
        "gan": None,
        "classification": None,
    }
    for name, preset in presets().items():
        assert find_preset(name) is preset
        values = {field: setting.value for field, setting in preset.settings.items()}
        assert Policy.preset(name) == Policy(**values)
        assert preset.about
        assert all(setting.source for setting in preset.settings.values())


def test_adversarial_training_is_only_warned_of_spikes() -> None:
    """The loss of a player says nothing, so nothing is skipped or rolled back because of it."""
    policy = Policy.preset("gan")
    assert (policy.objective, policy.spike_action) == ("adversarial", "warn")


def test_the_strongest_name_of_a_preset_counts_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A name replaces a weaker one whole, so no value of the weaker preset remains, and none
    turns it off.
    """
    file = tmp_path / "policy.yaml"
    file.write_text("preset: gan\n")
    monkeypatch.setenv("HOLDFAST_PRESET", "tts")
    assert Policy() == Policy.from_yaml(file) == Policy.preset("tts")
    assert Policy.from_yaml(file).objective == "minimize"
    assert Policy.of(file, preset="asr").max_grad_norm == 5.0
    assert Policy.of(file, preset=None) == Policy.of(None, preset=None)
    assert Policy.of(None, preset=None).max_grad_norm is None


def test_a_preset_can_be_laid_over_a_finished_policy() -> None:
    """``replace`` and ``of`` change the fields that the preset names, and no other."""
    policy = Policy(keep_latest_k=7, max_grad_norm=9.0)
    assert Policy.preset("tts", max_grad_norm=None).max_grad_norm is None
    assert policy.replace(preset="tts") == Policy(keep_latest_k=7, max_grad_norm=1.0)
    assert Policy.of(policy, preset="tts", max_grad_norm=2.0) == Policy(
        keep_latest_k=7, max_grad_norm=2.0
    )


def test_an_unknown_preset_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name is an H110 from every source, with a proposal."""
    for name, nearest in (("tss", "tts"), ("ASR", "asr"), ("language-model", "language_model")):
        with pytest.raises(PolicyError, match=f"Fix: .*'{nearest}'") as caught:
            Policy.preset(name)
        assert caught.value.rule == "H110"
    monkeypatch.setenv("HOLDFAST_PRESET", "tss")
    with pytest.raises(PolicyError, match="H110"):
        Policy()
