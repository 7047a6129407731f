"""Random numbers of a loss function.

Drawn once for all samples, then given again, row by row, to parts of them.

So a random loss is compared as exactly as any other, and one that shares numbers between samples is
found out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.guard.state.trees import same
from holdfast.loader.random_state import capture, seed_cpu
from holdfast.memory.oom import find_out_of_memory


class NotRepeatableError(Exception):
    """The random numbers that the whole has drawn do not say which of them a part would draw."""


class Draws:
    """What torch draws in the first call since `start`.

    Each later call, of a part, is given its rows of that.

    Numbers of python and numpy have no rows: they begin alike in each call, as if all samples
    shared them, or go on from part to part (`in_order`), as if drawn for one sample after the
    other. A generator that the loss function seeds itself begins alike in each call of training
    too: nothing is given to it. The inputs of a draw, such as probabilities, may differ by a
    `tolerance` between whole and part.
    """

    def __init__(
        self, devices: Sequence[torch.device], tolerance: float, seed: int, *, in_order: bool
    ) -> None:
        self.drew = False  # whether there was any randomness at all
        # Whether numbers belong to no sample: parts draw their own, and the variance changes
        self.shared = False
        self.outside_torch = False  # whether python or numpy drew
        self._devices, self._tolerance = devices, tolerance
        self._seed, self._in_order = seed, in_order
        self._made: list[_Draw] | None = None
        self._given: dict[Any, list[Any]] = {}  # to parts, by where the generator stood
        self._samples = 0

    def start(self, samples: int) -> None:
        """Forget what was drawn: the next call is that of all samples."""
        self._made, self._samples = None, samples
        self._given.clear()

    @contextlib.contextmanager
    def call(self, first: int, samples: int) -> Iterator[None]:
        """Run one call of the loss function, of `samples` samples from the one numbered `first` on.

        `NotRepeatableError` if it asks for other numbers than the call of all samples, or fails
        with them.
        """
        if not (self._in_order and first):
            seed_cpu(self._seed)
            # Else each part seems to be seeded by the loss
            torch.default_generator.manual_seed(self._seed + first)
        if self._made is None:
            self._made = made = []
            before = capture()
            with _Drawing(self._devices, lambda draw: made.append(draw.copied())):
                yield
            after = capture()
            self.outside_torch = (
                before.python is not after.python or before.numpy is not after.numpy
            )
            self.drew |= bool(made) or self.outside_torch
            self.shared |= self.outside_torch and not self._in_order
            return
        left = iter(self._made)
        try:
            with _Drawing(
                self._devices, lambda draw: self._repeat(next(left, None), draw, first, samples)
            ):
                yield
        except Exception as error:
            if not self._made or find_out_of_memory(error) is not None:
                raise
            raise NotRepeatableError from error
        if next(left, None) is not None:
            raise NotRepeatableError

    def backward(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a forward pass that is made again, as of a checkpoint, is
        given the same.
        """

        def again(draw: _Draw) -> None:
            for new, old in zip(draw.drawn, self._given.get(draw.place(), draw.drawn), strict=True):
                new.copy_(old)

        return _Drawing(self._devices, again) if self._given else contextlib.nullcontext()

    def _repeat(self, made: _Draw | None, draw: _Draw, first: int, samples: int) -> None:
        if made is None or made.op is not draw.op:
            raise NotRepeatableError
        if first and made.place() == draw.place():
            return  # the loss has seeded the generator
        rows = [
            self._rows(old, new, first, samples)
            for old, new in zip(made.inputs, draw.inputs, strict=True)
        ]
        if not same(rows, draw.inputs, tolerance=self._tolerance):
            raise NotRepeatableError
        for old, new in zip(made.drawn, draw.drawn, strict=True):
            self.shared |= old.shape == new.shape and samples < self._samples
            new.copy_(self._rows(old, new, first, samples))
        self._given[draw.place()] = draw.copied().drawn

    def _rows(
        self, whole: torch.Tensor, part: torch.Tensor, first: int, samples: int
    ) -> torch.Tensor:
        """Return what belongs to these samples.

        Along the one dimension that grows with them, else everything.
        """
        if whole.shape == part.shape:
            return whole
        if whole.ndim == part.ndim:
            grows = [d for d in range(whole.ndim) if whole.shape[d] != part.shape[d]]
            rows = part.shape[grows[0]] // samples
            sizes = rows * self._samples, rows * samples
            if len(grows) == 1 and (whole.shape[grows[0]], part.shape[grows[0]]) == sizes:
                return whole.narrow(grows[0], rows * first, rows * samples)
        raise NotRepeatableError


class _Draw(NamedTuple):
    """An operation that draws, the tensors that it depends on, and what it drew."""

    op: Any
    began: list[torch.Tensor]  # where each generator stood that it drew from
    inputs: list[Any]
    drawn: list[Any]

    def copied(self) -> _Draw:
        return self._replace(
            inputs=[each.clone() for each in self.inputs],
            drawn=[each.clone() for each in self.drawn],
        )

    def place(self) -> Any:
        return self.op, *(state.numpy().tobytes() for state in self.began)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `on_draw` with each draw."""

    def __init__(self, devices: Sequence[torch.device], on_draw: Callable[[_Draw], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices, self._on_draw = devices, on_draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = self._states(kwargs)
        found = func(*args, **kwargs)
        after = self._states(kwargs)
        began = [old for old, new in zip(before, after, strict=True) if not same(old, new)]
        if began:  # attention without dropout, for one, draws nothing
            # The values of what is written, or taken as an example, do not matter.
            known = list(
                zip(args, (spec.alias_info for spec in func._schema.arguments), strict=False)
            )
            given = [each for each, written in known if written is None][
                func._schema.name.endswith("_like") :
            ]
            written = [each for each, written in known if written is not None]
            self._on_draw(_Draw(func, began, _tensors((given, kwargs)), _tensors((found, written))))
        return found

    def _states(self, kwargs: Any) -> list[torch.Tensor]:
        state, own = capture(self._devices), kwargs.get("generator")
        return [state.cpu, *state.devices.values(), *([] if own is None else [own.get_state()])]


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
