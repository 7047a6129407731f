"""Log-mel spectrograms, and Griffin-Lim, which makes a wave of one again.

Not here: files of sound (``wav``), or where spectrograms are kept (``data``).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.wav import SAMPLE_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class MelSettings:
    """How a spectrogram is made; the defaults are those of Tacotron 2's public recipes.

    Args:
        sample_rate: Samples in a second.
        n_fft: Points of the Fourier transform.
        hop_length: Samples from one frame to the next.
        win_length: Samples of the Hann window.
        n_mels: Bands.
        fmin: Lowest frequency, Hz.
        fmax: Highest frequency, Hz.
        floor: Smaller magnitudes count as this before the logarithm.
    """

    sample_rate: int = SAMPLE_RATE
    n_fft: int = 1024
    hop_length: int = 256
    win_length: int = 1024
    n_mels: int = 80
    fmin: float = 0.0
    fmax: float = 8000.0
    floor: float = 1e-5


@functools.lru_cache(maxsize=8)
def mel_filters(settings: MelSettings) -> Tensor:
    """Return the triangles of the mel bands, each of area 1 in Hz.

    Shape ``(n_mels, n_fft // 2 + 1)``.

    The mel scale is that of Slaney's Auditory Toolbox, linear up to 1000 Hz.

    Raises:
        ImportError: transformers, whose filters these are, is not installed.
    """
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(
        settings.n_fft // 2 + 1,
        settings.n_mels,
        settings.fmin,
        settings.fmax,
        settings.sample_rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(filters.T.astype(np.float32))


def log_mel(wave: Tensor | NDArray[np.float32], settings: MelSettings = MelSettings()) -> Tensor:
    """Return the log-mel spectrogram of a wave: natural logarithm of magnitudes, not of power.

    Args:
        wave: Shape ``(samples,)``, from -1 to 1.
        settings: How it is made.

    Returns:
        Shape ``(frames, n_mels)``, where frames is ``samples // hop_length + 1``.

    Raises:
        ValueError: The wave is shorter than half a window.
    """
    samples = torch.as_tensor(wave)
    if samples.shape[0] <= settings.n_fft // 2:
        raise ValueError(
            f"{samples.shape[0]} samples are too few; more than {settings.n_fft // 2} are needed."
        )
    magnitudes = _stft(samples, settings).abs()
    return (mel_filters(settings) @ magnitudes).clamp(min=settings.floor).log().T.contiguous()


def _stft(wave: Tensor, settings: MelSettings) -> Tensor:
    sizes = (
        settings.n_fft,
        settings.hop_length,
        settings.win_length,
        torch.hann_window(settings.win_length),
    )
    return torch.stft(wave, *sizes, pad_mode="reflect", return_complex=True)


def griffin_lim(
    spectrogram: Tensor, settings: MelSettings = MelSettings(), *, rounds: int = 60
) -> Tensor:
    """Return a wave with about this log-mel spectrogram (Griffin and Lim, 1984).

    Audible, not a vocoder.

    Args:
        spectrogram: Shape ``(frames, n_mels)``.
        settings: How it was made.
        rounds: Of setting magnitudes and keeping phases; phases begin at random, always the same.

    Returns:
        Shape ``(samples,)``, ``hop_length`` for each frame after the first, and as many for a
        single one; its loudest sample at 0.95 if it was beyond 1.
    """
    # That a transform can be of
    frames, least = len(spectrogram), settings.n_fft // 2 // settings.hop_length + 2
    silence = torch.full((max(0, least - frames), settings.n_mels), math.log(settings.floor))
    bands = torch.cat((spectrogram.detach().float().cpu(), silence)).T.exp()
    magnitudes = (torch.linalg.pinv(mel_filters(settings)) @ bands).clamp(min=0)
    sizes = (
        settings.n_fft,
        settings.hop_length,
        settings.win_length,
        torch.hann_window(settings.win_length),
    )
    angles = torch.rand(magnitudes.shape, generator=torch.Generator().manual_seed(0)) * (
        2 * torch.pi
    )
    phases = torch.polar(torch.ones_like(angles), angles)

    def inverse(spectrum: Tensor) -> Tensor:
        return torch.istft(spectrum, *sizes)

    for _ in range(rounds):
        spectrum = _stft(inverse(magnitudes * phases), settings)
        phases = spectrum / spectrum.abs().clamp(min=1e-8)
    wave = inverse(magnitudes * phases)[: max(1, frames - 1) * settings.hop_length]
    loudest = float(wave.abs().max())
    return wave * (0.95 / loudest) if loudest > 1 else wave
