"""Random numbers of a loss function: drawn once for all samples, then given again, row by row, to parts of them.

So a random loss is compared as exactly as any other, and one that shares numbers between samples is found out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.guard.state.trees import same
from holdfast.loader.random_state import capture, seed_cpu
from holdfast.memory.oom import find_out_of_memory


class NotRepeatableError(Exception):
    """The random numbers that the whole has drawn do not say which of them a part would draw."""


class Draws:
    """What torch draws in the first call since `start`; each later call, of a part, is given its rows of that.

    Numbers of python and numpy have no rows: they begin alike in each call.

    Args:
        devices: Whose generators may be drawn from, besides that of the CPU.
        tolerance: By how much the inputs of a draw, such as probabilities, may differ between whole and part.
    """

    def __init__(self, devices: Sequence[torch.device], tolerance: float) -> None:
        self.drew = False  # whether there was any randomness at all
        self.shared = False  # whether numbers belong to no sample: parts draw their own, and the variance changes
        self.outside_torch = False  # whether python or numpy drew
        self._devices, self._tolerance = devices, tolerance
        self._made: list[tuple[Any, list[Any], list[Any]]] | None = None
        self._samples = 0

    def start(self, samples: int) -> None:
        """Forget what was drawn: the next call is that of all samples."""
        self._made, self._samples = None, samples

    @contextlib.contextmanager
    def call(self, first: int, samples: int) -> Iterator[None]:
        """Run one call of the loss function, of `samples` samples from the one numbered `first` on.

        Raises:
            NotRepeatableError: If it asks for other numbers than the call of all samples, or fails with them.
        """
        if self._made is None:
            self._made = made = []
            seed_cpu(0)
            before = capture()
            with _Drawing(self._devices, lambda *draw: made.append(_copied(*draw))):
                yield
            after = capture()
            self.outside_torch = before.python is not after.python or before.numpy is not after.numpy
            self.drew |= bool(made) or self.outside_torch
            self.shared |= self.outside_torch
            return
        left = iter(self._made)
        seed_cpu(0)
        try:
            with _Drawing(
                self._devices,
                lambda op, given, drawn: self._repeat(next(left, None), op, given, drawn, first, samples),
            ):
                yield
        except Exception as error:
            if not self._made or find_out_of_memory(error) is not None:
                raise
            raise NotRepeatableError from error
        if next(left, None) is not None:
            raise NotRepeatableError

    def _repeat(self, made: Any, op: Any, given: list[Any], drawn: list[Any], first: int, samples: int) -> None:
        if made is None or made[0] is not op:
            raise NotRepeatableError
        rows = [self._rows(old, new, first, samples) for old, new in zip(made[1], given, strict=True)]
        if not same(rows, given, tolerance=self._tolerance):
            raise NotRepeatableError
        for old, new in zip(made[2], drawn, strict=True):
            self.shared |= old.shape == new.shape and samples < self._samples
            new.copy_(self._rows(old, new, first, samples))

    def _rows(self, whole: torch.Tensor, part: torch.Tensor, first: int, samples: int) -> torch.Tensor:
        """Return what belongs to these samples: along the one dimension that grows with them, else everything."""
        if whole.shape == part.shape:
            return whole
        if whole.ndim == part.ndim:
            grows = [d for d in range(whole.ndim) if whole.shape[d] != part.shape[d]]
            rows = part.shape[grows[0]] // samples
            if len(grows) == 1 and (whole.shape[grows[0]], part.shape[grows[0]]) == (
                rows * self._samples,
                rows * samples,
            ):
                return whole.narrow(grows[0], rows * first, rows * samples)
        raise NotRepeatableError


def _copied(op: Any, given: list[Any], drawn: list[Any]) -> tuple[Any, list[Any], list[Any]]:
    return op, [each.clone() for each in given], [each.clone() for each in drawn]


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `on_draw` with each operation that draws, the tensors that it depends on, and what it drew."""

    def __init__(self, devices: Sequence[torch.device], on_draw: Callable[[Any, list[Any], list[Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices, self._on_draw = devices, on_draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = self._states(kwargs)
        found = func(*args, **kwargs)
        if not same(before, self._states(kwargs)):  # attention without dropout, for one, draws nothing
            name = func._schema.name
            given = args[1:] if name.endswith(("_", "_like")) else args  # the values of the first do not matter
            self._on_draw(func, _tensors((given, kwargs)), _tensors(found))
        return found

    def _states(self, kwargs: Any) -> list[torch.Tensor]:
        state, own = capture(self._devices), kwargs.get("generator")
        return [state.cpu, *state.devices.values(), *([] if own is None else [own.get_state()])]


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
