"""Presets: what published recipes of a domain set, each figure with the recipe that it comes from.

A preset is the weakest layer above the defaults; anything that you give yourself wins over it. Only what a recipe
decides is in here. What a field means is said in ``policy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.core.errors import PolicyError, did_you_mean


class Setting(NamedTuple):
    """A value of a policy field, and the recipe, program or paper where it was published."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The settings of a domain, by field; a value may equal the default, since the recipes chose it too."""

    name: str
    about: str
    settings: Mapping[str, Setting]

    def values(self) -> dict[str, Any]:
        """Return the values by field, as `Policy` takes them."""
        return {field: setting.value for field, setting in self.settings.items()}


_SPEECHBRAIN = "SpeechBrain, run_opts of Brain: max_grad_norm defaults to 5.0, and its {} recipes keep it"
_TTS = (
    "SpeechBrain, recipes/LJSpeech/TTS: --max_grad_norm=1.0 for Tacotron 2 in README.md, "
    "max_grad_norm: 1.0 in fastspeech2/hparams/train.yaml"
)
_SEPARATION = (
    "SpeechBrain, recipes/WSJ0Mix/separation/hparams/sepformer.yaml: clip_grad_norm: 5; "
    "a negative value turns it off there, which is null here"
)
_GPT = "GPT-3 (arXiv 2005.14165, appendix B): global norm clipped at 1.0; nanoGPT: grad_clip 1.0"
_DCGAN = "DCGAN (arXiv 1511.06434; pytorch/examples): no clipping"
_TORCHVISION = "torchvision, references/classification/train.py: --clip-grad-norm is None"

_ALL: dict[str, tuple[str, dict[str, Setting]]] = {
    "asr": ("speech recognition", {"max_grad_norm": Setting(5.0, _SPEECHBRAIN.format("ASR"))}),
    "speaker": (
        "speaker recognition and verification",
        {"max_grad_norm": Setting(5.0, _SPEECHBRAIN.format("VoxCeleb SpeakerRec"))},
    ),
    "tts": (
        "text to speech with an acoustic model: Tacotron 2, FastSpeech 2",
        {"max_grad_norm": Setting(1.0, _TTS)},
    ),
    "separation": ("speech separation, such as SepFormer", {"max_grad_norm": Setting(5.0, _SEPARATION)}),
    "language_model": ("language models of the GPT kind", {"max_grad_norm": Setting(1.0, _GPT)}),
    "gan": (
        "adversarial training: the level of a loss means nothing",
        {
            "objective": Setting("adversarial", "each loss is measured against the other player"),
            "spike_action": Setting(
                "warn", "a player that wins raises the other's loss: that is no reason to go back"
            ),
            "max_grad_norm": Setting(None, _DCGAN),
        },
    ),
    "classification": ("image classification with SGD", {"max_grad_norm": Setting(None, _TORCHVISION)}),
}
PRESETS: Mapping[str, Preset] = {
    name: Preset(name=name, about=about, settings=settings) for name, (about, settings) in _ALL.items()
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
