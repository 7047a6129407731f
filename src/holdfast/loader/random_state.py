"""Capture and restore the random state of this process: Python, NumPy, and torch on all devices.

The state is captured at each step, and for each batch that is loaded without workers, so capturing
must be fast. Reading the state takes 10 microseconds for Python's generator and 28 for NumPy's. It
is much faster to compare the generator's raw memory with a copy from the last reading: if they are
equal, nothing was drawn in between, and the previous state is still valid.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

# The types of random generators that a user's program may use.
GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# Size of the state of the Mersenne Twister MT19937: 624 words and a position, of 4 bytes each.
_MT19937_BYTES = 624 * 4 + 4

# NumPy's legacy seeds have 32 bits.
_MASK_32_BITS = 0xFFFFFFFF

# The names of the generators on the CPU in messages.
_PYTHON = "Python"
_NUMPY = "NumPy"
_TORCH_CPU = "torch on the CPU"

_torch_state = torch.default_generator.get_state
_set_torch_state = torch.default_generator.set_state
_seed_torch = torch.default_generator.manual_seed


@dataclass(slots=True)
class RandomState:
    """The global random state of a process.

    Args:
        python: State of Python's ``random``.
        numpy: State of ``numpy.random``.
        cpu: State of torch's CPU generator, uint8, shape ``(5056,)``.
        devices: State of each device's default generator by device name, such as ``"cuda:0"``. The
            tensors are uint8 and on the CPU.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    devices: dict[str, torch.Tensor] = field(default_factory=dict)

    def to_tree(self) -> dict[str, Any]:
        """Convert the state to containers, numbers and tensors, which a checkpoint can store."""
        return {
            "python": self.python,
            "numpy": self.numpy,
            "cpu": self.cpu,
            "devices": self.devices,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RandomState:
        """Convert the result of `to_tree` back to a state, and check that the state is valid.

        Raises:
            KeyError, TypeError, ValueError: The tree is not a random state.
        """
        random.Random().setstate(tree["python"])  # noqa: S311 - nothing is drawn
        # A dict means that NumPy's global generator was not the default one. Only the state of the
        # default generator can be checked here.
        if not isinstance(tree["numpy"], dict):
            np.random.RandomState().set_state(tree["numpy"])
        try:
            torch.Generator().set_state(tree["cpu"])
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return cls(tree["python"], tree["numpy"], tree["cpu"], tree["devices"])


def capture(devices: Sequence[torch.device] = ()) -> RandomState:
    """Return the random state of this process, without synchronizing with devices.

    The call takes about 5 microseconds, plus 40 if Python's or NumPy's generator was used since the
    last call.

    Args:
        devices: Accelerators whose state to include.
    """
    device_states = {}
    for device in devices:
        device_states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return RandomState(_python_state(), _numpy_state(), _torch_state(), device_states)


def restore(state: RandomState) -> None:
    """Restore a state that `capture` returned. States of devices that do not exist are ignored."""
    global _numpy_reading
    if _python_state() is not state.python:
        random.setstate(state.python)
    if _numpy_state() is not state.numpy:
        np.random.set_state(state.numpy)
        # NumPy draws normal numbers in pairs. The restored state may include the second number of a
        # pair, which is not in the raw memory, so the next reading must not rely on this memory.
        _numpy_reading = _NO_READING
    _set_torch_state(state.cpu)
    for name, device_state in state.devices.items():
        device = torch.device(name)
        module = torch.get_device_module(device)
        if device.index is None or device.index < module.device_count():
            module.set_rng_state(device_state, device)


def changed_generators(before: RandomState, after: RandomState) -> frozenset[str]:
    """Return the names of the generators that differ between two states of this process.

    The names are ``"Python"``, ``"NumPy"``, ``"torch on the CPU"`` and those of devices, such as
    ``"cuda:0"``.
    """
    changed = set()
    # Usually, `capture` returns the same object again if nothing was drawn. It returns another
    # object with the same values if the state was restored in between.
    if before.python is not after.python and before.python != after.python:
        changed.add(_PYTHON)
    if before.numpy is not after.numpy and not _is_same(before.numpy, after.numpy):
        changed.add(_NUMPY)
    if not torch.equal(before.cpu, after.cpu):
        changed.add(_TORCH_CPU)
    for name, device_state in after.devices.items():
        if name not in before.devices or not torch.equal(before.devices[name], device_state):
            changed.add(name)
    return frozenset(changed)


def _is_same(before: Any, after: Any) -> bool:
    """Return whether two states of a NumPy generator are equal. A state is a tuple or a dict."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(
            _is_same(value, after[key]) for key, value in before.items()
        )
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_is_same, before, after))
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        return np.array_equal(before, after)
    return bool(before == after)


def with_generators(
    state: RandomState, source: RandomState, generators: Collection[str]
) -> RandomState:
    """Return a state in which some generators have the state that they have in another one.

    Args:
        state: The state of all other generators.
        source: The state of the chosen generators.
        generators: The names of the chosen generators, as `changed_generators` returns them.
    """
    return RandomState(
        python=source.python if _PYTHON in generators else state.python,
        numpy=source.numpy if _NUMPY in generators else state.numpy,
        cpu=source.cpu if _TORCH_CPU in generators else state.cpu,
        devices={
            name: source.devices[name] if name in generators else device_state
            for name, device_state in state.devices.items()
        },
    )


def of_another_rank(state: RandomState, rank: int) -> RandomState:
    """Return a random state for a rank that is new because a run resumes on more ranks than before.

    Args:
        state: The state of any rank in the checkpoint, from which the new state is derived.
        rank: The new rank. Each rank gets a different state.
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
    """Restore the random state of the CPU generators at the end of the ``with`` block.

    The state is restored even if the block raises an exception.
    """
    before = capture()
    try:
        yield
    finally:
        restore(before)


# --- reading the states quickly -------------------------------------------------------------------


class _CachedState(NamedTuple):
    """A generator's state, and its raw memory at the time when the state was read."""

    memory: Any
    state: Any


_NO_READING = _CachedState(None, None)

# The generator behind ``random.random()``.
_PYTHON_GENERATOR: Any = random._inst

# The generator's memory after the object header: the position and the words.
_python_memory = (ctypes.c_char * _MT19937_BYTES).from_address(
    id(_PYTHON_GENERATOR) + object.__basicsize__
)
_python_reading = _NO_READING

# NumPy's global generator and its memory.
_numpy_memory: tuple[Any, Any] = (None, None)
_numpy_reading = _NO_READING


def _layout_is_known() -> bool:
    """Return whether Python's generator has the expected memory layout.

    Every CPython release so far has had this layout.
    """
    if sys.implementation.name != "cpython":
        return False
    if type(_PYTHON_GENERATOR).__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
        return False
    position, *words = struct.unpack("=I624I", _python_memory.raw)
    return bool((*words, position) == random.getstate()[1])


_READS_RAW = _layout_is_known()


def _python_state() -> Any:
    """Return the state of Python's global generator.

    If nothing was drawn since the last call, the same object is returned again.
    """
    global _python_reading
    if not _READS_RAW:
        return random.getstate()
    # The second number of a pair of normal numbers is in an attribute, not in this memory.
    memory = (_python_memory.raw, _PYTHON_GENERATOR.gauss_next)
    if memory != _python_reading.memory:
        _python_reading = _CachedState(memory, random.getstate())
    return _python_reading.state


def _numpy_state() -> Any:
    """Return the state of NumPy's global generator.

    If nothing was drawn since the last call, the same object is returned again.
    """
    global _numpy_reading, _numpy_memory
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    if generator is not _numpy_memory[0]:
        address = generator.ctypes.state_address
        _numpy_memory = (generator, (ctypes.c_char * _MT19937_BYTES).from_address(address))
    memory = _numpy_memory[1].raw
    # The second number of a pair of normal numbers is not in this memory. If the cached state
    # includes such a number, as its fourth field shows, the state is therefore read again.
    holds_normal = _numpy_reading.state is not None and _numpy_reading.state[3]
    if memory != _numpy_reading.memory or holds_normal:
        _numpy_reading = _CachedState(memory, np.random.get_state())
    return _numpy_reading.state


# --- seeding --------------------------------------------------------------------------------------


def seed_cpu(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator.

    ``torch.manual_seed`` is not used, because it takes 75 microseconds and, until CUDA is
    initialized, queues another callback on each call.

    Args:
        seed: The seed, from 0 to 2**63 - 1. NumPy uses only the lowest 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed & _MASK_32_BITS)
    _seed_torch(seed)


class LazySeeding:
    """Seeds Python's and NumPy's generators only if samples are known to draw from them.

    This saves 6 microseconds per sample. When `was_drawn` returns True for the first time, the
    caller must load the sample again with seeded generators. torch's generator is always seeded,
    because a call to ``torch.initial_seed()`` cannot be detected.

    Args:
        draws: Whether samples are known to draw from Python's or NumPy's generator.
    """

    def __init__(self, draws: bool = False) -> None:  # noqa: FBT001, FBT002 - one flag
        self.draws = draws

    def seed(self, seed: int) -> None:
        """Seed torch's generator, and the others if samples are known to draw from them."""
        _seed_torch(seed)
        if self.draws:
            random.seed(seed)
            np.random.seed(seed & _MASK_32_BITS)

    def generator_states(self) -> tuple[Any, Any]:
        """Return the states of Python's and NumPy's generators, to be passed to `was_drawn`.

        If both generators are always seeded, their states are not needed and None is returned for
        each.
        """
        if self.draws:
            return None, None
        return _python_state(), _numpy_state()

    def was_drawn(self, before: tuple[Any, Any]) -> bool:
        """Return whether an unseeded generator was used since `generator_states` was called.

        If so, both generators are seeded from now on.

        Args:
            before: The result of `generator_states`.
        """
        if self.draws:
            return False
        python_before, numpy_before = before
        python_now, numpy_now = self.generator_states()
        # If the objects are the same, nothing was drawn.
        self.draws = python_now is not python_before or numpy_now is not numpy_before
        return self.draws


class SeededGenerator(torch.Generator):
    """A torch generator that can be pickled. Its state is not pickled.

    The generator is seeded before each use, so workers do not need its state. A worker that is
    spawned with a plain torch generator exits, because it cannot unpickle the generator's state.
    """

    def __reduce__(self) -> Any:
        return SeededGenerator, ()
