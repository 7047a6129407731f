"""Give the parts of a batch the same random numbers as the whole batch, for a comparison.

The random numbers that the loss function draws for all samples are recorded, and each part then
receives its rows of them. A random loss can thus be compared as exactly as any other, and a loss
that shares random numbers between samples is noticed.
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
    """It is not clear which of the whole batch's random numbers a part would draw."""


class Draws:
    """Records what torch draws in the first call after `start`, and repeats it for the parts.

    Random numbers from Python and numpy have no rows. Each call therefore starts with the same
    seed, as if all samples shared the numbers. With `in_order`, the generators instead continue
    from part to part, as if the numbers were drawn for one sample after the other. If the loss
    function seeds a torch generator itself, its numbers are the same in each call anyway, and
    nothing is repeated.

    Args:
        devices: The accelerators whose generators are watched.
        tolerance: The largest relative difference between whole and part in the inputs of a draw,
            such as probabilities.
        seed: The seed of every call.
        in_order: Whether the generators of python and numpy continue from part to part.
    """

    def __init__(
        self, devices: Sequence[torch.device], tolerance: float, seed: int, *, in_order: bool
    ) -> None:
        # Whether any random number was drawn.
        self.drew = False
        # Whether samples share random numbers. After a split, each part would draw its own, which
        # changes the variance.
        self.shared = False
        # Whether Python's or numpy's generator was used.
        self.outside_torch = False
        self._devices = devices
        self._tolerance = tolerance
        self._seed = seed
        self._in_order = in_order
        # The draws of the call with all samples; None before it.
        self._made: list[_Draw] | None = None
        # The numbers that the parts received, by operation and state of the generator.
        self._given: dict[Any, list[Any]] = {}
        self._samples = 0

    def start(self, samples: int) -> None:
        """Forget the draws. The next call is the one with all samples, of this number."""
        self._made = None
        self._samples = samples
        self._given.clear()

    @contextlib.contextmanager
    def call(self, first: int, samples: int) -> Iterator[None]:
        """Surround one call of the loss function.

        Args:
            first: The position of the first sample in the call.
            samples: The number of samples in the call.

        Raises:
            NotRepeatableError: If a part draws other random numbers than the whole batch, or fails
                with those that it receives.
        """
        if not (self._in_order and first):
            seed_cpu(self._seed)
            # Each part gets a different seed. With the same one, it would look as if the loss
            # function had seeded the generator.
            torch.default_generator.manual_seed(self._seed + first)
        if self._made is None:
            self._made = recorded = []
            before = capture()
            with _Drawing(self._devices, lambda draw: recorded.append(draw.copied())):
                yield
            after = capture()
            self.outside_torch = (
                before.python is not after.python or before.numpy is not after.numpy
            )
            self.drew |= bool(recorded) or self.outside_torch
            self.shared |= self.outside_torch and not self._in_order
            return
        recorded_draws = iter(self._made)

        def repeat(draw: _Draw) -> None:
            self._repeat(next(recorded_draws, None), draw, first, samples)

        try:
            with _Drawing(self._devices, repeat):
                yield
        except Exception as error:
            if not self._made or find_out_of_memory(error) is not None:
                raise
            raise NotRepeatableError from error
        if next(recorded_draws, None) is not None:
            # The part has drawn less often than the whole.
            raise NotRepeatableError

    def backward(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a recomputed forward pass receives the same numbers again."""

        def again(draw: _Draw) -> None:
            for new, old in zip(draw.drawn, self._given.get(draw.place(), draw.drawn), strict=True):
                new.copy_(old)

        return _Drawing(self._devices, again) if self._given else contextlib.nullcontext()

    def _repeat(self, recorded: _Draw | None, draw: _Draw, first: int, samples: int) -> None:
        """Overwrite the numbers that a part has just drawn with those of the whole.

        Args:
            recorded: The corresponding draw of the whole, or None if that has drawn less often.
            draw: The draw of the part.
            first: The position of the first sample of the part.
            samples: The number of samples in the part.
        """
        if recorded is None or recorded.op is not draw.op:
            raise NotRepeatableError
        if first and recorded.place() == draw.place():
            # The loss function has seeded the generator.
            return
        rows = [
            self._rows(old, new, first, samples)
            for old, new in zip(recorded.inputs, draw.inputs, strict=True)
        ]
        if not same(rows, draw.inputs, tolerance=self._tolerance):
            raise NotRepeatableError
        for old, new in zip(recorded.drawn, draw.drawn, strict=True):
            self.shared |= old.shape == new.shape and samples < self._samples
            new.copy_(self._rows(old, new, first, samples))
        self._given[draw.place()] = draw.copied().drawn

    def _rows(
        self, whole: torch.Tensor, part: torch.Tensor, first: int, samples: int
    ) -> torch.Tensor:
        """Return the rows of a tensor that belong to some samples, or all of it if it has no rows.

        Rows are taken along the only dimension in which the tensors of the whole and of the part
        differ.
        """
        if whole.shape == part.shape:
            return whole
        if whole.ndim == part.ndim:
            differing = [d for d in range(whole.ndim) if whole.shape[d] != part.shape[d]]
            dimension = differing[0]
            rows_per_sample = part.shape[dimension] // samples
            matches = (
                len(differing) == 1
                and whole.shape[dimension] == rows_per_sample * self._samples
                and part.shape[dimension] == rows_per_sample * samples
            )
            if matches:
                return whole.narrow(dimension, rows_per_sample * first, rows_per_sample * samples)
        raise NotRepeatableError


class _Draw(NamedTuple):
    """A call of an operation that draws random numbers."""

    op: Any
    # The state of each generator that it drew from, before the call.
    began: list[torch.Tensor]
    # The tensors that the result depends on.
    inputs: list[Any]
    # The tensors that were drawn.
    drawn: list[Any]

    def copied(self) -> _Draw:
        return self._replace(
            inputs=[tensor.clone() for tensor in self.inputs],
            drawn=[tensor.clone() for tensor in self.drawn],
        )

    def place(self) -> Any:
        """Return the operation and the states of its generators, as a key."""
        return self.op, *(state.numpy().tobytes() for state in self.began)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that calls a function with each draw."""

    def __init__(self, devices: Sequence[torch.device], on_draw: Callable[[_Draw], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices = devices
        self._on_draw = on_draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = self._states(kwargs)
        result = func(*args, **kwargs)
        after = self._states(kwargs)
        began = [old for old, new in zip(before, after, strict=True) if not same(old, new)]
        # Some operations of this kind, such as attention without dropout, draw nothing.
        if began:
            read, written = _read_and_written(func, args)
            inputs = _tensors((read, kwargs))
            self._on_draw(_Draw(func, began, inputs, _tensors((result, written))))
        return result

    def _states(self, kwargs: Any) -> list[torch.Tensor]:
        """Return the states of the default generators and of the one that is passed to the call."""
        state = capture(self._devices)
        states = [state.cpu, *state.devices.values()]
        generator = kwargs.get("generator")
        if generator is not None:
            states.append(generator.get_state())
        return states


def _read_and_written(func: Any, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the arguments whose values an operation reads, and those that it writes to."""
    read = []
    written = []
    for argument, specification in zip(args, func._schema.arguments, strict=False):
        if specification.alias_info is None:
            read.append(argument)
        else:
            written.append(argument)
    if func._schema.name.endswith("_like"):
        # The first argument gives only shape and dtype; its values do not matter.
        read = read[1:]
    return read, written


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
