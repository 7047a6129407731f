"""Trains the separator.

``python -m recipes.separation``, with voices that it makes, or with data of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast import DataLoader, Guard, Policy
from recipes.asr.corpus import CorpusError, insist_on_recordings
from recipes.asr.settings import SpeechOptions, learning_rate_factor
from recipes.asr.speech import Plan, make_corpus
from recipes.options import insist_on_a_batch, insist_on_installed, read_options
from recipes.separation.data import CutMixtures, MixedOnTheFly
from recipes.separation.mixtures import make_mixtures, read_mixtures, read_speakers
from recipes.separation.model import ConvTasNet
from recipes.separation.scoring import evaluate, picture, write_example
from recipes.separation.si_snr import separation_loss
from recipes.training import (
    Training,
    ending_clearly,
    find_device,
    fused_on,
    making_the_model,
    open_guard,
)

_LEARNT = "recordings or mixtures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SpeechOptions):
    """Train a Conv-TasNet to separate two voices, made here, mixed of your recordings, or mixed
    on your disk.
    """

    run_dir: Path = Path("runs/separation")
    """Directory of the run.

    Checkpoints, records, report.html, result.json, examples, and the speech that is made.
    """

    max_steps: int = 500
    """Optimizer steps, counted over all restarts of the run."""

    data: Path | None = None
    """Mixtures to learn.

    A folder as WSJ0-2mix's or LibriMix's (mix, s1, s2), or a CSV file as SpeechBrain's (ID,
    duration, mix_wav, s1_wav, s2_wav).
    """

    speakers_dir: Path | None = None
    """Recordings to mix on the fly instead.

    A folder with one folder of WAV or FLAC files for each speaker, as
    LibriSpeech's. none, and no --data: voices are made and mixed.
    """

    held_out: Path | None = None
    """Mixtures to test with, in the forms of --data; needed with data of yours."""

    sample_rate: int = 8000
    """Of all recordings, Hz."""

    seconds: float = 1.0
    """Length of what is learnt at a time."""

    batch_size: int = 8
    """Mixtures in a batch."""

    learning_rate: float = 5e-3
    """Highest rate of Adam; it rises over the first tenth of the steps and falls to 0."""

    threshold: float | None = -30.0
    """Gate of SpeechBrain's recipes.

    Mixtures that are separated better than this, a loss in dB, are not learnt from.
    none: all are.
    """

    filters: int = 64
    """N of the paper, which has 512."""

    length: int = 16
    """L: samples of a filter; even. The paper has 16."""

    bottleneck: int = 48
    """B; the paper has 128."""

    hidden: int = 96
    """H; the paper has 512."""

    blocks: int = 6
    """X; the paper has 8."""

    repeats: int = 2
    """R; the paper has 3."""

    quarantine: float = 0.01
    """Most samples that may be quarantined because they cannot be read.

    A share below 1, or a number.
    """

    eval_interval_steps: int = 100
    """Steps between tests on what is held out."""

    speakers: int = 24
    """Voices that are made."""

    sentences: int = 20
    """Of each made voice."""

    words: int = 4
    """In a made sentence, at most."""

    def check(self) -> None:
        """Look at each option by itself and beside the others.

        Raises:
            OptionError: One has a value that makes no training.
        """
        SpeechOptions.check(self)
        self.at_least(
            dict.fromkeys(("filters", "bottleneck", "hidden", "blocks", "repeats"), 1)
            | {
                "length": 2,
                "speakers": 2,
            }
        )
        self.at_most({"seconds": 600})
        self.insist(
            "length", self.length % 2 == 0, "an even number is needed: filters overlap by half"
        )
        shortest = self.length / self.sample_rate
        self.insist(
            "seconds",
            self.seconds >= shortest,
            f"at least {shortest:g} are needed, the length of a filter",
        )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, and return what ``result.json`` holds."""
    options, policy = read_options(
        Options, argv, policy_file=Path(__file__).with_name("policy.yaml")
    )
    device = find_device(options)
    with ending_clearly(CorpusError):
        insist_on_installed("torchmetrics")
        loader, held_out = _loaders(options, device)
    with ending_clearly(CorpusError, options.run_dir):
        return _train(options, policy, device, loader, held_out)


def _loaders(options: Options, device: torch.device) -> tuple[DataLoader, DataLoader]:
    """Return what is learnt, and what is held out, one at a time."""
    training_set, held_out = _data(options)
    insist_on_a_batch(options.batch_size, len(training_set), _LEARNT)
    to_device = None if device.type == "cpu" else device
    loader = DataLoader(
        training_set,
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.num_workers,
        seed=options.seed,
        quarantine=options.quarantine,
        device=to_device,
    )
    return loader, DataLoader(
        held_out, batch_size=1, quarantine=options.quarantine, device=to_device
    )


def _train(
    options: Options, policy: Policy, device: torch.device, loader: DataLoader, held_out: DataLoader
) -> dict[str, Any]:
    import torchmetrics.functional.audio  # noqa: F401 - takes seconds: not in the first step

    torch.manual_seed(options.seed)
    with making_the_model():
        model = ConvTasNet(
            filters=options.filters,
            length=options.length,
            bottleneck=options.bottleneck,
            hidden=options.hidden,
            blocks=options.blocks,
            repeats=options.repeats,
        ).to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=options.learning_rate, fused=fused_on(device)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.max_steps)
    )
    guard = open_guard(
        options, policy, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    test = _Test(guard, model, held_out, options)
    training = Training(guard, options)
    with guard:
        for batch in training.batches():
            result = guard.step(
                batch, lambda batch: separation_loss(model, batch, options.threshold)
            )
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

    def __init__(
        self, guard: Guard, model: ConvTasNet, loader: DataLoader, options: Options
    ) -> None:
        self._guard = guard
        self._model = model
        self._options = options
        self._loader = loader
        self.found: dict[str, Any] = {}
        self.shown: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """Test, tell the guard, keep an example, and return the figures."""
        with self._guard.evaluate():
            self.found, example = evaluate(self._model, self._loader)
        self._guard.validated(-self.found["si_snr_db"])
        self._guard.log(
            {"SI-SNR gained, dB": self.found["si_snr_improvement_db"]}, split="held out"
        )
        self._guard.add_image("separated", picture(example))
        write_example(example, Path(self._options.run_dir) / "examples", self._options.sample_rate)
        self.shown = {"held-out SI-SNR gained, dB": self.found["si_snr_improvement_db"]}
        return self.found


def _data(options: Options) -> tuple[MixedOnTheFly | CutMixtures, CutMixtures]:
    """Return what is learnt and what is held out."""
    rate, samples = options.sample_rate, round(options.seconds * options.sample_rate)
    if options.data is None and options.speakers_dir is None:
        if options.held_out is not None:
            raise CorpusError(
                "--held-out without --data or --speakers-dir\nFix: name one of them too, or"
                " neither."
            )
        return _made(options, samples)
    if options.data is not None and options.speakers_dir is not None:
        raise CorpusError(
            "--data and --speakers-dir both name what is learnt\nFix: leave one of them out."
        )
    if options.held_out is None:
        raise CorpusError(
            "no mixtures to test with\nFix: name some that training does not see: --held-out."
        )
    mixtures = read_mixtures(options.held_out)
    insist_on_recordings(
        [(each.path, *each.sources) for each in mixtures], rate, options.quarantine
    )
    held_out = CutMixtures(mixtures, sample_rate=rate, samples=None)
    if options.data is not None:
        mixtures = read_mixtures(options.data)
        insist_on_recordings(
            [(each.path, *each.sources) for each in mixtures], rate, options.quarantine
        )
        return CutMixtures(mixtures, sample_rate=rate, samples=samples), held_out
    assert options.speakers_dir is not None
    utterances = read_speakers(options.speakers_dir)
    insist_on_recordings([(each.path,) for each in utterances], rate, options.quarantine)
    return MixedOnTheFly(utterances, sample_rate=rate, samples=samples), held_out


def _made(options: Options, samples: int) -> tuple[MixedOnTheFly, CutMixtures]:
    """Return voices that are made here, and mixtures of other voices."""
    # Before they are made
    insist_on_a_batch(options.batch_size, options.speakers * options.sentences, _LEARNT)
    place = options.place_of_speech()
    training, others = (
        make_corpus(
            Plan(
                speakers=options.speakers if not held_out else max(2, options.speakers // 3),
                sentences=options.sentences if not held_out else max(1, options.sentences // 4),
                words=options.words,
                sample_rate=options.sample_rate,
                seed=options.seed,
                held_out=held_out,
                spoken_by=options.spoken_by,
            ),
            place,
        )
        for held_out in (False, True)
    )
    many = max(2, options.speakers)
    mixtures = make_mixtures(
        read_speakers(others),
        place / f"{others.name}-mixed",
        many=many,
        sample_rate=options.sample_rate,
        seed=options.seed,
    )
    return (
        MixedOnTheFly(read_speakers(training), sample_rate=options.sample_rate, samples=samples),
        CutMixtures(read_mixtures(mixtures), sample_rate=options.sample_rate, samples=None),
    )
