"""How well what is held out is separated, and an example to look at and to listen to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from recipes.separation.model import ConvTasNet
from recipes.separation.si_snr import best_order, si_snr
from recipes.wav import write_wav

_WINDOW, _HOP = 256, 64  # of the spectrograms
_SHOWN_SAMPLES = 40_000
_RANGE_DB = 70.0  # below the loudest, all is black


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One mixture, on the CPU.

    Args:
        mixture: Shape ``(samples,)``.
        sources: Shape ``(sources, samples)``.
        estimates: Likewise, in the order of the sources.
    """

    mixture: torch.Tensor
    sources: torch.Tensor
    estimates: torch.Tensor


def evaluate(
    model: ConvTasNet, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[dict[str, float], Example]:
    """Return the ratio over held-out mixtures, how much of it was gained, and the first of them.

    Args:
        model: In evaluation, without gradients.
        batches: One mixture in each, at least one.
    """
    reached, given, example = [], [], None
    for mixture, sources in batches:
        estimates = model(mixture).float()
        ratios, order = best_order(estimates, sources)
        reached.append(float(ratios.mean()))
        given.append(float(si_snr(mixture[:, None].expand_as(sources), sources).mean()))
        if example is None:
            example = Example(
                mixture=mixture[0].cpu(),
                sources=sources[0].cpu(),
                estimates=estimates[0, order[0]].cpu(),
            )
    assert example is not None, "a set of mixtures is never empty"
    mean, before = sum(reached) / len(reached), sum(given) / len(given)
    return {
        "si_snr_db": mean,
        "si_snr_of_mixtures_db": before,
        "si_snr_improvement_db": mean - before,
    }, example


def picture(example: Example) -> NDArray[Any]:
    """Return spectrograms from 0 to 1: the mixture.

    Below it each source, beside what was made of it.
    """
    rows = [torch.cat([_spectrogram(example.mixture)] * 2, 1)]
    for source, estimate in zip(example.sources, example.estimates, strict=True):
        rows.append(torch.cat([_spectrogram(source), _spectrogram(estimate)], 1))
    found: NDArray[Any] = torch.cat(rows).numpy()
    return found


def _spectrogram(wave: torch.Tensor) -> torch.Tensor:
    """Return frequencies, high ones above, over time from the beginning on, with a white line
    around.
    """
    window = torch.hann_window(_WINDOW)
    magnitudes = torch.stft(
        wave[:_SHOWN_SAMPLES], _WINDOW, _HOP, window=window, return_complex=True
    ).abs()
    decibels = 20 * (magnitudes / magnitudes.max().clamp(min=1e-8)).clamp(min=1e-8).log10()
    shown = (decibels / _RANGE_DB + 1).clamp(min=0).flip(0)
    return torch.nn.functional.pad(shown, (0, 2, 0, 2), value=1.0)


def write_example(example: Example, folder: Path, sample_rate: int) -> None:
    """Write a mixture, its sources and what was made of them as WAV files.

    The last all equally loud.
    """
    write_wav(folder / "mixture.wav", example.mixture.numpy(), sample_rate)
    for number, (source, estimate) in enumerate(
        zip(example.sources, example.estimates, strict=True), start=1
    ):
        loudest = float(estimate.abs().max().clamp(min=1e-8))
        write_wav(folder / f"source_{number}.wav", source.numpy(), sample_rate)
        write_wav(
            folder / f"separated_{number}.wav", (estimate * (0.9 / loudest)).numpy(), sample_rate
        )
