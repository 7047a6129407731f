"""What both recipes of speech set alike.

Options, clipping also by SpeechBrain's name for it, learning rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from holdfast import Policy
from recipes.options import Given, OptionError, RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions(RunOptions):
    """What both recipes of speech have."""

    spoken_by: Literal["voices", "espeak"] = "voices"
    """What speaks where no data are given.

    Voices, which this package makes, or espeak-ng, a program of its own.
    """

    speech_dir: Path | None = None
    """Folder for the speech that is made, which several runs may share. none: <run-dir>/speech."""

    clip_grad_norm: float | None = None
    """Another name of --max-grad-norm, as SpeechBrain's separation recipes have it: below 0 it is
    off. On the command line it is stronger than HOLDFAST_*, in a file of --config it is not. none
    leaves max_grad_norm to the policy."""

    def place_of_speech(self) -> Path:
        """Return the folder for the speech that is made."""
        return self.run_dir / "speech" if self.speech_dir is None else self.speech_dir

    def settle(self, given: Given) -> tuple[Self, Policy]:
        """Return the options, and the policy: that of a policy file, with ``clip_grad_norm``.

        Raises:
            OptionError: Two options say different things of the same.
            PolicyError: A value or a key cannot be used.
        """
        fields, clipping = dict(given.fields), dict[str, Any]()
        if self.clip_grad_norm is not None:
            limit = None if self.clip_grad_norm < 0 else self.clip_grad_norm
            clipping = {"max_grad_norm": limit, "clip_by": "global"}
        if "clip_grad_norm" in given.options:
            if clipping.keys() & fields.keys():
                raise OptionError(
                    "--clip-grad-norm and --max-grad-norm or --clip-by\nFix: leave the first out."
                )
            fields |= clipping
        policy = Policy.of(given.policy_file, **fields)
        stronger = {*fields, *given.stronger()}
        return self, policy.replace(
            **{name: value for name, value in clipping.items() if name not in stronger}
        )

    def check(self) -> None:
        """Look at each option by itself and beside the others.

        Raises:
            OptionError: One has a value that makes no training.
        """
        RunOptions.check(self)
        self.at_least(_LEAST)
        self.at_most(_MOST)
        self.above_zero("learning_rate")


# What both recipes have. Made voices have harmonics up to half of the sample rate, and a pitch of
# up to 250 Hz.
_LEAST = {
    "batch_size": 1,
    "eval_interval_steps": 1,
    "sample_rate": 1000,
    "speakers": 1,
    "sentences": 1,
    "words": 1,
}
_MOST = {"sample_rate": 384_000, "speakers": 10_000, "sentences": 10_000, "words": 1000}
_WARM_UP_SHARE = 0.1  # of the steps, in which the learning rate rises


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step of a run.

    Up, then down along half a cosine.
    """
    warm = max(1, round(_WARM_UP_SHARE * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))
