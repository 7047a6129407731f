"""Speech made from nothing.

A buzz and a hiss (source), shaped by moving resonances (filter), letter by letter.

Each letter is sounded by itself, as in a language whose spelling is its pronunciation; a voice has
a pitch, a length of its vocal tract, a rate and a breath of its own. It is speech in what matters
here: harmonics, formants, noise and silence in an order that text decides, other in each voice and
each time it is spoken.

Does not: write files or choose texts, see ``speech``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_HOP_SECONDS = 0.005  # between settings of the vocal tract
_WINDOW_SECONDS = 0.025
_PAUSE_SECONDS = 0.09  # between words
_SMOOTHING_SECONDS = 0.03  # how long the tract takes from one setting to the next
_TILT_HERTZ = 500.0  # from here on the source falls by 6 dB an octave
_BANDWIDTHS = (80.0, 110.0, 160.0)  # of the formants
_LOUDNESS = 0.1  # root mean square of what is returned


@dataclass(frozen=True, slots=True)
class _Sound:
    """One setting of the vocal tract.

    Args:
        milliseconds: How long it lasts at the usual rate.
        buzz: Loudness of the vocal cords.
        hiss: Loudness of the noise.
        formants: Hz.
        centre: Of the noise, Hz.
        width: Of the noise, Hz.
    """

    milliseconds: float
    buzz: float
    hiss: float
    formants: tuple[float, float, float] = (500.0, 1500.0, 2500.0)
    centre: float = 3000.0
    width: float = 1500.0


def _vowel(first: float, second: float, third: float) -> tuple[_Sound, ...]:
    return (_Sound(110, 1.0, 0.0, (first, second, third)),)


def _hum(first: float, second: float, third: float) -> tuple[_Sound, ...]:
    return (_Sound(80, 0.45, 0.0, (first, second, third)),)


def _fricative(
    centre: float, width: float, *, buzz: float = 0.0, hiss: float = 0.5
) -> tuple[_Sound, ...]:
    return (_Sound(90, buzz, hiss, (300.0, 1500.0, 2500.0), centre, width),)


def _stop(
    centre: float, width: float, *, buzz: float = 0.0, burst: float = 25
) -> tuple[_Sound, ...]:
    closed = _Sound(50, buzz, 0.0, (250.0, centre, 2500.0))
    return closed, _Sound(burst, 2 * buzz, 0.7, (400.0, centre, 2500.0), centre, width)


# Formants of vowels lie near those of Peterson and Barney (1952); the rest is set so that no two
# letters are alike.
_LETTERS: dict[str, tuple[_Sound, ...]] = {
    "a": _vowel(750, 1200, 2500),
    "e": _vowel(500, 1850, 2550),
    "i": _vowel(290, 2300, 3000),
    "o": _vowel(500, 880, 2500),
    "u": _vowel(310, 700, 2300),
    "y": _vowel(300, 1700, 2150),
    "m": _hum(250, 950, 2200),
    "n": _hum(250, 1650, 2600),
    "l": _hum(380, 1200, 2900),
    "r": _hum(420, 1250, 1600),
    "w": _hum(300, 620, 2200),
    "f": _fricative(2200, 3500, hiss=0.25),
    "s": _fricative(6000, 1500),
    "x": _fricative(1400, 600),
    "c": _fricative(3200, 900),
    "h": _fricative(900, 2500, hiss=0.2),
    "v": _fricative(2200, 3500, buzz=0.35, hiss=0.2),
    "z": _fricative(6000, 1500, buzz=0.35),
    "j": _fricative(3200, 900, buzz=0.4, hiss=0.35),
    "p": _stop(800, 500),
    "t": _stop(4500, 1200),
    "k": _stop(1900, 500),
    "q": _stop(2900, 700, burst=60),
    "b": _stop(800, 500, buzz=0.2),
    "d": _stop(4500, 1200, buzz=0.2),
    "g": _stop(1900, 500, buzz=0.2),
    "'": (_Sound(40, 0.0, 0.0),),
    " ": (_Sound(1000 * _PAUSE_SECONDS, 0.0, 0.0),),
}
ALPHABET = "".join(sorted(_LETTERS))
"""What can be spoken: letters, the apostrophe and the space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """Who speaks.

    Args:
        pitch: Hz.
        tract: Factor of all formants: above 1 for a short vocal tract.
        rate: Factor of all durations.
        breath: Noise in the voice, beside its buzz.
    """

    pitch: float
    tract: float
    rate: float
    breath: float

    @classmethod
    def drawn(cls, random: np.random.Generator) -> Voice:
        """Return somebody: pitch and tract of adults, the shorter tract mostly with the higher
        pitch.
        """
        height = random.uniform()
        return cls(
            pitch=90.0 * 2.4**height,
            tract=0.9 + 0.22 * height + random.uniform(-0.04, 0.04),
            rate=random.uniform(0.85, 1.15),
            breath=random.uniform(0.0, 0.06),
        )


def speak(
    text: str, voice: Voice, *, sample_rate: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """Return a text as one voice speaks it this time.

    Args:
        text: Of letters in `ALPHABET`.
        voice: Who speaks.
        sample_rate: Hz.
        random: Decides durations, melody and noise.

    Returns:
        Shape ``(samples,)``, with a pause at both ends.

    Raises:
        KeyError: A letter cannot be spoken.
    """
    hop = round(_HOP_SECONDS * sample_rate)
    tract = _tract(text, voice, random)
    frames = len(tract)
    pitch = _melody(frames, voice, random)
    samples = frames * hop
    every = np.repeat(pitch, hop)
    buzz = _pulses(every, sample_rate)
    hiss = random.standard_normal(samples)
    frequencies = np.fft.rfftfreq(2 * (round(_WINDOW_SECONDS * sample_rate) // 2), 1 / sample_rate)
    voiced = _resonances(tract[:, 2:5] * voice.tract, frequencies) / (1 + frequencies / _TILT_HERTZ)
    noisy = np.exp(-0.5 * ((frequencies - tract[:, 5:6] * voice.tract) / tract[:, 6:7]) ** 2)
    breath = voice.breath * tract[:, :1] * voiced
    wave = _filtered(buzz, tract[:, :1] * voiced, hop) + _filtered(
        hiss, 0.3 * tract[:, 1:2] * noisy + breath, hop
    )
    scale: Floats = wave * (_LOUDNESS / max(float(np.sqrt(np.mean(wave**2))), 1e-9))
    return scale.astype(np.float32)


def _tract(text: str, voice: Voice, random: np.random.Generator) -> Floats:
    """Return the settings of the vocal tract, shape ``(frames, 7)``.

    Buzz, hiss, three formants, centre, width.
    """
    rows: list[tuple[float, ...]] = []
    for letter in f" {text} ":
        for sound in _LETTERS[letter]:
            seconds = sound.milliseconds / 1000 * voice.rate * random.uniform(0.85, 1.2)
            row = (sound.buzz, sound.hiss, *sound.formants, sound.centre, sound.width)
            rows += [row] * max(1, round(seconds / _HOP_SECONDS))
    settings = np.asarray(rows, dtype=np.float64)
    width = round(_SMOOTHING_SECONDS / _HOP_SECONDS) | 1
    kernel = np.hanning(width + 2)[1:-1]
    padded = np.pad(settings, ((width // 2, width // 2), (0, 0)), mode="edge")
    smooth = [np.convolve(column, kernel / kernel.sum(), mode="valid") for column in padded.T]
    return np.stack(smooth, axis=1)


def _melody(frames: int, voice: Voice, random: np.random.Generator) -> Floats:
    """Return the pitch of each frame: it falls over the sentence, and wanders."""
    seconds = np.arange(frames) * _HOP_SECONDS
    wander = 0.05 * np.sin(2 * np.pi * (random.uniform(0.8, 2.0) * seconds + random.uniform()))
    falls = np.linspace(0.06, -0.08, frames)
    jitter = 0.01 * random.standard_normal(frames)
    found: Floats = voice.pitch * (1 + wander + falls + jitter)
    return found


def _pulses(pitch: Floats, sample_rate: int) -> Floats:
    """Return a train of pulses that holds all harmonics below half of the sample rate, and
    nothing above.
    """
    phase = np.cumsum(pitch / sample_rate)
    harmonics = int(sample_rate / 2 / pitch.max())
    angle = np.pi * phase
    below = np.sin(angle)
    at_pulse = np.abs(below) < 1e-6
    # The sum of cos(2 pi k phase) over the harmonics, in closed form.
    whole = np.sin((2 * harmonics + 1) * angle) / np.where(at_pulse, 1.0, below)
    found: Floats = np.where(at_pulse, 2.0 * harmonics + 1, whole) - 1.0
    return found


def _resonances(formants: Floats, frequencies: Floats) -> Floats:
    """Return the response of the tract, shape ``(frames, frequencies)``."""
    response = np.full((len(formants), len(frequencies)), 0.01)
    for number, width in enumerate(_BANDWIDTHS):
        distance = (frequencies - formants[:, number : number + 1]) / width
        response += 0.6**number / (1 + distance**2)
    return response


def _filtered(source: Floats, response: Floats, hop: int) -> Floats:
    """Return a source with the response of each frame, by overlapping windows."""
    size = 2 * (response.shape[1] - 1)
    window = np.hanning(size + 1)[:-1]
    padded = np.pad(source, (size // 2, size))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[: len(source) : hop][
        : len(response)
    ]
    shaped = np.fft.irfft(np.fft.rfft(frames * window) * response, n=size) * window
    found = np.zeros(len(padded) + size)
    for number, frame in enumerate(shaped):
        found[number * hop : number * hop + size] += frame
    whole: Floats = found[size // 2 : size // 2 + len(source)] / (window**2).sum() * hop
    return whole
