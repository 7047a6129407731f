"""Sound files of one channel: WAV and FLAC become samples, and samples WAV.

Libsndfile does it, by soundfile.

To libsndfile a WAV file that was cut short is a shorter one. What its header promises is therefore
looked up here.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_RATE = 22050
# Of a sample
_BYTES = {"PCM_S8": 1, "PCM_U8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8}
# Into a pipe programs write that many bytes or more are to come: espeak-ng, SoX, ffmpeg
_STREAMED = 0x7FFFF000
_BLOCK = 2**20  # samples decoded at a time, so that a header that lies takes no memory


class WrongSampleRateError(ValueError):
    """A file has another sample rate than all are to have."""

    sample_rate = 0
    """That of the file, Hz."""


def _soundfile() -> Any:
    """Return the package, or raise an OSError, as whatever else files cannot be read for."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # the latter: it finds no libsndfile
        raise OSError(
            f"soundfile cannot be imported ({error}).\nFix: pip install soundfile"
        ) from error
    return soundfile


def check_wav(path: Path, sample_rate: int = SAMPLE_RATE) -> int:
    """Return how many samples a file has; one of WAV is not read for it.

    Raises:
        WrongSampleRateError: It has another sample rate.
        ValueError: What else is wrong with it, and what to do: it is no WAV or FLAC file, cut
            short, empty, not mono.
        OSError: It cannot be read, or soundfile is not installed.
    """
    with _opened(path, sample_rate) as sound:
        return len(_decoded(path, sound)) if sound.format == "FLAC" else sound.frames


def trouble_of(path: Path, sample_rate: int) -> ValueError | OSError | None:
    """Return why a file cannot be used, as far as its header tells.

    `WrongSampleRateError` where that is why.
    """
    try:
        with _opened(path, sample_rate):
            return None
    except (ValueError, OSError) as error:
        return error


def read_wav(path: Path, sample_rate: int = SAMPLE_RATE) -> NDArray[np.float32]:
    """Return the samples of a mono WAV or FLAC file, shape ``(samples,)``; PCM from -1 to 1.

    Raises:
        ValueError: As `check_wav`, or the samples are no finite numbers.
        OSError: It cannot be read, or soundfile is not installed.
    """
    with _opened(path, sample_rate) as sound:
        found = _decoded(path, sound)
    if not np.isfinite(found).all():
        raise _unusable(path, "holds samples that are no finite numbers")
    return found


@contextmanager
def _opened(path: Path, sample_rate: int) -> Iterator[Any]:
    """Open a file that can be used, as far as that is known without decoding its samples."""
    soundfile = _soundfile()
    with path.open("rb", buffering=0) as raw:
        promised = _promised(path, raw)
        source = raw.fileno() if promised != 0 else _until_its_end(raw)
        raw.seek(0)
        try:
            sound = soundfile.SoundFile(source, closefd=False)
        except soundfile.LibsndfileError as error:
            raise _unusable(
                path, f"is no WAV file, nor FLAC, that can be read ({error.error_string})"
            ) from error
        with sound:
            if sound.samplerate != sample_rate:
                wrong = WrongSampleRateError(
                    f"{path} has {sound.samplerate} samples a second; {sample_rate} are"
                    " needed.\nFix: resample all files once, for instance: sox in.wav -r"
                    f" {sample_rate} -c 1 -b 16 out.wav"
                )
                wrong.sample_rate = sound.samplerate
                raise wrong
            if sound.channels != 1:
                fix = "mix it down, for instance: sox in.wav -c 1 out.wav"
                raise _unusable(path, f"has {sound.channels} channels; 1 is needed", fix)
            if sound.subtype not in _BYTES:
                why = f"has samples of the sort {sound.subtype}; {', '.join(_BYTES)} are known"
                raise _unusable(path, why, "convert it, for instance: sox in.wav -b 16 out.wav")
            _insist_on_all(
                path, sound.frames, promised // _BYTES[sound.subtype] if promised else sound.frames
            )
            yield sound


def _promised(path: Path, raw: io.FileIO) -> int | None:
    """Return how many bytes of samples a WAV file says it has, and stand behind it.

    None if it does not say.
    """
    begins = raw.read(4)
    if begins == b"fLaC":
        return None
    if begins != b"RIFF":
        raise _unusable(path, "is no WAV file, nor FLAC (it begins otherwise)")
    raw.seek(12)
    while len(chunk := raw.read(8)) == 8:
        length = int.from_bytes(chunk[4:], "little")
        if chunk[:4] == b"data":
            return length if length < _STREAMED else None
        raw.seek(length + length % 2, os.SEEK_CUR)
    raise _unusable(path, "is no WAV file that can be read (it ends too early)")


def _until_its_end(raw: io.FileIO) -> io.BytesIO:
    """Return a WAV file that promises no samples with a promise of too many.

    Libsndfile reads what is there.
    """
    samples = raw.read()
    head = os.pread(raw.fileno(), raw.tell() - len(samples) - 4, 0)
    return io.BytesIO(head + b"\xff" * 4 + samples)


def _decoded(path: Path, sound: Any) -> NDArray[np.float32]:
    blocks = [np.zeros(0, dtype=np.float32)]
    try:
        while len(block := sound.read(_BLOCK, dtype="float32")):
            blocks.append(block)
    except _soundfile().LibsndfileError as error:
        raise _unusable(
            path, f"is cut short, damaged or written into a pipe ({error.error_string})"
        ) from error
    found = np.concatenate(blocks)
    _insist_on_all(path, len(found), sound.frames)
    return found


def _insist_on_all(path: Path, there: int, promised: int) -> None:
    if there < promised or not there:
        raise _unusable(path, f"ends after {there} of {promised} samples")


def _unusable(
    path: Path, why: str, fix: str = "take it from its source again, or leave its row out."
) -> ValueError:
    return ValueError(f"{path} {why}.\nFix: {fix}")


def write_wav(
    path: Path, wave: Tensor | NDArray[np.float32], sample_rate: int = SAMPLE_RATE
) -> None:
    """Write a mono WAV file of 16 bits; samples beyond -1 to 1 are clipped.

    Args:
        path: File; its folder is made.
        wave: Shape ``(samples,)``.
        sample_rate: Samples in a second.

    Raises:
        OSError: The disk refuses, or soundfile is not installed.
    """
    samples = (np.asarray(wave, dtype=np.float64).clip(-1, 1) * 32767).round().astype(np.int16)
    written = io.BytesIO()  # libsndfile would not say why a disk refuses
    _soundfile().write(written, samples, sample_rate, format="WAV", subtype="PCM_16")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written.getvalue())
