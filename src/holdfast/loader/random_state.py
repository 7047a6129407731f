"""The random state of this process: python, numpy, torch on the CPU and on devices, captured and put back.

The generators that belong to nobody but a user's own code (a ``torch.Generator``, a ``random.Random``) are not
seen here; pass them through ``Guard(state=...)`` to have them saved.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_MT19937_BYTES = 624 * 4 + 4  # the words and the position in them


@dataclass(frozen=True, slots=True)
class RandomState:
    """All global random state.

    Args:
        python: As ``random.getstate()``.
        numpy: As ``numpy.random.get_state()``.
        cpu: As ``torch.get_rng_state()``, shape ``(5056,)``, uint8.
        devices: State of each device's default generator, by name such as ``"cuda:0"``; uint8, on the CPU.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    devices: dict[str, torch.Tensor] = field(default_factory=dict)

    def to_tree(self) -> dict[str, Any]:
        """Return the state as containers, numbers and tensors, for a checkpoint."""
        return {"python": self.python, "numpy": self.numpy, "cpu": self.cpu, "devices": self.devices}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RandomState:
        """Rebuild a state from `to_tree`."""
        return cls(tree["python"], tree["numpy"], tree["cpu"], tree["devices"])


def capture(devices: Sequence[torch.device] = ()) -> RandomState:
    """Return the random state of this process and of these accelerator devices.

    Cost: about 5 microseconds, and 40 more if the generators of python and numpy were used since the last call. No
    device sync: torch keeps a device's state on the host.
    """
    return RandomState(
        _python_state(),
        _numpy_state(),
        torch.get_rng_state(),
        {str(device): torch.get_device_module(device).get_rng_state(device) for device in devices},
    )


def restore(state: RandomState) -> None:
    """Put back what `capture` returned; a device that is not here any more is passed over."""
    global _seen
    if _python_state() is not state.python:
        random.setstate(state.python)
    if _numpy_state() is not state.numpy:
        np.random.set_state(state.numpy)
        _seen = b"", None  # the half of a pair that came back with it does not show in the raw memory
    torch.set_rng_state(state.cpu)
    for name, device_state in state.devices.items():
        device = torch.device(name)
        module = torch.get_device_module(device)
        if device.index is None or device.index < module.device_count():
            module.set_rng_state(device_state, device)


_INSTANCE: Any = random._inst  # the generator behind random.random()
_seen_python: tuple[Any, Any] = (None, None)


def _raw_python_state() -> bytes:
    """Return the memory of python's global generator: its position and 624 words, after the object's header."""
    return ctypes.string_at(id(_INSTANCE) + object.__basicsize__, _MT19937_BYTES)


def _layout_is_known() -> bool:
    """Say whether that memory is what `random.getstate` shows, as in every CPython so far."""
    if sys.implementation.name != "cpython" or type(_INSTANCE).__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return False
    words = struct.unpack("=I624I", _raw_python_state())
    return bool((*words[1:], words[0]) == random.getstate()[1])


def _python_state() -> Any:
    """Return python's global state; the object that was returned last if nothing was drawn since.

    Its tuple of 625 numbers takes 10 microseconds and 20 KB to make, so first the generator's raw memory is compared.
    """
    global _seen_python
    if not _READS_RAW:
        return random.getstate()
    key = _raw_python_state(), _INSTANCE.gauss_next
    if key != _seen_python[0]:
        _seen_python = key, random.getstate()
    return _seen_python[1]


_READS_RAW = _layout_is_known()
_seen: tuple[bytes, Any] = (b"", None)


def _numpy_state() -> Any:
    """Return numpy's global state; the object that was returned last if nothing was drawn since.

    Reading it takes numpy 28 microseconds, so first its raw memory is compared. That misses one thing, the second
    half of a pair of normal numbers, so a state that holds one is always read anew.
    """
    global _seen
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    seen_raw, seen_state = _seen
    holds_normal = seen_state is not None and seen_state[3]
    if raw != seen_raw or holds_normal:
        _seen = raw, np.random.get_state()
    return _seen[1]


_seed_torch = torch.default_generator.manual_seed


def seed_cpu(seed: int) -> None:
    """Seed python, numpy and torch on the CPU.

    Args:
        seed: 0 to 2**63 - 1.

    ``torch.manual_seed`` is not used: it costs 75 microseconds, and in a process that has not touched CUDA it
    queues one more callback at each call.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    _seed_torch(seed)


PYTHON, NUMPY = 1, 2
"""Generators that `LazySeeding` may spare, to be added up."""


class LazySeeding:
    """Seeds that spare the generators of python and numpy, as long as nothing draws from them.

    Seeding these two takes 6 microseconds, as much as many a sample. So they are left alone at first, and what has
    drawn from one all the same, which its position shows, has to be made again: once, since from then on that one is
    seeded each time. torch's is always seeded: a dataset may ask for ``torch.initial_seed()``, which leaves no trace.

    Args:
        draws: Generators that are known to be drawn from.
    """

    def __init__(self, draws: int = 0) -> None:
        self.draws = draws
        self._places: tuple[Any, Any, Any] | None = None
        self._begun = False
        self._clean: tuple[int, int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"draws": self.draws}  # addresses belong to a process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def seed(self, seed: int) -> None:
        """Seed what is known to be drawn from."""
        _seed_torch(seed)
        if self.draws & PYTHON:
            random.seed(seed)
        if self.draws & NUMPY:
            np.random.seed(seed & 0xFFFFFFFF)

    @property
    def seeder(self) -> Callable[[int], object]:
        """Return what seeds, until `was_surprised` is asked: torch's own function where it is the only one."""
        return self.seed if self.draws else _seed_torch

    def stand(self) -> tuple[int, int, int]:
        """Return where the generators of python and numpy stand, for `was_surprised`."""
        if not self._begun:
            self._begin()
        where = self.where()
        if where != self._clean:  # somebody else has drawn
            # The second half of a pair of normal numbers would be drawn without a trace.
            if not self.draws & PYTHON and _INSTANCE.gauss_next is not None:
                random.seed(0)
            if not self.draws & NUMPY and _numpy_state()[3]:
                np.random.seed(0)
            where = self._clean = self.where()
        return where

    def where(self) -> tuple[int, int, int]:
        """Return what tells where the generators stand: three zeros if that cannot be seen."""
        places = self._places
        return (0, 0, 0) if places is None else (places[0].value, places[1].value, places[2].value)

    def was_surprised(self, before: tuple[int, int, int]) -> bool:
        """Say whether a generator was drawn from that was not seeded; it will be from now on."""
        where = self.where()
        if where == before:
            return False
        found = (PYTHON if where[:2] != before[:2] else 0) | (NUMPY if where[2] != before[2] else 0)
        new = found & ~self.draws
        self.draws |= new
        return bool(new)

    def _begin(self) -> None:
        self._begun = True
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not (_READS_RAW and isinstance(generator, np.random.MT19937)):
            self.draws = PYTHON | NUMPY
            return
        # A position lies before python's words and behind numpy's. Each is read with the last word, since a generator
        # that has drawn all its words stands where it stood, with other words; and the first is alike after any seed.
        python = id(_INSTANCE) + object.__basicsize__
        self._places = (
            ctypes.c_uint32.from_address(python),
            ctypes.c_uint32.from_address(python + 624 * 4),
            ctypes.c_uint64.from_address(generator.ctypes.state_address + 623 * 4),
        )


class Borrowed:
    """The random state of this process, lent to what makes a batch and given back: as little as was touched.

    Args:
        lazy: What seeds meanwhile.
    """

    def __init__(self, lazy: LazySeeding) -> None:
        self._lazy = lazy
        self._cpu = torch.empty(0)
        self._others: tuple[Any, Any] | None = None
        self._where = (0, 0, 0)

    def take(self) -> None:
        """Remember the state."""
        where = self._lazy.where()
        if self._others is None or where != self._where:
            self._others, self._where = (_python_state(), _numpy_state()), where
        self._cpu = torch.default_generator.get_state()

    def give_back(self) -> None:
        """Put it back."""
        assert self._others is not None
        if self._lazy.where() == self._where and not self._lazy.draws:
            torch.default_generator.set_state(self._cpu)
        else:
            restore(RandomState(*self._others, self._cpu))
            self._others = None  # generators that are seeded all the time stand elsewhere each time


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Leave the CPU random state as it was, whatever happens inside."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


class SeededGenerator(torch.Generator):
    """A generator that is seeded before each use: a loader within a dataset, sent to a worker, need not send it.

    torch sends its state through a file that it has closed by then, and the worker dies of that.
    """

    def __reduce__(self) -> Any:
        return SeededGenerator, ()
