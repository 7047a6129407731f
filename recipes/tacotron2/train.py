"""Tacotron 2 from a folder as LJSpeech, or from one that espeak-ng speaks.

``python -m recipes.tacotron2``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from holdfast import HoldfastError, Loss
from recipes.options import (
    RunOptions,
    insist_on_a_batch,
    insist_on_installed,
    insist_on_usable,
    read_options,
)
from recipes.tacotron2 import espeak
from recipes.tacotron2.audio import MelSettings
from recipes.tacotron2.data import (
    Padded,
    Utterances,
    compute_features,
    divide,
    how_many_apart,
    make_loader,
)
from recipes.tacotron2.evaluation import Evaluation, figures_of
from recipes.tacotron2.folder import SpeechFolder
from recipes.tacotron2.losses import Weights, losses_of
from recipes.tacotron2.model import Tacotron2
from recipes.tacotron2.public_weights import read_public_weights
from recipes.tacotron2.sizes import SIZES, Sizes
from recipes.tacotron2.text import numbers_of
from recipes.training import Training, find_device, fused_on, making_the_model, open_guard

HERE = Path(__file__).parent
CLIPS = HERE / "clips"
"""A few seconds of speech that come with the recipe."""
_LEAST = {
    "clips": 2,
    "frames_per_step": 1,
    "batch_size": 1,
    "decay_after_steps": 0,
    "guided_attention": 0,
    "last_step_weight": 0,
    "segment_steps": 0,
    "held_out": 1,
    "evaluate_every": 1,
    "max_decoder_steps": 1,
    "quarantine": 0,
}
_MOST = {"clips": 10_000, "max_decoder_steps": 100_000}
_FEWEST_DECAYED = 0.01  # of the learning rate: from 1e-3 to 1e-5, as in the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class TacotronOptions(RunOptions):
    """Train Tacotron 2 under holdfast."""

    run_dir: Path = Path("runs/tacotron2")
    """Directory of the run.

    Checkpoints, records, features.h5, samples/, report.html and result.json.
    """

    max_steps: int = 400
    """Optimizer steps, counted over all restarts of the run."""

    data: Path | None = None
    """Folder with metadata.csv and wavs/, as LJSpeech. none: one that espeak-ng speaks into the run
    directory, or the clips of the recipe where espeak-ng is not installed."""

    clips: int = 240
    """Sentences that espeak-ng speaks."""

    features: Path | None = None
    """HDF5 file of the spectrograms; none: features.h5 in the run directory. Runs over one folder
    may share it."""

    rebuild_features: bool = False
    """Compute all spectrograms anew, after files of the folder were changed."""

    size: Literal["small", "paper", "tiny"] = "small"
    """paper: 28 million parameters, one frame a step. small: learns on two cores in minutes.

    Tiny: for tests.
    """

    frames_per_step: int | None = None
    """Frames that a decoder step makes; none: as the size says."""

    recurrent_regulariser: Literal["zoneout", "dropout"] = "zoneout"
    """zoneout as in the paper, or dropout of 0.1 as in public implementations."""

    batch_size: int = 16
    """Utterances of an update. The paper has 64."""

    learning_rate: float = 1e-3
    """Of Adam. 1e-3: the paper."""

    decay_after_steps: int = 50_000
    """From here on the learning rate falls, to a hundredth over as many steps again."""

    guided_attention: float = 1.0
    """Weight of the loss that pulls the attention to the diagonal; 0 leaves it out, as the paper
    does."""

    last_step_weight: float = 5.0
    """How much more the last step counts in the loss of stopping.

    There is only one of it in an utterance.
    """

    segment_steps: int = 50
    """Decoder steps of a segment; 0: one segment. Alone it changes nothing, but it is what is
    recomputed when memory is short, and where --truncate cuts."""

    truncate: bool = False
    """Truncated backpropagation through time: the decoder's state is detached between segments."""

    held_out: int = 32
    """Most utterances that are held out, a tenth at most."""

    evaluate_every: int = 50
    """Steps between evaluations."""

    max_decoder_steps: int | None = None
    """Where free-running inference is ended; none: half as long again as the longest utterance of
    the folder."""

    weights: Path | None = None
    """Published weights of NVIDIA/tacotron2 to begin with; they fit --size paper
    --recurrent-regulariser dropout."""

    say: str = "The quick brown fox follows a giant zebra."
    """Sentence that is said at the end, into samples/sentence.wav."""

    quarantine: float = 0.001
    """Most utterances that may be quarantined because they cannot be read.

    A share below 1, or a number.
    """

    def check(self) -> None:
        """Look at each option by itself and beside the others.

        Raises:
            OptionError: One has a value that makes no training.
        """
        RunOptions.check(self)
        self.at_least(_LEAST)
        self.above_zero("learning_rate")
        self.at_most(_MOST)
        self.insist("say", bool(numbers_of(self.say)), "a text with letters is needed")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, and return what ``result.json`` holds."""
    options, policy = read_options(TacotronOptions, argv, policy_file=HERE / "policy.yaml")
    device, settings = find_device(options), MelSettings()
    torch.manual_seed(options.seed)
    published = _published_weights(options)  # before speech and features are made
    trained_on, held_out, longest = _utterances(options, settings)
    with making_the_model():
        model = make_model(options, trained_on, published).to(device)
    per_step = model.decoder.frames_per_step
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=options.learning_rate,
        eps=1e-6,
        weight_decay=1e-6,
        fused=fused_on(device),
    )
    loader = make_loader(
        trained_on,
        batch_size=options.batch_size,
        frames_per_step=per_step,
        seed=options.seed,
        num_workers=options.num_workers,
        quarantine=options.quarantine,
        device=device,
    )
    guard = open_guard(
        options,
        policy,
        model=model,
        optimizer=optimizer,
        scheduler=_decay(optimizer, options),
        loader=loader,
    )
    weights = Weights(last_step=options.last_step_weight, guided=options.guided_attention)
    batch = Padded(frames_per_step=per_step)([held_out[place] for place in range(len(held_out))])
    evaluation = Evaluation(
        guard, model, {name: value.to(device) for name, value in batch.items()}, weights
    )
    limit = options.max_decoder_steps or min(
        max(1, longest * 3 // (2 * per_step)), _MOST["max_decoder_steps"]
    )
    free = partial(evaluation.run_free, options.say, limit, options.run_dir, settings)
    training = Training(guard, options)
    with guard:
        figures = _train(
            training, evaluation, lambda batch: losses_of(model(**batch), batch, weights), free
        )
    return training.finish(model, {**figures_of(guard.events()), **figures})


def _train(
    training: Training,
    evaluation: Evaluation,
    loss_fn: Callable[[Mapping[str, Tensor]], dict[str, Loss]],
    run_free: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Run the loop; return the figures of free running, which there are when the last step is
    made.
    """
    guard, options = training.guard, training.options
    assert isinstance(options, TacotronOptions)
    if guard.global_step == 0:
        evaluation.listen()
    # Of a run that had ended: says more
    figures = run_free() if guard.global_step >= options.max_steps else {}
    for batch in training.batches():
        result = guard.step(batch, loss_fn)
        training.show(loss=result.loss)
        last = guard.global_step == options.max_steps
        if (last or guard.global_step % options.evaluate_every == 0) and not result.skipped:
            evaluation.listen()
        if last:
            figures = run_free()
    return figures


def _utterances(
    options: TacotronOptions, settings: MelSettings
) -> tuple[Utterances, Utterances, int]:
    """Return what to train on, what is held out, and the frames of the longest utterance."""
    try:
        insist_on_installed("transformers")
        folder = SpeechFolder(_folder(options), settings.sample_rate)
        for row in folder.unreadable:
            print(
                f"{row.trouble.partition(chr(10))[0]} The loader will set it aside.",
                file=sys.stderr,
            )
        insist_on_usable(
            [row.trouble for row in folder.unreadable], len(folder), options.quarantine
        )
        _check_batch(options, len(folder))
        file = options.features or options.run_dir / "features.h5"
        file.parent.mkdir(parents=True, exist_ok=True)
        if options.rebuild_features:
            file.unlink(missing_ok=True)
            shutil.rmtree(f"{file}.building", ignore_errors=True)
        features = compute_features(folder, file, settings)
        trained_on, held_out = divide(folder, features, options.held_out)
    except (HoldfastError, ValueError, OSError) as error:
        is_stale = isinstance(error, HoldfastError) and error.rule == "H620"
        _exit(
            f"{error}\nHere that is --rebuild-features, or --features FILE." if is_stale else error
        )
    print(
        f"{folder.path}: {len(trained_on)} utterances to train on, {len(held_out)} held out",
        file=sys.stderr,
    )
    return trained_on, held_out, max(row.samples for row in folder.rows) // settings.hop_length + 1


def _folder(options: TacotronOptions) -> Path:
    if options.data is not None:
        return options.data
    if espeak.is_installed():
        _check_batch(options, options.clips)  # before they are spoken
        return espeak.make_folder(options.run_dir / "speech", options.clips, options.seed)
    told = (
        "espeak-ng is not installed: training on eight clips, too few to learn from. Fix:"
        f" {espeak.INSTALL}."
    )
    print(told, file=sys.stderr)
    return CLIPS


def _check_batch(options: TacotronOptions, utterances: int) -> None:
    """Refuse a batch that was asked for and is larger than what is learnt.

    The usual one is made smaller.
    """
    if options.batch_size != TacotronOptions().batch_size:
        there = utterances - how_many_apart(utterances, options.held_out)
        insist_on_a_batch(options.batch_size, there, "utterances")


def _exit(error: Exception | str) -> NoReturn:
    print(error, file=sys.stderr)
    raise SystemExit(2) from None


def _published_weights(options: TacotronOptions) -> Mapping[str, Tensor] | None:
    """Return what the file of --weights holds, if there is one."""
    if options.weights is None:
        return None
    try:
        return read_public_weights(options.weights)
    except OSError as error:
        why = f"--weights {options.weights} cannot be read: {error.strerror or error}"
    except ValueError as error:
        why = str(error)
    _exit(f"{why}\nFix: name a published file of NVIDIA/tacotron2, or leave --weights out.")


def make_model(
    options: TacotronOptions, utterances: Utterances, published: Mapping[str, Tensor] | None = None
) -> Tacotron2:
    """Return the model as the options say.

    Its frames begin at the mean of some utterances, or with given weights.
    """
    sizes: Sizes = SIZES[options.size]
    if options.frames_per_step is not None:
        sizes = replace(sizes, frames_per_step=options.frames_per_step)
    if options.recurrent_regulariser == "dropout":
        sizes = replace(sizes, zoneout=0.0, recurrent_dropout=0.1)
    model = Tacotron2(sizes, segment_steps=options.segment_steps, truncate=options.truncate)
    if published is None:
        model.start_at(utterances.mean_frame())
        return model
    try:
        model.load_state_dict(published)
    except RuntimeError as error:  # names every tensor
        first = " ".join(str(error).splitlines()[1:2]).strip()
        _exit(f"{options.weights} does not fit: {first}\nFix: --size paper, with one frame a step.")
    return model


def _decay(
    optimizer: torch.optim.Optimizer, options: TacotronOptions
) -> torch.optim.lr_scheduler.LambdaLR:
    start = max(1, options.decay_after_steps)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: max(_FEWEST_DECAYED, _FEWEST_DECAYED ** (max(0, step - start) / start)),
    )
