"""The random state of this process.

Python, numpy, torch on the CPU and on devices, captured and put back.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_MT19937_BYTES = 624 * 4 + 4  # the words and the position in them


@dataclass(slots=True)
class RandomState:
    """All global random state.

    Of ``random``, ``numpy.random``, and torch on the CPU (uint8, shape ``(5056,)``).

    `devices` has that of each device's default generator by name, such as ``"cuda:0"``; uint8, on
    the CPU.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    devices: dict[str, torch.Tensor] = field(default_factory=dict)

    def to_tree(self) -> dict[str, Any]:
        """Return the state as containers, numbers and tensors, for a checkpoint."""
        return {
            "python": self.python,
            "numpy": self.numpy,
            "cpu": self.cpu,
            "devices": self.devices,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RandomState:
        """Rebuild a state from `to_tree`; an error that `reading` knows if one would refuse it."""
        random.Random().setstate(tree["python"])  # noqa: S311
        if not isinstance(tree["numpy"], dict):  # that of another generator than numpy's usual one
            np.random.RandomState().set_state(tree["numpy"])
        try:
            torch.Generator().set_state(tree["cpu"])
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return cls(tree["python"], tree["numpy"], tree["cpu"], tree["devices"])


def capture(devices: Sequence[torch.device] = ()) -> RandomState:
    """Return the random state of this process and of these accelerator devices, without a device
    sync.

    Cost: about 5 microseconds, and 40 more if the generators of python and numpy were used since
    the last call.
    """
    of_devices = {}
    for device in devices:
        of_devices[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return RandomState(_python_state(), _numpy_state(), _torch_state(), of_devices)


def restore(state: RandomState) -> None:
    """Put back what `capture` returned; a device that is not here any more is passed over."""
    global _seen
    if _python_state() is not state.python:
        random.setstate(state.python)
    if _numpy_state() is not state.numpy:
        np.random.set_state(state.numpy)
        # The half of a pair that came back with it does not show in the raw memory
        _seen = b"", None
    _set_torch_state(state.cpu)
    for name, device_state in state.devices.items():
        device = torch.device(name)
        module = torch.get_device_module(device)
        if device.index is None or device.index < module.device_count():
            module.set_rng_state(device_state, device)


def of_another_rank(state: RandomState, rank: int) -> RandomState:
    """Return the state of a rank that a checkpoint of fewer or more knows nothing of.

    A stream of its own.
    """
    before = capture()
    restore(state)
    seed = int(torch.randint(2**31, ())) + rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    drawn = capture()
    restore(before)
    return drawn


_INSTANCE: Any = random._inst  # the generator behind random.random()
_seen_python: tuple[Any, Any] = (None, None)


# The memory of python's global generator: its position and 624 words, after the object's header.
_python_memory = (ctypes.c_char * _MT19937_BYTES).from_address(id(_INSTANCE) + object.__basicsize__)


def _layout_is_known() -> bool:
    """Say whether that memory is what `random.getstate` shows, as in every CPython so far."""
    if (
        sys.implementation.name != "cpython"
        or type(_INSTANCE).__basicsize__ < object.__basicsize__ + _MT19937_BYTES
    ):
        return False
    words = struct.unpack("=I624I", _python_memory.raw)
    return bool((*words[1:], words[0]) == random.getstate()[1])


def _python_state() -> Any:
    """Return python's global state, the same object if nothing was drawn since.

    Else it takes 10 us.
    """
    global _seen_python
    if not _READS_RAW:
        return random.getstate()
    key = _python_memory.raw, _INSTANCE.gauss_next
    if key != _seen_python[0]:
        _seen_python = key, random.getstate()
    return _seen_python[1]


_READS_RAW = _layout_is_known()
_seen: tuple[bytes, Any] = (b"", None)
_numpy_memory: tuple[Any, Any] = (None, None)  # the generator, and where its words are


def _numpy_state() -> Any:
    """Return numpy's global state, the same object if nothing was drawn since.

    Reading it takes 28 microseconds.

    The raw memory misses the second half of a pair of normal numbers, so a state that holds one is
    always read anew.
    """
    global _seen, _numpy_memory
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    if generator is not _numpy_memory[0]:
        _numpy_memory = (
            generator,
            (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address),
        )
    raw = _numpy_memory[1].raw
    seen_raw, seen_state = _seen
    holds_normal = seen_state is not None and seen_state[3]
    if raw != seen_raw or holds_normal:
        _seen = raw, np.random.get_state()
    return _seen[1]


_torch_state, _set_torch_state = (
    torch.default_generator.get_state,
    torch.default_generator.set_state,
)
_seed_torch = torch.default_generator.manual_seed


def seed_cpu(seed: int) -> None:
    """Seed python, numpy and torch on the CPU with 0 to 2**63 - 1.

    ``torch.manual_seed`` costs 75 microseconds, and queues one more callback at each call while
    CUDA is not touched.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    _seed_torch(seed)


class LazySeeding:
    """Seeds that spare the generators of python and numpy, 6 microseconds, as long as nothing draws
    from them.

    What was made until `was_drawn` finds that something has drawn has to be made again. torch's is
    always seeded: a dataset may ask for ``torch.initial_seed()``, which leaves no trace.
    """

    def __init__(self, draws: bool = False) -> None:  # noqa: FBT001, FBT002 - one flag
        self.draws = draws

    def seed(self, seed: int) -> None:
        """Seed what is known to be drawn from."""
        _seed_torch(seed)
        if self.draws:
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)

    def generator_states(self) -> tuple[Any, Any]:
        """Return the states of the two generators, for `was_drawn`."""
        return (None, None) if self.draws else (_python_state(), _numpy_state())

    def was_drawn(self, before: tuple[Any, Any]) -> bool:
        """Return whether a generator that was not seeded has been drawn from.

        Both are seeded from now on.
        """
        if self.draws:
            return False
        python, numpy = self.generator_states()
        self.draws = python is not before[0] or numpy is not before[1]
        return self.draws


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Leave the CPU random state as it was, whatever happens inside."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


class SeededGenerator(torch.Generator):
    """A generator that is seeded before each use.

    Its state need not be sent to a worker, which would die of that.
    """

    def __reduce__(self) -> Any:
        return SeededGenerator, ()
