"""A small corpus of made speech in LibriSpeech's layout.

Speaker/chapter/*.trans.txt, one WAV for each line.

It is spoken by ``voices``, which need nothing, or by espeak-ng. Everything follows from a few
numbers, so that a corpus that was left half made is finished as it would have been.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from holdfast.core.durable import replace_file
from recipes.asr.corpus import CorpusError
from recipes.asr.voices import Voice, speak
from recipes.tacotron2 import espeak
from recipes.wav import SAMPLE_RATE, read_wav, write_wav

_LIST = """
    able about above after again air all along also and any are around away back bad bed been before below best big
    black blue book both bring brown but call can car child city clear close cold come cut dark day deep did dog door
    down draw dry each early earth end even every eye face fall far fast father few field find fire first fish five
    fly food foot form four free from front full game gave get girl give glad go gold good gray great green grow
    half hand hard has head hear help her high hill him hold home horse hot hour house how ice inch into iron its
    job join jump just keep kind king know lake land last late law lay lead learn left less let life light like line
    list little live long look lost love low made make man many map mark may mean men mile mind moon more most move
    much must name near need never new next night nine nor north note now off oil old once one only open order other
    our out over own page part pass plan plant play point pull push put quick quiet rain ran read real red rest rich
    ride right ring river road rock room round rule run said same saw say sea see seem self send set seven shape she
    ship short show side sing six size sleep slow small snow some song soon south stand star start stay step still
    stop story strong such sun sure table take talk tell ten test than that the them then there they thing think this
    those three time told took top town tree true try turn two under unit until upon use very voice wait walk wall
    want war warm was watch water way week well west what wheel when where which while white who whole why will wind
    wish with wood word work world year yellow yes yet you young zero fox box exit zoo zone size quit queen equal
    quite
"""
_WORDS = tuple(dict.fromkeys(_LIST.split()))  # every letter is in several of them
Speaker = Literal["voices", "espeak"]
# Of espeak-ng's voices
_VARIANTS = ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4")
_HELD_OUT_WORDS = 7  # each seventh word is never spoken in training


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A corpus to be made.

    Args:
        speakers: How many.
        sentences: Of each.
        words: In a sentence, at most; at least half of it, rounded up.
        sample_rate: Hz.
        seed: Of voices, sentences and how they are spoken.
        held_out: Whether it is to test with: other speakers, who also say words that training never
            heard.
        spoken_by: What speaks: the voices of this package, or espeak-ng.
    """

    speakers: int
    sentences: int
    words: int
    sample_rate: int
    seed: int
    held_out: bool
    spoken_by: Speaker = "voices"

    def name(self) -> str:
        """Return a name for the folder: another plan has another one."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        return f"{'held-out' if self.held_out else 'train'}-{digest}"


def make_corpus(plan: Plan, parent: Path) -> Path:
    """Make a corpus below a folder, or what it lacks, and return its own folder.

    Raises:
        CorpusError: espeak-ng is to speak, and is not installed.
    """
    if plan.spoken_by == "espeak" and not espeak.is_installed():
        raise CorpusError(
            f"espeak-ng is not installed\nFix: {espeak.INSTALL}, or take --spoken-by voices."
        )
    folder = parent / plan.name()
    numbers = range(plan.speakers)
    due = [
        number for number in numbers if not _transcript(folder, _speaker(plan, number)).is_file()
    ]
    console = Console(stderr=True, force_jupyter=False)
    for number in track(
        due, "making speech", console=console, transient=True, disable=not console.is_terminal
    ):
        _make_speaker(plan, number, folder)
    return folder


def _speaker(plan: Plan, number: int) -> int:
    return number + 1 + 1000 * plan.held_out


def _transcript(folder: Path, speaker: int) -> Path:
    return folder / f"{speaker}" / "1" / f"{speaker}-1.trans.txt"


def _make_speaker(plan: Plan, number: int, folder: Path) -> None:
    speaker = _speaker(plan, number)
    random = np.random.default_rng([plan.seed, speaker])
    voice, transcript = Voice.drawn(random), _transcript(folder, speaker)
    transcript.parent.mkdir(parents=True, exist_ok=True)
    variant = str(random.choice(_VARIANTS))
    lines = []
    for sentence in range(plan.sentences):
        text = _sentence(plan, random)
        name = f"{speaker}-1-{sentence:04d}"
        path = transcript.parent / f"{name}.wav"
        if plan.spoken_by == "espeak":
            _spoken_by_espeak(text, path, variant, voice, plan.sample_rate)
        else:
            write_wav(
                path,
                speak(text, voice, sample_rate=plan.sample_rate, random=random),
                plan.sample_rate,
            )
        lines.append(f"{name} {text.upper()}\n")
    # Last: a speaker with a transcript is complete
    replace_file(transcript, "".join(lines).encode())


def _spoken_by_espeak(text: str, path: Path, variant: str, voice: Voice, sample_rate: int) -> None:
    """Have espeak-ng speak a text, as high and as fast as a voice does, at another sample rate."""
    pitch = round(min(99.0, max(0.0, (voice.pitch - 80) / 1.4)))
    espeak.speak(
        text, path, voice=f"en-us+{variant}", words_per_minute=round(165 / voice.rate), pitch=pitch
    )
    write_wav(path, resampled(read_wav(path, SAMPLE_RATE), SAMPLE_RATE, sample_rate), sample_rate)


def resampled(wave: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Return a wave at another sample rate, without what that rate cannot hold.

    By its Fourier transform.
    """
    samples = round(len(wave) * wanted / rate)
    spectrum = np.fft.rfft(wave)[: samples // 2 + 1]
    return (np.fft.irfft(spectrum, samples) * (samples / len(wave))).astype(np.float32)


def _sentence(plan: Plan, random: np.random.Generator) -> str:
    words = (
        _WORDS
        if plan.held_out
        else [word for place, word in enumerate(_WORDS) if place % _HELD_OUT_WORDS]
    )
    many = int(random.integers((plan.words + 1) // 2, plan.words + 1))
    return " ".join(words[int(place)] for place in random.integers(0, len(words), size=many))
