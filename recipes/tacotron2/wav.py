"""WAV files of one channel: PCM of 8 to 32 bits and floating point, also in the extensible format, become samples.

Python's own ``wave`` reads no floating point, and before version 3.12 not what ffmpeg and SoX write for 24 bits.
"""

from __future__ import annotations

import os
import struct
import wave as wave_files
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_RATE = 22050
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE  # tags of formats
_KNOWN = {(_PCM, 1), (_PCM, 2), (_PCM, 3), (_PCM, 4), (_FLOAT, 4), (_FLOAT, 8)}  # with bytes of a sample
_LOUDEST = {1: 2.0**7, 2: 2.0**15, 3: 2.0**23, 4: 2.0**31}  # by bytes of a sample
_UNTIL_THE_END = 0xFFFFFFFF  # the length of data that programs write into a pipe
_FORMAT_BYTES = 26  # of the description: all that is looked at


class WrongSampleRateError(ValueError):
    """A file has another sample rate than all are to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WavHeader:
    """What a file says about itself, and how much of it is there.

    Args:
        tag: Of the format of its samples.
        width: Bytes of a sample.
        sample_rate: Samples in a second.
        channels: Of them.
        samples: Of each channel, as it says.
        there: Of each channel, that are in the file.
        start: Byte at which they begin.
    """

    tag: int
    width: int
    sample_rate: int
    channels: int
    samples: int
    there: int
    start: int


def check_wav(path: Path, sample_rate: int = SAMPLE_RATE) -> WavHeader:
    """Return the header of a file that can be read, as far as that is known without reading its samples.

    Raises:
        WrongSampleRateError: It has another sample rate.
        ValueError: What else is wrong with it, and what to do: it is no WAV file, cut short, empty or not mono.
        OSError: It cannot be read.
    """
    header = _header(path)
    if header.sample_rate != sample_rate:
        raise WrongSampleRateError(
            f"{path} has {header.sample_rate} samples a second; {sample_rate} are needed.\n"
            f"Fix: resample all files once, for instance: sox in.wav -r {sample_rate} -c 1 -b 16 out.wav"
        )
    if header.channels != 1:
        fix = "mix it down, for instance: sox in.wav -c 1 out.wav"
        raise _unusable(path, f"has {header.channels} channels; 1 is needed", fix)
    if (header.tag, header.width) not in _KNOWN:
        why = f"has samples of {8 * header.width} bits in format {header.tag}, which are not known here"
        raise _unusable(path, why, "convert it, for instance: sox in.wav -b 16 out.wav")
    if header.there < header.samples or not header.samples:
        raise _unusable(path, f"ends after {header.there} of {header.samples} samples")
    return header


def _header(path: Path) -> WavHeader:
    form = b""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        riff = file.read(12)
        if riff[:4] != b"RIFF" or riff[8:] != b"WAVE":
            raise _unusable(path, "is no WAV file that can be read (it begins otherwise)")
        name = b""
        while name != b"data":
            chunk = file.read(8)
            if len(chunk) < 8:
                raise _unusable(path, "is no WAV file that can be read (it ends too early)")
            name, length = struct.unpack("<4sL", chunk)
            after = file.tell() + length + length % 2
            if name == b"fmt ":
                form = file.read(min(length, _FORMAT_BYTES))
            if name != b"data":
                file.seek(after)
        start = file.tell()
    if len(form) < 16:
        raise _unusable(path, "is no WAV file that can be read (it does not say what its samples are)")
    tag, channels, rate, _, _, bits = struct.unpack("<HHLLHH", form[:16])
    if tag == _EXTENSIBLE and len(form) == _FORMAT_BYTES:
        (tag,) = struct.unpack("<H", form[24:])
    width, there = (bits + 7) // 8, max(0, size - start)
    each = max(1, width * channels)
    said = there if length == _UNTIL_THE_END else length
    return WavHeader(
        tag=tag,
        width=width,
        sample_rate=rate,
        channels=channels,
        samples=said // each,
        there=there // each,
        start=start,
    )


def read_wav(path: Path, sample_rate: int = SAMPLE_RATE) -> NDArray[np.float32]:
    """Return the samples of a mono WAV file, shape ``(samples,)``; PCM from -1 to 1.

    Raises:
        ValueError: As `check_wav`, or the samples are no finite numbers.
        OSError: It cannot be read.
    """
    header = check_wav(path, sample_rate)
    with path.open("rb") as file:
        file.seek(header.start)
        data = file.read(header.samples * header.width)
    if header.tag == _PCM:
        return _of_pcm(data, header.width)
    with np.errstate(over="ignore"):  # it is looked at
        found = np.frombuffer(data, dtype=f"<f{header.width}").astype(np.float32)
    if not np.isfinite(found).all():
        raise _unusable(path, "holds samples that are no finite numbers")
    return found


def _of_pcm(data: bytes, width: int) -> NDArray[np.float32]:
    if width == 1:  # 8 bits are unsigned
        wide = np.frombuffer(data, dtype=np.uint8).astype(np.float64) - 128
    elif width == 3:
        octets = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
        padded = np.zeros((len(octets), 4), dtype=np.uint8)
        padded[:, 1:] = octets  # as the upper three bytes of 32 bits, so that the sign is right
        wide = padded.reshape(-1).view("<i4").astype(np.float64) / 256
    else:
        wide = np.frombuffer(data, dtype=f"<i{width}").astype(np.float64)
    return (wide / _LOUDEST[width]).astype(np.float32)


def _unusable(path: Path, why: str, fix: str = "take it from its source again, or leave its row out.") -> ValueError:
    return ValueError(f"{path} {why}.\nFix: {fix}")


def write_wav(path: Path, wave: Tensor | NDArray[np.float32], sample_rate: int = SAMPLE_RATE) -> None:
    """Write a mono WAV file of 16 bits; samples beyond -1 to 1 are clipped.

    Args:
        path: File; its folder is made.
        wave: Shape ``(samples,)``.
        sample_rate: Samples in a second.
    """
    samples = np.asarray(wave, dtype=np.float64).clip(-1, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave_files.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes((samples * 32767).round().astype("<i2").tobytes())
