"""Trains the recogniser.

``python -m recipes.asr``, with speech that it makes, or ``--data`` of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast import DataLoader, Guard, Policy
from holdfast.loader.order.orders import LengthBucketed
from recipes.asr.corpus import CorpusError, Utterance, hold_out, insist_on_recordings, read_corpus
from recipes.asr.data import Sound, Speech, collate
from recipes.asr.model import Recogniser, ctc
from recipes.asr.scoring import evaluate, picture
from recipes.asr.settings import SpeechOptions, learning_rate_factor
from recipes.asr.speech import Plan, make_corpus
from recipes.options import insist_on_a_batch, insist_on_installed, read_options
from recipes.training import (
    Training,
    ending_clearly,
    find_device,
    fused_on,
    making_the_model,
    open_guard,
)

_MOST_MELS = 256  # that a picture of a run has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SpeechOptions):
    """Train a recogniser of characters by CTC, on speech that is made here or on a corpus of
    yours.
    """

    run_dir: Path = Path("runs/asr")
    """Directory of the run.

    Checkpoints, records, report.html and result.json, and the speech that is made.
    """

    max_steps: int = 600
    """Optimizer steps, counted over all restarts of the run."""

    data: Path | None = None
    """Corpus to learn: a folder as LibriSpeech's or LJSpeech's with WAV or FLAC files, or a CSV
    file as SpeechBrain's (ID, duration, wav, wrd). none: speech is made."""

    held_out: Path | None = None
    """Corpus to test with, in the same forms. none: each 20th utterance of --data."""

    sample_rate: int = 16000
    """Of all recordings, Hz."""

    batch_size: int = 16
    """Utterances in a batch; they are of about the same length."""

    learning_rate: float = 2e-3
    """Highest rate of AdamW; it rises over the first tenth of the steps and falls to 0."""

    n_mels: int = 40
    """Bands of the features."""

    channels: int = 128
    """Of all layers; even."""

    blocks: int = 2
    """Recurrent layers, in both directions."""

    dropout: float = 0.1
    """Behind each recurrent layer."""

    augment: bool = True
    """Whether speed, noise and masks are drawn anew for each sample in each epoch."""

    quarantine: float = 0.01
    """Most samples that may be quarantined because they cannot be read.

    A share below 1, or a number.
    """

    eval_interval_steps: int = 100
    """Steps between tests on what is held out."""

    speakers: int = 40
    """Voices of the speech that is made."""

    sentences: int = 12
    """Of each voice."""

    words: int = 4
    """In a made sentence, at most."""

    def check(self) -> None:
        """Look at each option by itself and beside the others.

        Raises:
            OptionError: One has a value that makes no training.
        """
        SpeechOptions.check(self)
        self.at_least({"n_mels": 1, "channels": 2, "blocks": 0})
        self.insist(
            "channels",
            self.channels % 2 == 0,
            "an even number is needed: half of them for each direction",
        )
        self.insist("dropout", 0 <= self.dropout < 1, "a share from 0 to below 1 is needed")
        most = min(_MOST_MELS, Sound(sample_rate=self.sample_rate, n_mels=1).settings().n_fft // 2)
        self.insist(
            "n_mels", self.n_mels <= most, f"at {self.sample_rate} Hz there are at most {most}"
        )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, and return what ``result.json`` holds."""
    options, policy = read_options(
        Options, argv, policy_file=Path(__file__).with_name("policy.yaml")
    )
    device = find_device(options)
    with ending_clearly(CorpusError):
        insist_on_installed("torchmetrics", "transformers")
        training_set, held_out = _corpora(options)
        loader = _loader(training_set, options, device, training=True)
        test = _loader(held_out, options, device, training=False)
    with ending_clearly(CorpusError, options.run_dir):
        return _train(options, policy, device, loader, test)


def _train(
    options: Options, policy: Policy, device: torch.device, loader: DataLoader, held_out: DataLoader
) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    with making_the_model():
        model = Recogniser(
            n_mels=options.n_mels,
            channels=options.channels,
            blocks=options.blocks,
            dropout=options.dropout,
        ).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=0.01, fused=fused_on(device)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.max_steps)
    )
    guard = open_guard(
        options, policy, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    test = _Test(guard, model, held_out)
    training = Training(guard, options)
    with guard:
        for batch in training.batches():
            result = guard.step(batch, lambda batch: ctc(model, batch))
            training.show(loss=result.loss, **test.shown)
            if (
                guard.global_step % options.eval_interval_steps == 0
                or guard.global_step == options.max_steps
            ):
                test.run()
        figures = test.found or test.run()
    return training.finish(model, figures)


class _Test:
    """The test on what is held out, and what it found last."""

    def __init__(self, guard: Guard, model: Recogniser, loader: DataLoader) -> None:
        self._guard = guard
        self._model = model
        self._loader = loader
        self.found: dict[str, Any] = {}
        self.shown: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """Test, tell the guard, and return the figures."""
        with self._guard.evaluate():
            self.found = evaluate(self._model, self._loader)
            seen = next(iter(self._loader))
            scores, frames = self._model(seen["features"][:1], seen["frames"][:1])
        self._guard.validated(self.found["held_out_loss"])
        rates = {"CER": self.found["character_error_rate"], "WER": self.found["word_error_rate"]}
        self._guard.log(rates, split="held out")
        self._guard.add_image("hearing", picture(seen["features"][0], scores[0, : int(frames[0])]))
        self.shown = {"held-out CER": self.found["character_error_rate"]}
        return self.found


def _corpora(options: Options) -> tuple[list[Utterance], list[Utterance]]:
    """Return what is learnt and what is held out."""
    if options.data is not None:
        found = read_corpus(options.data)
        both = (
            hold_out(found) if options.held_out is None else (found, read_corpus(options.held_out))
        )
        for part in both:
            insist_on_recordings(
                [(each.path,) for each in part], options.sample_rate, options.quarantine
            )
        insist_on_a_batch(options.batch_size, len(both[0]), "utterances")
        return both
    if options.held_out is not None:
        raise CorpusError("--held-out without --data\nFix: name both, or neither.")
    insist_on_a_batch(options.batch_size, options.speakers * options.sentences, "utterances")
    plans = (
        Plan(
            speakers=options.speakers if not held_out else max(1, options.speakers // 3),
            sentences=options.sentences if not held_out else max(1, options.sentences // 2),
            words=options.words,
            sample_rate=options.sample_rate,
            seed=options.seed,
            held_out=held_out,
            spoken_by=options.spoken_by,
        )
        for held_out in (False, True)
    )
    training, held_out = (
        read_corpus(make_corpus(plan, options.place_of_speech())) for plan in plans
    )
    return training, held_out


def _loader(
    utterances: list[Utterance], options: Options, device: torch.device, *, training: bool
) -> DataLoader:
    """Return a loader of batches of about equal lengths.

    At random, or to test the longest first, always the same.
    """
    sound, sampler = Sound(sample_rate=options.sample_rate, n_mels=options.n_mels), None
    if training:
        sampler = LengthBucketed(np.array([each.size() for each in utterances]))
    else:
        utterances = sorted(utterances, key=Utterance.size, reverse=True)
    return DataLoader(
        Speech(utterances, sound, augment=training and options.augment),
        sampler=sampler,
        batch_size=options.batch_size,
        collate_fn=collate,
        num_workers=options.num_workers if training else 0,
        seed=options.seed,
        quarantine=options.quarantine,
        device=None if device.type == "cpu" else device,
    )
