"""What both recipes of speech set alike: options, the policy also as SpeechBrain's files have it, learning rates.

Does not: carry out SpeechBrain's hyperparameter files; of one only what a policy has a field for is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from holdfast import Policy
from holdfast.core.policy_sources import from_options, from_speechbrain
from recipes.asr.corpus import CorpusError
from recipes.options import RunOptions, read_options
from recipes.training import ending_clearly


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions(RunOptions):
    """What both recipes of speech have."""

    spoken_by: Literal["voices", "espeak"] = "voices"
    """What speaks where no data are given: voices, which this package makes, or espeak-ng, a program of its own."""

    speech_dir: Path | None = None
    """Folder for the speech that is made, which several runs may share. none: <run-dir>/speech."""

    hparams: Path | None = None
    """SpeechBrain hyperparameter file, in place of a policy file: its clipping, patience, precision and interval of
    checkpoints are taken over. No tag in it is carried out; HOLDFAST_* and options win over it."""

    clip_grad_norm: float | None = None
    """Largest gradient norm over all parameters, as SpeechBrain's separation recipes name it: below 0 it is off. It
    wins over every other source; none leaves max_grad_norm to the policy."""

    def place_of_speech(self) -> Path:
        """Return the folder for the speech that is made."""
        return self.run_dir / "speech" if self.speech_dir is None else self.speech_dir

    def check(self) -> None:
        """Look at each option by itself and beside the others.

        Raises:
            OptionError: One has a value that makes no training.
        """
        RunOptions.check(self)
        self.at_least(_LEAST)
        self.at_most(_MOST)
        self.above_zero("learning_rate")


# What both recipes have. Made voices have harmonics up to half of the sample rate, and a pitch of up to 250 Hz.
_LEAST = {
    "batch_size": 1, "eval_interval_steps": 1, "sample_rate": 1000, "speakers": 1, "sentences": 1, "words": 1,
}  # fmt: skip
_MOST = {"sample_rate": 384_000, "speakers": 10_000, "sentences": 10_000, "words": 1000}
_WARM_UP_SHARE = 0.1  # of the steps, in which the learning rate rises
_Options = TypeVar("_Options", bound=SpeechOptions)


def read_speech_options(
    cls: type[_Options], argv: Sequence[str] | None, *, policy_file: Path
) -> tuple[_Options, Policy]:
    """Return options and policy; what cannot be used ends the process with a message and exit code 2.

    Args:
        cls: Of the recipe's options.
        argv: Arguments; None: those of the process.
        policy_file: Of the recipe.
    """
    options, policy = read_options(cls, argv, policy_file=policy_file)
    with ending_clearly(CorpusError):
        if options.hparams is not None:
            policy = Policy.from_speechbrain(options.hparams, **_options_given(argv))
        if options.clip_grad_norm is not None:
            limit = from_speechbrain({"clip_grad_norm": options.clip_grad_norm})["max_grad_norm"]
            policy = policy.replace(max_grad_norm=limit, clip_by="global")
    return options, policy


def _options_given(argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields of the policy that stand on the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    Policy.add_arguments(parser)
    namespace, _ = parser.parse_known_args(argv)
    file, given = from_options(namespace, [field.name for field in dataclasses.fields(Policy)])
    if file is not None:
        print("--hparams and --policy both say where the policy is\nFix: leave one of them out.", file=sys.stderr)
        raise SystemExit(2)
    return given


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step of a run: up, then down along half a cosine."""
    warm = max(1, round(_WARM_UP_SHARE * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))
