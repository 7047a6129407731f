"""Features from a file against features computed anew, and what kills and flipped bits do to the file.

How: 1 to 10 seconds of 22.05 kHz sound, in memory, so that no decoding is counted; log-mel features as speech models
use them: 80 mels, n_fft 1024, hop 256, `torch.stft` and a mel filterbank, one thread. Random items are read from a
`FeatureCache` (every byte verified) and computed anew in turns, in random order; each pair gives one ratio of CPU
time.

Kills: a forked child builds with 2 workers, the dataset drawing random numbers; it is killed by SIGKILL at a random
moment of the time that a build takes, up to three times, then the build is let to its end. Counted are the rounds
whose file is that of an undisturbed build, to the last byte.

Flips: single random bits in the items of a finished file, and single random bits anywhere in it; counted are those
after which a wrong value was handed out without an error.

To reach: reading takes at most 1/5 of computing; 50 of 50 rounds equal; 200 of 200 flips found.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from recipes.features.cache import FeatureCache

from benchmarks.forks import Child, in_a_fork, single_threaded
from benchmarks.results_file import Result, read_options
from holdfast.core.errors import LoaderError
from holdfast.testing import flip_bit

_RATE = 22_050
_N_FFT, _HOP, _MELS = 1024, 256, 80
_KILL_ITEMS = 300
_MAX_KILLS = 3
_DATA_AT = 65_536


class Sounds:
    """Noise of 1 to 10 seconds, shape ``(samples,)``, float32."""

    def __init__(self, length: int) -> None:
        chance = torch.Generator().manual_seed(3)
        seconds = torch.rand(length, generator=chance) * 9 + 1
        self.sounds = [torch.randn(int(_RATE * each), generator=chance) for each in seconds.tolist()]

    def __len__(self) -> int:
        return len(self.sounds)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sounds[index]


class RandomFrames:
    """Sound of random length, drawn anew at each read."""

    def __len__(self) -> int:
        return _KILL_ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(random.randrange(_N_FFT, 8 * _N_FFT))


class LogMel:
    """Log-mel features, shape ``(mels, frames)``, float32: triangles on the mel scale (HTK)."""

    def __init__(self) -> None:
        self.window = torch.hann_window(_N_FFT)
        highest = 2595 * math.log10(1 + _RATE / 2 / 700)
        edges = 700 * (10 ** (torch.linspace(0, highest, _MELS + 2) / 2595) - 1)
        bins = torch.linspace(0, _RATE / 2, _N_FFT // 2 + 1)
        rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
        self.filters = torch.minimum(rising, falling).clamp(min=0)

    def __call__(self, sound: torch.Tensor) -> torch.Tensor:
        """Return the features of one sound."""
        spectrum = torch.stft(sound, _N_FFT, _HOP, window=self.window, return_complex=True).abs()
        return (self.filters @ spectrum).clamp(min=1e-5).log()


def cpu_seconds(work: partial[object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def measure_reading(result: Result, folder: Path, items: int, reads: int) -> None:
    sounds, fn, chance = Sounds(items), LogMel(), random.Random(1)
    cache = FeatureCache.build(sounds, fn, folder / "mel.h5", version=1, num_workers=0, progress=False)
    ratios, bytes_read = [], []
    for _ in range(reads):
        index = chance.randrange(items)
        ways = {
            "compute": partial(lambda index: fn(sounds[index]), index),
            "read": partial(cache.__getitem__, index),
        }
        seconds = {name: cpu_seconds(ways[name]) for name in chance.sample(list(ways), len(ways))}
        ratios.append(seconds["read"] / seconds["compute"])
        bytes_read.append(cache[index].nbytes / 1e3)
        if not torch.equal(cache[index], fn(sounds[index])):
            raise RuntimeError(f"item {index} is not what was computed")
    result.add_samples("reading an item / computing it, CPU time", "ratio", ratios, at_most=0.2)
    result.add_samples("computing an item / reading it, CPU time", "ratio", [1 / ratio for ratio in ratios], digits=1)
    result.add_samples("size of an item", "kB", bytes_read, digits=1)


def build_in_a_child(path: Path) -> int:
    cache = FeatureCache.build(RandomFrames(), LogMel(), path, version=1, num_workers=2, progress=False)
    return len(list(cache))  # each is verified


def measure_kills(result: Result, folder: Path, rounds: int) -> None:
    started = time.perf_counter()
    if in_a_fork(partial(build_in_a_child, folder / "undisturbed.h5")).value != _KILL_ITEMS:
        raise RuntimeError("a build that nothing happens to does not end")
    seconds, chance = time.perf_counter() - started, random.Random(2)
    expected = (folder / "undisturbed.h5").read_bytes()
    equal, kills, unfinished = 0, 0, 0
    for number in range(rounds):
        path = folder / f"{number}.h5"
        for _ in range(chance.randint(1, _MAX_KILLS)):
            child = Child(partial(build_in_a_child, path))
            time.sleep(chance.random() * seconds)
            child.kill()
            kills += child.finish().signal == "SIGKILL"
            unfinished += path.with_name(f"{path.name}.building").exists()
        fate = in_a_fork(partial(build_in_a_child, path))
        equal += fate.value == _KILL_ITEMS and path.read_bytes() == expected
        if fate.value is None:
            print(f"    round {number}: {fate.error or fate.how}")
        path.unlink(missing_ok=True)
    result.add_count("kills that fell into a build, and left a part of it", unfinished, kills)
    result.add_count("rounds of kills whose file is that of an undisturbed build", equal, rounds, expected=rounds)


def read_all(path: Path) -> list[torch.Tensor | None]:
    """Return every item; None for each that is refused."""
    found: list[torch.Tensor | None] = []
    with FeatureCache(path) as cache:
        for index in range(len(cache)):
            try:
                found.append(cache[index])
            except LoaderError:
                found.append(None)
    return found


def measure_flips(result: Result, folder: Path, flips: int) -> None:
    path, chance = folder / "flips.h5", random.Random(3)
    with FeatureCache.build(Sounds(8), LogMel(), path, version=1, num_workers=0, progress=False) as cache:
        good = list(cache)
    data_bytes = sum(item.nbytes for item in good)
    found, quiet = 0, 0
    for _ in range(flips):
        bit = 8 * _DATA_AT + chance.randrange(8 * data_bytes)
        flip_bit(path, bit)
        items = read_all(path)
        found += items.count(None) == 1 and all(
            a is None or torch.equal(a, b) for a, b in zip(items, good, strict=True)
        )
        flip_bit(path, bit)
        bit = chance.randrange(8 * path.stat().st_size)
        flip_bit(path, bit)
        try:
            items = read_all(path)
            quiet += any(a is not None and not torch.equal(a, b) for a, b in zip(items, good, strict=True))
        except LoaderError:
            pass
        flip_bit(path, bit)
    result.add_count(
        "flipped bits in items that are found, and no other item is refused", found, flips, expected=flips
    )
    result.add_count(
        "flipped bits anywhere in the file that give a wrong value without an error", quiet, flips, expected=0
    )


def main() -> None:
    single_threaded()
    options = read_options("feature_cache", __doc__ or "")
    items, reads, rounds, flips = (20, 60, 4, 20) if options.quick else (150, 1500, 50, 200)
    parameters = {"items": items, "reads": reads, "rounds": rounds, "flips": flips}
    result = Result(options=options, parameters={**parameters, "items_of_a_killed_build": _KILL_ITEMS})
    with tempfile.TemporaryDirectory() as folder:
        measure_reading(result, Path(folder), items, reads)
        measure_kills(result, Path(folder), rounds)
        measure_flips(result, Path(folder), flips)
    result.notes.append("The file lies in the page cache; a cold disk adds its own time to both ways of reading.")
    result.write()


if __name__ == "__main__":
    main()
