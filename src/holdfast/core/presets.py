"""Presets: what published recipes of a domain set, each figure with the recipe that it comes from.

A preset is the weakest layer above the defaults; anything that you give yourself wins over it. Only what a recipe
decides is in here. What a field means is said in ``policy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import PolicyError, did_you_mean

_SPEECHBRAIN = "SpeechBrain, run_opts of Brain: max_grad_norm defaults to 5.0, and its {} recipes keep it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value of a policy field, and where it was published.

    Args:
        value: Of the field.
        source: Recipe, program or paper.
    """

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The settings of a domain.

    Args:
        name: Such as ``"tts"``.
        about: The domain, in words.
        settings: By field; a value that equals the default is there because the recipes chose it too.
    """

    name: str
    about: str
    settings: Mapping[str, Setting]

    def values(self) -> dict[str, Any]:
        """Return the values by field, as `Policy` takes them."""
        return {field: setting.value for field, setting in self.settings.items()}


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="asr",
            about="speech recognition",
            settings={"max_grad_norm": Setting(value=5.0, source=_SPEECHBRAIN.format("ASR"))},
        ),
        Preset(
            name="speaker",
            about="speaker recognition and verification",
            settings={"max_grad_norm": Setting(value=5.0, source=_SPEECHBRAIN.format("VoxCeleb SpeakerRec"))},
        ),
        Preset(
            name="tts",
            about="text to speech with an acoustic model: Tacotron 2, FastSpeech 2",
            settings={
                "max_grad_norm": Setting(
                    value=1.0,
                    source="SpeechBrain, recipes/LJSpeech/TTS: --max_grad_norm=1.0 for Tacotron 2 in README.md, "
                    "max_grad_norm: 1.0 in fastspeech2/hparams/train.yaml",
                ),
            },
        ),
        Preset(
            name="separation",
            about="speech separation, such as SepFormer",
            settings={
                "max_grad_norm": Setting(
                    value=5.0,
                    source="SpeechBrain, recipes/WSJ0Mix/separation/hparams/sepformer.yaml: clip_grad_norm: 5; "
                    "a negative value turns it off there, which is null here",
                ),
            },
        ),
        Preset(
            name="language_model",
            about="language models of the GPT kind",
            settings={
                "max_grad_norm": Setting(
                    value=1.0,
                    source="GPT-3 (arXiv 2005.14165, appendix B): global norm clipped at 1.0; nanoGPT: grad_clip 1.0",
                ),
            },
        ),
        Preset(
            name="gan",
            about="adversarial training: the level of a loss means nothing",
            settings={
                "objective": Setting(value="adversarial", source="each loss is measured against the other player"),
                "spike_action": Setting(
                    value="warn", source="a player that wins raises the other's loss: that is no reason to go back"
                ),
                "max_grad_norm": Setting(
                    value=None, source="DCGAN (arXiv 1511.06434; pytorch/examples): no clipping"
                ),
            },
        ),
        Preset(
            name="classification",
            about="image classification with SGD",
            settings={
                "max_grad_norm": Setting(
                    value=None, source="torchvision, references/classification/train.py: --clip-grad-norm is None"
                ),
            },
        ),
    )
}


def find_preset(name: object) -> Preset:
    """Return a preset by its name.

    Raises:
        PolicyError: H110, naming the nearest one.
    """
    found = PRESETS.get(name) if isinstance(name, str) else None
    if found is None:
        raise PolicyError(
            f"{name!r} is not a preset",
            limit=f"the presets are {', '.join(PRESETS)}",
            fix=did_you_mean(name, PRESETS, otherwise="take one of these."),
            rule="H110",
        )
    return found
