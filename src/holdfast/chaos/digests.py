"""Digests of what a training holds and sees.

Every bit of a small tensor, sums over all bits of a large one.

A digest is 16 hexadecimal digits. It draws no random number and leaves no trace in autograd. Torch
is passed in, as the process that is looked at has imported it.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

_SMALL_BYTES = 1 << 15
_PARTS = 64  # of a large tensor, so that a swap of two parts shows
_MOST_DEEP, _MOST_OBJECTS = 12, 1000
_OTHER_SEED = 20_261
_MOST_PATHS, _SHORT = 4, 60


class Digests:
    """Makes digests with the module of torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def tensors(self, named: Iterable[tuple[str, Any]]) -> str:
        """Return the digest of tensors and their names, in the order of the names."""
        found = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(named, key=lambda pair: pair[0]):
            found.update(name.encode())
            self._add_tensor(found, tensor)
        return found.hexdigest()

    def tree(self, value: Any) -> str:
        """Return the digest of a batch or of what is saved.

        Containers of tensors, arrays, numbers and strings.
        """
        found = hashlib.blake2b(digest_size=8)
        self._add(found, value, 0)
        return found.hexdigest()

    def _add(self, found: Any, value: Any, depth: int) -> None:
        if depth > _MOST_DEEP:
            return
        if isinstance(value, self._torch.Tensor):
            self._add_tensor(found, value)
        elif isinstance(value, self._torch.nn.Module):
            self._add(found, value.state_dict(), depth + 1)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                self._add(found, value[key], depth + 1)
        elif isinstance(value, (list, tuple)):
            found.update(b"%d" % len(value))
            for each in value:
                self._add(found, each, depth + 1)
        elif isinstance(value, (int, float, str, bytes, bool, type(None))):
            found.update(repr(value).encode())
        elif hasattr(value, "tobytes"):
            found.update(value.tobytes())
        else:
            found.update(type(value).__name__.encode())
            if isinstance(fields := getattr(value, "__dict__", None), dict):
                self._add(found, fields, depth + 1)

    def _add_tensor(self, found: Any, tensor: Any) -> None:
        torch = self._torch
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                plain = getattr(tensor, "_local_tensor", tensor).detach()
                if plain.layout is not torch.strided:
                    plain = plain.to_dense()
                flat = plain.contiguous().reshape(-1)
                if flat.numel() * flat.element_size() <= _SMALL_BYTES:
                    found.update(flat.cpu().view(torch.uint8).numpy().tobytes())
                    return
                whole = flat.numel() * flat.element_size() % 8 == flat.data_ptr() % 8 == 0
                bits = flat.view(torch.uint8).view(torch.int64 if whole else torch.uint8)
                body = bits.numel() // _PARTS * _PARTS
                sums = bits[:body].view(_PARTS, -1).sum(1, dtype=torch.int64)
                found.update(repr((sums.tolist(), bits[body:].tolist())).encode())
        except (RuntimeError, NotImplementedError, TypeError):
            found.update(b"cannot be read")

    def optimizer(self, optimizer: Any) -> dict[str, str]:
        """Return digests of the state of an optimizer, parameter by parameter, and of these
        parameters.
        """
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            "optimizer": self.tree([optimizer.state.get(p) or {} for p in every]),
            "own": self.tree(every),
        }

    def random_state(self) -> dict[str, str]:
        """Return digests of the random states of torch, Python and numpy."""
        torch, numpy = self._torch, sys.modules.get("numpy")
        found = {
            "torch": self.tree(torch.get_rng_state()),
            "python": f"{hash(random.getstate()[1]) & (1 << 64) - 1:x}",
        }
        if numpy is not None and hasattr(numpy, "random"):
            state = numpy.random.get_state()
            found["numpy"] = self.tree([state[1], int(state[2])])
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = self.tree(torch.cuda.get_rng_state())
        return found

    def reseed(self, name: str) -> None:
        """Set one of the random states that `random_state` names to another."""
        if name == "python":
            random.seed(_OTHER_SEED)
        elif name == "numpy":
            sys.modules["numpy"].random.seed(_OTHER_SEED)
        elif name == "cuda":
            self._torch.cuda.manual_seed_all(_OTHER_SEED)
        else:
            self._torch.default_generator.manual_seed(_OTHER_SEED)

    def tensors_of(self, value: Any) -> list[Any]:
        """Return the tensors of what a model has computed."""
        found, todo, seen = [], [value], set[int]()
        while todo and len(seen) < _MOST_OBJECTS:
            if id(each := todo.pop()) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, self._torch.Tensor):
                found.append(each)
            elif isinstance(each, Mapping):
                todo += each.values()
            else:
                todo += (
                    each
                    if isinstance(each, (list, tuple))
                    else getattr(each, "__dict__", {}).values()
                )
        return found

    def saved(self, value: Any) -> dict[str, str]:
        """Return a digest of each entry of what is saved, by its path.

        Short values as they are, text in quotes.
        """
        found: dict[str, str] = {}
        self._add_entries(found, "", value, 0)
        return found

    def _add_entries(self, found: dict[str, str], path: str, value: Any, depth: int) -> None:
        if self._is_random(path.lower(), value):  # numbers may differ in it that nothing is made of
            return
        fields = vars(value) if isinstance(value, (Namespace, SimpleNamespace)) else value
        # A number that was asked for, such as the first epoch, is no state
        if isinstance(value, Namespace):
            fields = {
                key: str(each) if isinstance(each, (int, float)) else each
                for key, each in fields.items()
            }
        named = (
            isinstance(fields, Mapping)
            and depth < _MOST_PATHS
            and all(isinstance(key, str) for key in fields)
        )
        if named and not (
            depth and all(isinstance(each, self._torch.Tensor) for each in fields.values())
        ):
            for key, each in fields.items():
                self._add_entries(found, f"{path}.{key}" if path else key, each, depth + 1)
        elif isinstance(value, str):
            found[path] = (
                repr(value) if len(value) <= _SHORT else f"{value[:_SHORT]!r} {self.tree(value)}"
            )
        else:
            found[path] = (
                repr(value)
                if isinstance(value, (int, float, bool, type(None)))
                else self.tree(value)
            )

    def _is_random(self, path: str, value: Any) -> bool:
        """Return whether a random state is saved, by its name.

        A model of that name has weights, a count is plain.
        """
        is_plain = isinstance(value, (str, int, float, bool, type(None)))
        name = path.rpartition(".")[0] if is_plain else path
        named = any(word in name for word in ("rng", "random", "generator"))
        return named and not any(each.is_floating_point() for each in self.tensors_of(value))

    def roots(self, optimizer: Any) -> list[Any]:
        """Return the outermost modules that hold a parameter of an optimizer, in an order that
        does not change.
        """
        module = self._torch.nn.Module
        modules = [each for each in gc.get_objects() if issubclass(type(each), module)]
        inner = {
            id(child) for each in modules for child in each.__dict__.get("_modules", {}).values()
        }
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        roots = [
            each for each in modules if id(each) not in inner and "_parameters" in each.__dict__
        ]
        held = [
            each
            for each in roots
            if any(id(parameter) in wanted for parameter in each.parameters())
        ]
        return sorted(
            held,
            key=lambda each: (type(each).__name__, [name for name, _ in each.named_parameters()]),
        )
