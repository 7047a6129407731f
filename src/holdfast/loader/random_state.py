"""Capture and restore the random state of this process: Python, NumPy, and torch on all devices.

The state is captured at each step and for each batch that is loaded without workers, so capturing
must be fast. Reading the state of Python's generator takes 10 microseconds, and that of NumPy's 28.
It is much faster to compare the raw memory of a generator with that at the last reading, which
shows whether anything was drawn in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

# The types of random generators that a user's program may hold.
GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# The Mersenne Twister MT19937: 624 words of 4 bytes, and the position in them.
_MT19937_BYTES = 624 * 4 + 4

# NumPy's legacy seed has 32 bits.
_MASK_32_BITS = 0xFFFFFFFF

_torch_state = torch.default_generator.get_state
_set_torch_state = torch.default_generator.set_state
_seed_torch = torch.default_generator.manual_seed


@dataclass(slots=True)
class RandomState:
    """The global random state of a process.

    Args:
        python: State of ``random``.
        numpy: State of ``numpy.random``.
        cpu: State of torch on the CPU; uint8, shape ``(5056,)``.
        devices: State of each device's default generator, by name, such as ``"cuda:0"``; uint8, on
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
        """Return the state that `to_tree` was called on, after checking that it can be restored.

        Raises:
            KeyError, TypeError, ValueError: If the tree is not a random state.
        """
        random.Random().setstate(tree["python"])  # noqa: S311 - nothing is drawn
        # A dict is the state of a generator other than NumPy's default one.
        if not isinstance(tree["numpy"], dict):
            np.random.RandomState().set_state(tree["numpy"])
        try:
            torch.Generator().set_state(tree["cpu"])
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return cls(tree["python"], tree["numpy"], tree["cpu"], tree["devices"])


def capture(devices: Sequence[torch.device] = ()) -> RandomState:
    """Return the random state of this process, without waiting for a device.

    This takes about 5 microseconds, plus 40 if the generators of Python or NumPy were used since
    the last call.

    Args:
        devices: Accelerators whose state is included.
    """
    device_states = {}
    for device in devices:
        device_states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return RandomState(_python_state(), _numpy_state(), _torch_state(), device_states)


def restore(state: RandomState) -> None:
    """Restore what `capture` returned; the state of a device that no longer exists is ignored."""
    global _numpy_reading
    if _python_state() is not state.python:
        random.setstate(state.python)
    if _numpy_state() is not state.numpy:
        np.random.set_state(state.numpy)
        # The state may include the second of a pair of normal numbers, which the raw memory does
        # not show.
        _numpy_reading = _NO_READING
    _set_torch_state(state.cpu)
    for name, device_state in state.devices.items():
        device = torch.device(name)
        module = torch.get_device_module(device)
        if device.index is None or device.index < module.device_count():
            module.set_rng_state(device_state, device)


def of_another_rank(state: RandomState, rank: int) -> RandomState:
    """Return a state for a rank that did not exist when a checkpoint was saved on fewer ranks.

    Args:
        state: The state of a rank in the checkpoint.
        rank: The new rank. Each gets a different state.
    """
    before = capture()
    restore(state)
    seed = int(torch.randint(2**31, ())) + rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    state_of_rank = capture()
    restore(before)
    return state_of_rank


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Restore the random state of the CPU when the context ends, however it ends."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


# --- reading the states quickly -------------------------------------------------------------------


class _CachedState(NamedTuple):
    """A state, and the raw memory of the generator at the time when the state was read."""

    memory: Any
    state: Any


_NO_READING = _CachedState(None, None)

# The generator behind ``random.random()``.
_PYTHON_GENERATOR: Any = random._inst

# Its memory, after the header of the object: the position and the words.
_python_memory = (ctypes.c_char * _MT19937_BYTES).from_address(
    id(_PYTHON_GENERATOR) + object.__basicsize__
)
_python_reading = _NO_READING

# NumPy's global generator, and its memory.
_numpy_memory: tuple[Any, Any] = (None, None)
_numpy_reading = _NO_READING


def _layout_is_known() -> bool:
    """Return whether Python's generator has the memory layout of every CPython so far."""
    if sys.implementation.name != "cpython":
        return False
    if type(_PYTHON_GENERATOR).__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return False
    position, *words = struct.unpack("=I624I", _python_memory.raw)
    return bool((*words, position) == random.getstate()[1])


_READS_RAW = _layout_is_known()


def _python_state() -> Any:
    """Return Python's global state; the same object as before if nothing was drawn since."""
    global _python_reading
    if not _READS_RAW:
        return random.getstate()
    # The second half of a pair of normal numbers is an attribute, outside this memory.
    memory = (_python_memory.raw, _PYTHON_GENERATOR.gauss_next)
    if memory != _python_reading.memory:
        _python_reading = _CachedState(memory, random.getstate())
    return _python_reading.state


def _numpy_state() -> Any:
    """Return NumPy's global state; the same object as before if nothing was drawn since."""
    global _numpy_reading, _numpy_memory
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    if generator is not _numpy_memory[0]:
        address = generator.ctypes.state_address
        _numpy_memory = (generator, (ctypes.c_char * _MT19937_BYTES).from_address(address))
    memory = _numpy_memory[1].raw
    # The memory does not show the second half of a pair of normal numbers. So a state that includes
    # one, according to its fourth field, is always read again.
    holds_normal = _numpy_reading.state is not None and _numpy_reading.state[3]
    if memory != _numpy_reading.memory or holds_normal:
        _numpy_reading = _CachedState(memory, np.random.get_state())
    return _numpy_reading.state


# --- seeding --------------------------------------------------------------------------------------


def seed_cpu(seed: int) -> None:
    """Seed python, numpy and torch on the CPU.

    ``torch.manual_seed`` is not used: it takes 75 microseconds, and until CUDA is used, each call
    queues another callback.

    Args:
        seed: From 0 to 2**63 - 1. NumPy uses the lowest 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed & _MASK_32_BITS)
    _seed_torch(seed)


class LazySeeding:
    """Seeds the generators of Python and NumPy only once something is known to draw from them.

    This saves 6 microseconds per sample, but samples that were made before `was_drawn` first
    returns True have to be made again. torch's generator is always seeded, because a dataset may
    call ``torch.initial_seed()``, which leaves no trace.

    Args:
        draws: Whether something is known to draw from the generator of Python or NumPy.
    """

    def __init__(self, draws: bool = False) -> None:  # noqa: FBT001, FBT002 - one flag
        self.draws = draws

    def seed(self, seed: int) -> None:
        """Seed the generators that are known to be used."""
        _seed_torch(seed)
        if self.draws:
            random.seed(seed)
            np.random.seed(seed & _MASK_32_BITS)

    def generator_states(self) -> tuple[Any, Any]:
        """Return the states of the generators of Python and NumPy, for `was_drawn`."""
        if self.draws:
            return None, None
        return _python_state(), _numpy_state()

    def was_drawn(self, before: tuple[Any, Any]) -> bool:
        """Return whether a generator that was not seeded has been used.

        If so, both are seeded from now on.

        Args:
            before: What `generator_states` returned before.
        """
        if self.draws:
            return False
        python_before, numpy_before = before
        python_now, numpy_now = self.generator_states()
        # The same object means that nothing was drawn.
        self.draws = python_now is not python_before or numpy_now is not numpy_before
        return self.draws


class SeededGenerator(torch.Generator):
    """A generator that is seeded before each use, so that its state need not be sent to workers.

    Pickling torch's own generator would end the worker.
    """

    def __reduce__(self) -> Any:
        return SeededGenerator, ()
