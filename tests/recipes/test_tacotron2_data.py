"""The data of the recipe Tacotron 2.

Sound, text, folders, and what is said about those that cannot be used.
"""

from __future__ import annotations

import io
import shutil
import struct
import tracemalloc
import wave as wave_files
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from recipes.tacotron2.audio import MelSettings, griffin_lim, log_mel, mel_filters
from recipes.tacotron2.folder import SpeechFolder
from recipes.tacotron2.train import CLIPS
from recipes.wav import check_wav, read_wav, write_wav

# --- sound and text


def test_log_mel_is_that_of_its_definition() -> None:
    """One frame, computed by the definition of the Fourier transform, and filters of area 1."""
    settings, wave = (
        MelSettings(),
        torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 0.1,
    )
    found = log_mel(wave, settings)
    assert found.shape == (4096 // 256 + 1, 80)
    place = np.arange(1024)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * place / 1024)
    piece = wave.numpy()[8 * 256 - 512 : 8 * 256 + 512].astype(np.float64) * window
    spectrum = np.abs(np.exp(-2j * np.pi * np.outer(np.arange(513), place) / 1024) @ piece)
    filters = mel_filters(settings).double().numpy()
    assert np.allclose(np.log((filters @ spectrum).clip(1e-5)), found[8].numpy(), atol=1e-4)
    assert np.allclose(filters[40:].sum(axis=1) * 22050 / 1024, 1, atol=0.02)
    assert torch.equal(log_mel(torch.zeros(1024)), torch.full((5, 80), 1e-5).log())


def test_griffin_lim_gives_a_wave_with_this_spectrogram() -> None:
    """Of real speech, back and forth.

    The spectrogram of the wave is near the one that it was made from.
    """
    true = log_mel(read_wav(CLIPS / "wavs" / "clip-0.wav"))
    again = log_mel(griffin_lim(true, rounds=30))
    assert again.shape == true.shape
    assert float((again.exp() - true.exp()).norm() / true.exp().norm()) < 0.25
    assert torch.equal(griffin_lim(true, rounds=2), griffin_lim(true, rounds=2))


def _riff(
    path: Path, form: bytes, data: bytes, *, length: int | None = None, before: bytes = b""
) -> None:
    """Write a WAV file of given bytes, which need not fit together."""
    chunks = b"WAVEfmt " + struct.pack("<L", len(form)) + form + before
    chunks += b"data" + struct.pack("<L", len(data) if length is None else length) + data
    path.write_bytes(b"RIFF" + struct.pack("<L", len(chunks)) + chunks)


def _form(tag: int, bits: int, *, extensible: bool = False, rate: int = 22050) -> bytes:
    width = bits // 8
    plain = struct.pack(
        "<HHLLHH", 0xFFFE if extensible else tag, 1, rate, rate * width, width, bits
    )
    rest = bytes.fromhex("0000 0000 1000 8000 00aa 0038 9b71")  # of the name of a format
    return plain + (struct.pack("<HHLH", 22, bits, 4, tag) + rest if extensible else b"")


def test_samples_of_16_bits_are_written_and_read_to_the_bit(tmp_path: Path) -> None:
    """Every value there is, and FLAC has the same.

    Committed digests rest on value / 32768 and round(32767 x).
    """
    values = np.arange(-(2**15), 2**15).astype(np.int16)
    path, flac = tmp_path / "a.wav", tmp_path / "a.flac"
    _riff(path, _form(1, 16), values.astype("<i2").tobytes())
    soundfile.write(flac, values, 22050)
    for each in (path, flac):
        assert check_wav(each) == len(values)
        assert read_wav(each).tobytes() == (values / 2.0**15).astype(np.float32).tobytes()
    wave = np.linspace(-1.2, 1.2, 5001)
    write_wav(path, wave)
    written = (wave.clip(-1, 1) * 32767).round().astype("<i2").tobytes()
    assert path.read_bytes()[36:] == b"data" + struct.pack("<L", len(written)) + written


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _stereo(path: Path) -> None:
    with wave_files.open(str(path), "wb") as file:
        file.setparams((2, 2, 22050, 2, "NONE", ""))
        file.writeframes(struct.pack("<4h", 1, 2, 3, 4))


def _flac(path: Path, spoil: Callable[[bytes], bytes]) -> None:
    """Write a FLAC file that was spoilt.

    How many samples it claims stands in half of byte 21 and up to byte 25.
    """
    noise = np.random.default_rng(0).integers(-3000, 3000, 20_000).astype(np.int16)
    whole = io.BytesIO()
    soundfile.write(whole, noise, 22050, format="FLAC")
    path.write_bytes(spoil(whole.getvalue()))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(b"no sound at all"), "is no WAV file"),
        (lambda path: path.write_bytes(b""), "is no WAV file"),
        (_truncated, "of 4000 samples"),
        (_stereo, "has 2 channels"),
        (
            lambda path: write_wav(path, torch.zeros(4000), 16000),
            "has 16000 samples a second; 22050 are needed",
        ),
        (lambda path: write_wav(path, torch.zeros(0)), "ends after 0 of 0 samples"),
        (
            lambda path: _riff(path, _form(7, 8), bytes(9)),
            "has samples of the sort ULAW; PCM_S8, PCM_U8, PCM_16",
        ),
        (
            lambda path: _riff(path, _form(3, 32), struct.pack("<2f", 0, float("nan"))),
            "are no finite numbers",
        ),
        (
            lambda path: _riff(path, b"", bytes(9)),
            "is no WAV file, nor FLAC, that can be read .*'fmt ' chunk",
        ),
        (
            lambda path: _riff(
                path, _form(1, 16), b"", before=b"LIST" + struct.pack("<L", 2**32 - 2)
            ),
            "too early",
        ),
        (
            lambda path: _riff(path, _form(1, 16), bytes(200), length=400),
            "ends after 100 of 200 samples",
        ),
        (lambda path: _flac(path, lambda whole: whole[: len(whole) // 2]), "is cut short, damaged"),
        (
            lambda path: _flac(path, lambda whole: whole[:21] + b"\xff" * 5 + whole[26:]),
            "is cut short, damaged",
        ),
        (
            lambda path: _flac(path, lambda whole: whole[:21] + b"\xf0" + bytes(4) + whole[26:]),
            "written into a pipe",
        ),
    ],
)
def test_a_file_that_is_no_usable_sound_is_refused(
    tmp_path: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    """The message names the file, what is wrong and what to do."""
    path = tmp_path / "a.wav"
    write_wav(path, torch.zeros(4000))
    spoil(path)
    with pytest.raises(ValueError, match=said) as caught:
        read_wav(path)
    assert str(path) in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_header_that_lies_takes_no_memory(tmp_path: Path) -> None:
    """WAV and FLAC files of some kilobytes that claim gigabytes are read or refused in a few
    megabytes.
    """
    lies = [tmp_path / "a.wav", tmp_path / "a.flac"]
    _riff(lies[0], _form(1, 16), bytes(2000), length=0x7FFFFFFE)
    _flac(lies[1], lambda whole: whole[:21] + b"\xff" * 5 + whole[26:])
    tracemalloc.start()
    try:
        assert len(read_wav(lies[0])) == 1000
        with pytest.raises(ValueError, match="damaged"):
            read_wav(lies[1])
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


# --- folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the clips that come with the recipe."""
    return Path(shutil.copytree(CLIPS, tmp_path / "clips"))


def _row(folder: Path, old: str, new: str) -> None:
    metadata = folder / "metadata.csv"
    metadata.write_text(metadata.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: (folder / "wavs" / "clip-3.wav").unlink(),
            r"line 4: there is no .*clip-3\.wav",
        ),
        (
            lambda folder: _row(
                folder, "clip-2|A dog finds the box.|a dog finds the box.", "clip-2|...|..."
            ),
            "line 3: the text '...' of 'clip-2' has no letter in it",
        ),
        (lambda folder: _row(folder, "clip-1|", "clip-1"), "line 2: the name"),
        (
            lambda folder: _row(folder, "clip-1|", "clip-0|"),
            "names that occur more than once: clip-0",
        ),
        (lambda folder: _row(folder, "clip-1|", "../clip-1|"), "is no name of a file in wavs/"),
        (lambda folder: _row(folder, "|", ","), "line 1 has 1 columns"),
        (
            lambda folder: write_wav(folder / "wavs" / "clip-5.wav", torch.zeros(9000), 16000),
            "line 6: .* has 16000 samples a second; 22050 are needed",
        ),
        (lambda folder: (folder / "metadata.csv").write_text(""), "it has no rows"),
        (lambda folder: (folder / "metadata.csv").write_bytes(b"a|\xff|b"), "is not UTF-8"),
        (lambda folder: (folder / "metadata.csv").unlink(), "holds no metadata.csv"),
    ],
)
def test_a_folder_with_mistakes_is_refused_with_its_lines(
    folder: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    """Before anything is computed, the message names line and mistake and says what to do."""
    spoil(folder)
    with pytest.raises(ValueError, match=said if "the name" not in said else "line 2") as caught:
        SpeechFolder(folder)
    assert str(caught.value).count("Fix: ") == 1
