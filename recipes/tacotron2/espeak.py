"""A small folder in the format of LJSpeech, spoken by espeak-ng, of sentences that a grammar makes.

espeak-ng is a program of its own (Debian and Ubuntu: ``apt-get install espeak-ng``). It speaks the
same samples each time, so a folder is decided by the number of its clips and its seed.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

from recipes.wav import read_wav, write_wav

INSTALL = (
    "install espeak-ng (Debian, Ubuntu: apt-get install espeak-ng; macOS: brew install espeak-ng)"
)
_WORDS = {
    "the": "the a my your our this that every",
    "kind": (
        "old young small quick lazy brown green quiet happy jolly warm cold strange tiny giant"
        " humble"
    ),
    "who": (
        "dog fox cat king queen baker sailor teacher farmer painter doctor pilot zebra wolf judge"
        " child"
    ),
    "does": (
        "sees finds takes makes wants hears keeps moves likes buys visits questions examines"
        " follows"
    ),
    "what": (
        "house bridge river letter apple garden window boat engine box story yellow jar violin map"
        " table"
    ),
    "where": "near under over behind beyond",
}
_SHAPES = (
    "the who does the what",
    "the kind who does the what",
    "the who does the kind what",
    "who does what",
)
_LONGER = ("the who does the what where the what", "the kind who does the kind what")
_SECONDS = 60.0
_QUIET = 0.01  # of a loudest sample of 1: what is quieter at both ends is cut off


def is_installed() -> bool:
    """Return whether espeak-ng can be called."""
    return shutil.which("espeak-ng") is not None


def speak(
    text: str, path: Path, *, voice: str = "en-us", words_per_minute: int = 170, pitch: int = 50
) -> None:
    """Have a text spoken into a WAV file.

    22050 samples a second, mono, 16 bits, without silence at its ends.

    Args:
        text: What to say.
        path: File; its folder is made.
        voice: Of espeak-ng.
        words_per_minute: Speed, 80 to 450.
        pitch: 0 to 99.

    Raises:
        OSError: espeak-ng is not installed, or says that it cannot.
    """
    program = shutil.which("espeak-ng")
    if program is None:
        raise FileNotFoundError(f"espeak-ng is not installed. Fix: {INSTALL}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ["-v", voice, "-s", str(words_per_minute), "-p", str(pitch), "-z", "-w", str(path)]
    done = subprocess.run(  # noqa: S603 - the program was looked up, the text is no option
        [program, *options, "--", text],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode or not path.is_file():
        raise OSError(f"espeak-ng said: {done.stderr.strip() or f'exit code {done.returncode}'}")
    wave = read_wav(path)
    heard = (abs(wave) > _QUIET).nonzero()[0]
    write_wav(path, wave[heard[0] : heard[-1] + 1] if len(heard) else wave)


def sentences(count: int, seed: int) -> list[str]:
    """Return different sentences; a larger count begins with those of a smaller one.

    Example:
        >>> sentences(2, seed=0) == sentences(3, seed=0)[:2]
        True
    """
    chance, found = random.Random(seed), {}  # noqa: S311 - sentences are no secret
    while len(found) < count:
        shape = chance.choice(_SHAPES if chance.random() < 0.8 else _LONGER)
        spoken = " ".join(chance.choice(_WORDS[part].split()) for part in shape.split())
        found[spoken[0].upper() + spoken[1:] + "."] = None
    return list(found)


def make_folder(folder: Path, clips: int, seed: int = 0) -> Path:
    """Make ``metadata.csv`` and ``wavs/``, if they are not there already; return the folder.

    The metadata are written last: what was interrupted is made again, and what is finished stays as
    it is.

    Args:
        folder: Where.
        clips: Sentences, each a file.
        seed: Decides the sentences.

    Raises:
        ValueError: The folder holds other sentences.
        OSError: espeak-ng is not installed, or the disk refuses.
    """
    metadata = folder / "metadata.csv"
    texts = {
        f"ES{seed:03d}-{number:04d}": text for number, text in enumerate(sentences(clips, seed))
    }
    rows = "".join(f"{name}|{text}|{text.lower()}\n" for name, text in texts.items())
    if metadata.is_file():
        if metadata.read_text(encoding="utf-8") != rows:
            raise ValueError(
                f"{folder} holds other sentences than {clips} of seed {seed}.\nFix: ask for as many"
                " as before, with the same seed, or begin a run directory of its own: --run-dir."
            )
        return folder
    for name, text in texts.items():
        speak(text, folder / "wavs" / f"{name}.wav")
    unfinished = metadata.with_suffix(".unfinished")
    unfinished.write_text(rows, encoding="utf-8")
    unfinished.replace(metadata)
    return folder
