"""Compute digests of a training run's state and data, to compare two runs bit for bit.

A digest has 16 hexadecimal digits. For a small tensor, all bytes are hashed. For a large tensor,
only sums over its contents are hashed. Computing a digest draws no random numbers and adds nothing
to the autograd graph. This module does not import torch: callers pass the torch module that the
observed script has imported.
"""

from __future__ import annotations

import hashlib
import random
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

# Tensors up to this size are hashed completely, which takes about as long as a kernel launch.
SMALL_TENSOR_BYTES = 1 << 15
# How many sums represent a large tensor. With more than one sum, the digest changes if two parts of
# the tensor are swapped.
SUMS_PER_TENSOR = 64
# The maximum nesting depth of values, and the maximum number of objects to search for tensors.
MAX_DEPTH = 12
MAX_OBJECTS = 1000
# The depth down to which the entries of a checkpoint are listed separately.
MAX_ENTRY_DEPTH = 4
# Longer strings in a checkpoint are truncated to this length, and their digest is appended.
MAX_TEXT_CHARACTERS = 60
# An entry that contains a random generator's state usually has one of these words in its name.
RANDOM_WORDS = ("rng", "random", "generator")
# An arbitrary seed that scripts are unlikely to use.
OTHER_SEED = 20_261

_PLAIN_TYPES = (str, int, float, bool, type(None))


class DigestMaker:
    """Computes digests of tensors, optimizers, random states and checkpoints.

    Args:
        torch: The torch module that the script has imported.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def tensors(self, named_tensors: Iterable[tuple[str, Any]]) -> str:
        """Return one digest of several named tensors; their order does not matter."""
        digest = _new_digest()
        for name, tensor in sorted(named_tensors, key=lambda pair: pair[0]):
            digest.update(name.encode())
            self._add_tensor(digest, tensor)
        return digest.hexdigest()

    def tree(self, value: Any) -> str:
        """Return one digest of a value such as a batch or a checkpoint.

        The value may consist of nested containers of tensors, arrays, numbers and strings.
        """
        digest = _new_digest()
        self._add_value(digest, value, depth=0)
        return digest.hexdigest()

    def optimizer(self, optimizer: Any) -> dict[str, str]:
        """Return the digests of an optimizer's state (``"optimizer"``) and its ``"parameters"``."""
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        states = [optimizer.state.get(parameter) or {} for parameter in parameters]
        return {"optimizer": self.tree(states), "parameters": self.tree(parameters)}

    def random_states(self) -> dict[str, str]:
        """Return the digests of the random generators' states, by name.

        The names are "torch", "python" and, if the script uses them, "numpy" and "cuda".
        """
        torch = self._torch
        numpy = sys.modules.get("numpy")
        python_state = hash(random.getstate()[1]) & ((1 << 64) - 1)
        digests = {"torch": self.tree(torch.get_rng_state()), "python": f"{python_state:x}"}
        if numpy is not None and hasattr(numpy, "random"):
            state = numpy.random.get_state()
            digests["numpy"] = self.tree([state[1], int(state[2])])
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            digests["cuda"] = self.tree(torch.cuda.get_rng_state())
        return digests

    def entries(self, checkpoint: Any) -> dict[str, str]:
        """Return the entries of a checkpoint by path, such as ``"model.layer"``.

        Tensors and containers become digests, short values remain readable, and strings are in
        quotation marks. Random states are excluded, because many differences in them are harmless;
        `campaign` tests separately whether they affect the run.
        """
        entries: dict[str, str] = {}
        self._add_entries(entries, "", checkpoint, depth=0)
        return entries

    # --- any value ------------------------------------------------------------------------------

    def _add_value(self, digest: hashlib.blake2b, value: Any, *, depth: int) -> None:
        """Add a value to a digest, following containers and attributes up to `MAX_DEPTH`."""
        if depth > MAX_DEPTH:
            return
        if isinstance(value, self._torch.Tensor):
            self._add_tensor(digest, value)
        elif isinstance(value, self._torch.nn.Module):
            self._add_value(digest, value.state_dict(), depth=depth + 1)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                self._add_value(digest, value[key], depth=depth + 1)
        elif isinstance(value, (list, tuple)):
            digest.update(b"%d" % len(value))
            for item in value:
                self._add_value(digest, item, depth=depth + 1)
        elif isinstance(value, (*_PLAIN_TYPES, bytes)):
            digest.update(repr(value).encode())
        elif hasattr(value, "tobytes"):
            digest.update(value.tobytes())
        else:
            digest.update(type(value).__name__.encode())
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self._add_value(digest, attributes, depth=depth + 1)

    def _add_tensor(self, digest: hashlib.blake2b, tensor: Any) -> None:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        torch = self._torch
        try:
            # Bypass the overrides of tensor subclasses, and record nothing for autograd.
            with torch.no_grad(), torch._C.DisableTorchFunction():
                local_tensor = getattr(tensor, "_local_tensor", tensor)
                digest.update(self._tensor_content(local_tensor.detach()))
        except (RuntimeError, NotImplementedError, TypeError):
            # The tensor is on the meta device, or its storage was freed.
            digest.update(b"cannot be read")

    def _tensor_content(self, tensor: Any) -> bytes:
        """Return the bytes of a small tensor, or sums over the contents of a large tensor."""
        torch = self._torch
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        flat = tensor.contiguous().reshape(-1)
        size_bytes = flat.numel() * flat.element_size()
        if size_bytes <= SMALL_TENSOR_BYTES:
            content: bytes = flat.cpu().view(torch.uint8).numpy().tobytes()
            return content
        is_aligned = size_bytes % 8 == 0 and flat.data_ptr() % 8 == 0
        integers = flat.view(torch.uint8).view(torch.int64 if is_aligned else torch.uint8)
        summed_count = integers.numel() // SUMS_PER_TENSOR * SUMS_PER_TENSOR
        sums = integers[:summed_count].view(SUMS_PER_TENSOR, -1).sum(1, dtype=torch.int64)
        rest = integers[summed_count:]
        return repr((sums.tolist(), rest.tolist())).encode()

    # --- entries of a checkpoint ----------------------------------------------------------------

    def _add_entries(self, entries: dict[str, str], path: str, value: Any, *, depth: int) -> None:
        """Add a value in a checkpoint to `entries`, either as one entry or as one per field.

        Args:
            entries: The entries that were added so far, by path.
            path: The path of the value within the checkpoint; empty for the checkpoint itself.
            value: The value to add.
            depth: The number of fields in the path.
        """
        if self._is_random_state(path.lower(), value):
            return
        fields = _named_fields(value)
        if fields is None or depth >= MAX_ENTRY_DEPTH:
            entries[path] = self._describe(value)
            return
        is_model = depth > 0 and self._are_tensors(fields)
        if is_model:
            entries[path] = self._describe(value)
            return
        for name, field in fields.items():
            field_path = f"{path}.{name}" if path else name
            self._add_entries(entries, field_path, field, depth=depth + 1)

    def _are_tensors(self, fields: Mapping[str, Any]) -> bool:
        """Return whether all fields are tensors, as in a model's state dict."""
        return all(isinstance(field, self._torch.Tensor) for field in fields.values())

    def _describe(self, value: Any) -> str:
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
            return f"{value[:MAX_TEXT_CHARACTERS]!r} {self.tree(value)}"
        if isinstance(value, _PLAIN_TYPES):
            return repr(value)
        return self.tree(value)

    def _is_random_state(self, path: str, value: Any) -> bool:
        """Return whether an entry is the state of a random generator, judging by its path.

        An entry that contains floating-point tensors is a model instead, such as the generator of a
        GAN. For a plain value, the last name in the path is ignored, because a count, for example,
        may be called ``"random_crops"``.
        """
        name = path.rpartition(".")[0] if isinstance(value, _PLAIN_TYPES) else path
        if not any(word in name for word in RANDOM_WORDS):
            return False
        tensors = find_tensors(self._torch, value)
        return not any(tensor.is_floating_point() for tensor in tensors)


def find_tensors(torch: Any, value: Any) -> list[Any]:
    """Return all tensors inside a value, such as the output of a model.

    Args:
        torch: The torch module that the script has imported.
        value: Any object. Mappings, lists, tuples and the attributes of objects are searched.
    """
    tensors = []
    pending = [value]
    visited: set[int] = set()
    while pending and len(visited) < MAX_OBJECTS:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if isinstance(current, torch.Tensor):
            tensors.append(current)
        elif isinstance(current, Mapping):
            pending += current.values()
        elif isinstance(current, (list, tuple)):
            pending += current
        else:
            pending += getattr(current, "__dict__", {}).values()
    return tensors


def reseed(torch: Any, name: str) -> None:
    """Reseed the random generator with the given name, as in `DigestMaker.random_states`."""
    if name == "python":
        random.seed(OTHER_SEED)
    elif name == "numpy":
        sys.modules["numpy"].random.seed(OTHER_SEED)
    elif name == "cuda":
        torch.cuda.manual_seed_all(OTHER_SEED)
    else:
        torch.default_generator.manual_seed(OTHER_SEED)


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


def _named_fields(value: Any) -> Mapping[str, Any] | None:
    """Return the fields of a namespace or of a mapping with string keys; None for other values."""
    if isinstance(value, Namespace):
        # Numbers in command-line options, such as the first epoch, are not training state. Convert
        # them to strings, because differences in strings count as harmless.
        return {
            name: str(field) if isinstance(field, (int, float)) else field
            for name, field in vars(value).items()
        }
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    return None
