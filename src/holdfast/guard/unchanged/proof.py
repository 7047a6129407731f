"""Compare the steps that a resumed script repeats with the recording of its earlier attempt.

The guard compares losses and gradient norms. This module compares what a script has at each
boundary: the batch, the random state, the settings of the optimizers, and the integers among the
variables of the function that trains. A difference shows that the script depends on something that
no checkpoint holds.

Floats, strings and integers whose names suggest a time are compared too, but may differ: many
scripts keep times and names of files that contain a date.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.loader.random_state import RandomState

_FILE = "boundaries.jsonl"
_EARLIER_FILE = "boundaries.earlier.jsonl"
# When the file has reached this size, it is renamed to `_EARLIER_FILE`. A line has about 300 bytes.
_MOST_BYTES = 16 << 20
# The number of elements of a tensor that are compared. They are evenly spaced.
_MOST_ELEMENTS = 1024
# `json.dumps` would create an encoder in every step.
_encode = json.JSONEncoder(default=str).encode
# Words that show that an integer is a time, which differs from attempt to attempt.
_NAME_OF_TIME = re.compile(
    r"(?:^|_)(?:secs?|seconds|mins|minutes|hours|elapsed|eta|time(?!_?steps?)|timestamp|duration)"
    r"(?:$|_)",
    re.IGNORECASE,
)
# The length up to which strings are compared.
_MOST_CHARACTERS = 1_000
# The depth to which nested batches are compared.
_MOST_LEVELS = 4


def describe_boundary(
    batch: Any,
    random_state: RandomState,
    optimizers: Mapping[str, Optimizer],
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what is compared at a boundary, as JSON values.

    Args:
        batch: The last batch. None between two loops.
        random_state: The random state before the next batch.
        optimizers: The optimizers by name.
        variables: The local variables of the function that trains.
    """
    return {
        "batch": _digest_of_batch(batch, 0),
        "random": _digest_of_random_state(random_state),
        "settings": {name: _settings_of(optimizer) for name, optimizer in optimizers.items()},
        "integers": {
            name: value
            for name, value in variables.items()
            if type(value) is bool or (type(value) is int and not _is_time(name))
        },
        # `repr` is exact for floats and lets NaN equal itself. A hash keeps the line short.
        "floats_and_strings": {
            name: zlib.crc32(repr(value).encode())
            for name, value in variables.items()
            if _may_differ(name, value)
        },
    }


def _may_differ(name: str, value: Any) -> bool:
    """Return whether a variable is compared, but does not refuse a resume if it differs."""
    if type(value) is str:
        # This runs in every step, and a script may keep a whole book in a string.
        return len(value) <= _MOST_CHARACTERS
    return type(value) is float or (type(value) is int and _is_time(name))


@cache
def _is_time(name: str) -> bool:
    """Return whether a variable is a time by its name, such as ``epoch_secs``."""
    return _NAME_OF_TIME.search(name) is not None


def _digest_of_batch(batch: Any, level: int) -> int:
    """Return a checksum of the tensors, numbers and strings in a batch."""
    if isinstance(batch, torch.Tensor):
        return _digest_of_tensor(batch)
    if isinstance(batch, (int, float, str, bytes, bool)):
        return zlib.crc32(repr(batch).encode())
    if level >= _MOST_LEVELS:
        return 0
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    digest = 0
    for part in parts:
        digest = zlib.crc32(_digest_of_batch(part, level + 1).to_bytes(4, "little"), digest)
    return digest


def _digest_of_tensor(tensor: torch.Tensor) -> int:
    """Return a checksum of some elements of a dense CPU tensor, or 0 for any other tensor.

    Reading a tensor on a GPU would make training wait for the GPU.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return 0
    if tensor.is_nested or tensor.numel() == 0:
        return 0
    distance = -(-tensor.numel() // _MOST_ELEMENTS)
    try:
        # This runs in every step, and NumPy takes a third of torch's time for so few elements.
        sample = tensor.detach().numpy().reshape(-1)[::distance]
    except (RuntimeError, TypeError):
        # NumPy has no such dtype, for example bf16, or the tensor is a lazy conjugate.
        elements = tensor.detach().reshape(-1)[::distance].resolve_conj().resolve_neg()
        sample = elements.contiguous().view(torch.uint8).numpy()
    return zlib.crc32(sample.tobytes())


def _digest_of_random_state(state: RandomState) -> int:
    digest = zlib.crc32(state.cpu.numpy().data)
    for device_state in state.devices.values():
        digest = zlib.crc32(device_state.numpy().data, digest)
    # Python gives equal numbers the same hash in every process. This is not true of None, which the
    # third entry may be, so that entry is included as text.
    _, words, next_normal = state.python
    digest = zlib.crc32(f"{hash(words)} {next_normal}".encode(), digest)
    if isinstance(state.numpy, tuple):
        # NumPy changes the words only after it has used all of them, and draws normal numbers in
        # pairs. So a draw may change only the position, or only the second number of a pair.
        _, words, *position_and_next_normal = state.numpy
        digest = zlib.crc32(words.data, digest)
        digest = zlib.crc32(repr(position_and_next_normal).encode(), digest)
    return digest


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the plain settings of each parameter group, such as the learning rate."""
    return [
        {
            name: value
            for name, value in group.items()
            if name != "params" and isinstance(value, (bool, int, float, tuple, type(None)))
        }
        for group in optimizer.param_groups
    ]


class BoundaryLog:
    """Records the boundaries of an attempt, and compares them with those of the earlier attempt.

    Each boundary is a line of a file and survives if the process is killed. If the disk is full, no
    further boundary is recorded.

    Args:
        run_dir: The run directory of the guard.
        resumed_step: The global step from which this attempt continues. None if it starts from the
            beginning. Nothing is compared then, because the script may not have set a seed.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None) -> None:
        self._path = run_dir / _FILE
        self._earlier_path = run_dir / _EARLIER_FILE
        # The boundaries that the earlier attempt has recorded, by global step.
        self._expected: dict[int, dict[str, Any]] = {}
        if resumed_step is None:
            self._path.unlink(missing_ok=True)
            self._earlier_path.unlink(missing_ok=True)
        else:
            recorded = self._read()
            self._expected = {step: recorded[step] for step in recorded if step > resumed_step}
        self._descriptor: int | None = os.open(
            self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
        )
        self._size = os.fstat(self._descriptor).st_size
        # The number of boundaries that were compared and are equal.
        self.equal_boundaries = 0
        # Names of the floats and strings whose values differ from those of the earlier attempt.
        self.changed_variables: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Return whether no recorded boundary is left to be compared."""
        return not self._expected

    def _read(self) -> dict[int, dict[str, Any]]:
        """Return the recorded boundaries by global step.

        If several attempts have recorded a boundary after the same step, the newest one is
        returned.
        """
        boundaries: dict[int, dict[str, Any]] = {}
        for path in (self._earlier_path, self._path):
            try:
                lines = path.read_bytes().splitlines()
            except OSError:
                continue
            for line in lines:
                try:
                    boundary = json.loads(line)
                    boundaries[int(boundary.pop("step"))] = boundary
                except (ValueError, KeyError, TypeError, AttributeError):
                    # The machine has crashed while this line was written.
                    continue
        return boundaries

    def note(self, global_step: int, boundary: dict[str, Any]) -> str | None:
        """Record a boundary, and compare it with that of the earlier attempt.

        Args:
            global_step: The number of steps before the boundary, over all attempts.
            boundary: The result of `describe_boundary`.

        Returns:
            A clause that names the first difference, or None.
        """
        # The earlier boundary was read from JSON, so this one is converted in the same way.
        line = _encode({"step": global_step, **boundary})
        expected = self._expected.pop(global_step, None)
        if expected is not None:
            now = json.loads(line)
            difference = _difference(expected, now)
            if difference is not None:
                return f"after step {global_step}, {difference}"
            self.equal_boundaries += 1
            self.changed_variables |= _changed_variables(expected, now)
        self._append(line.encode() + b"\n")
        return None

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            if self._size > _MOST_BYTES:
                os.close(self._descriptor)
                self._path.replace(self._earlier_path)
                self._descriptor = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
                )
                self._size = 0
            self._size += os.write(self._descriptor, line)
        except OSError:
            self._descriptor = None


def _difference(expected: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return a clause that names the first difference between two boundaries, or None."""
    if expected["batch"] != now["batch"]:
        return "the batch is another one"
    if expected["random"] != now["random"]:
        return "the random state is another one"
    for name, groups in expected["settings"].items():
        for number, group in enumerate(groups):
            groups_now = now["settings"].get(name, [])
            group_now = groups_now[number] if number < len(groups_now) else {}
            change = _changed_value(group, group_now)
            if change is not None:
                return f"in parameter group {number} of optimizer {name!r}, {change}"
    change = _changed_value(expected["integers"], now["integers"])
    return None if change is None else f"variable {change}"


def _changed_variables(expected: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the names of the floats and strings that differ between two boundaries."""
    # A recording of an earlier version of holdfast has none.
    values = expected.get("floats_and_strings", {})
    values_now = now["floats_and_strings"]
    return {name for name in values if name in values_now and values_now[name] != values[name]}


def _changed_value(expected: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return a clause about the first name whose value differs, or None."""
    for name, value in expected.items():
        if name in now and now[name] != value:
            return f"{name} is {now[name]!r} instead of {value!r}"
    return None
