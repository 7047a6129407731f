"""Give the parts of a batch the same random numbers as the whole batch, to compare gradients.

The random numbers that the loss function draws for the whole batch are recorded. Each part then
receives its own rows of these numbers. The gradients of a random loss can then be compared as
exactly as the gradients of any other loss. The recording also shows whether samples share random
numbers.
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
    """Raised if the whole batch's random numbers cannot be assigned to a part."""


class Draws:
    """Records the random numbers of the first call after `start`, and replays them for the parts.

    Random numbers from Python and numpy cannot be split into rows. Each call therefore starts from
    the same seed, as if all samples shared these numbers. With `in_order`, the generators instead
    continue from part to part, as if the numbers were drawn for one sample after another.

    If the loss function seeds a torch generator itself, each call draws the same numbers anyway, so
    they are not overwritten.

    Args:
        devices: The accelerators whose generators are observed.
        tolerance: The largest relative difference that is allowed between the whole batch and a
            part in the inputs of a random operation, such as probabilities.
        seed: The seed that every call starts from.
        in_order: Whether the generators of Python and numpy continue from part to part.
    """

    def __init__(
        self, devices: Sequence[torch.device], tolerance: float, seed: int, *, in_order: bool
    ) -> None:
        # Whether any random numbers were drawn.
        self.drew = False
        # Whether samples share random numbers. After a split, each part would draw its own numbers,
        # which changes the variance of the gradient.
        self.shared = False
        # Whether the generators of Python or numpy were used.
        self.outside_torch = False
        self._devices = devices
        self._tolerance = tolerance
        self._seed = seed
        self._in_order = in_order
        # The draws of the call with all samples, or None before that call.
        self._whole_draws: list[_Draw] | None = None
        # The numbers that the parts have received, keyed by operation and generator state.
        self._numbers_of_parts: dict[Any, list[Any]] = {}
        self._samples = 0

    def start(self, samples: int) -> None:
        """Clear all recorded draws. The next call must be the one with all samples.

        Args:
            samples: The number of samples in the whole batch.
        """
        self._whole_draws = None
        self._samples = samples
        self._numbers_of_parts.clear()

    @contextlib.contextmanager
    def call(self, first: int, samples: int) -> Iterator[None]:
        """Return a context in which to call the loss function once.

        Args:
            first: The position of the first sample in the call.
            samples: The number of samples in the call.

        Raises:
            NotRepeatableError: If a part does not make the same draws as the whole batch, or fails
                with the numbers that it receives.
        """
        if not (self._in_order and first):
            seed_cpu(self._seed)
            # Each part gets a different seed. With the same seed, it would look as if the loss
            # function had seeded the generator itself.
            torch.default_generator.manual_seed(self._seed + first)
        if self._whole_draws is None:
            self._whole_draws = recorded = []
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
        recorded_draws = iter(self._whole_draws)

        def repeat(draw: _Draw) -> None:
            self._repeat(next(recorded_draws, None), draw, first, samples)

        try:
            with _Drawing(self._devices, repeat):
                yield
        except Exception as error:
            if not self._whole_draws or find_out_of_memory(error) is not None:
                raise
            raise NotRepeatableError from error
        if next(recorded_draws, None) is not None:
            # The part has made fewer draws than the whole batch.
            raise NotRepeatableError

    def backward(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a recomputed forward pass receives the same numbers again."""

        # A draw of the backward pass itself is not in the dict, so it keeps its own numbers.
        def repeat_numbers(draw: _Draw) -> None:
            for new, old in zip(
                draw.drawn, self._numbers_of_parts.get(draw.place(), draw.drawn), strict=True
            ):
                new.copy_(old)

        return (
            _Drawing(self._devices, repeat_numbers)
            if self._numbers_of_parts
            else contextlib.nullcontext()
        )

    def _repeat(self, recorded: _Draw | None, draw: _Draw, first: int, samples: int) -> None:
        """Overwrite the numbers that a part has just drawn with the numbers of the whole batch.

        Args:
            recorded: The corresponding draw of the whole batch. None if the whole batch made fewer
                draws.
            draw: The draw of the part.
            first: The position of the part's first sample.
            samples: The number of samples in the part.
        """
        if recorded is None or recorded.op is not draw.op:
            raise NotRepeatableError
        if first and recorded.place() == draw.place():
            # The loss function has seeded the generator itself.
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
        self._numbers_of_parts[draw.place()] = draw.copied().drawn

    def _rows(
        self, whole: torch.Tensor, part: torch.Tensor, first: int, samples: int
    ) -> torch.Tensor:
        """Return the rows of a tensor of the whole batch that a part receives.

        The rows are taken along the only dimension in which `whole` and `part` differ in size. If
        no dimension differs, `whole` is returned.

        Args:
            whole: The tensor of the whole batch.
            part: The corresponding tensor of the part.
            first: The position of the part's first sample.
            samples: The number of samples in the part.

        Raises:
            NotRepeatableError: If the sizes do not match the numbers of samples.
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
    # The states of the generators that the operation used, before it was called.
    states_before: list[torch.Tensor]
    # The input tensors that the result depends on.
    inputs: list[Any]
    # The tensors that were drawn.
    drawn: list[Any]

    def copied(self) -> _Draw:
        return self._replace(
            inputs=[tensor.clone() for tensor in self.inputs],
            drawn=[tensor.clone() for tensor in self.drawn],
        )

    def place(self) -> Any:
        """Return a key that consists of the operation and the states of its generators."""
        return self.op, *(state.numpy().tobytes() for state in self.states_before)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that passes each draw to a function right after the draw."""

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
        states_before = [old for old, new in zip(before, after, strict=True) if not same(old, new)]
        # Some operations with this tag draw no random numbers, such as attention without dropout.
        if states_before:
            read, written = _read_and_written(func, args)
            inputs = _tensors((read, kwargs))
            self._on_draw(_Draw(func, states_before, inputs, _tensors((result, written))))
        return result

    def _states(self, kwargs: Any) -> list[torch.Tensor]:
        """Return the states of the default generators and of any generator passed to the call."""
        state = capture(self._devices)
        states = [state.cpu, *state.devices.values()]
        generator = kwargs.get("generator")
        if generator is not None:
            states.append(generator.get_state())
        return states


def _read_and_written(func: Any, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the arguments that an operation reads, and those that it writes to."""
    read = []
    written = []
    for argument, specification in zip(args, func._schema.arguments, strict=False):
        if specification.alias_info is None:
            read.append(argument)
        else:
            written.append(argument)
    if func._schema.name.endswith("_like"):
        # The first argument only determines shape and dtype, so its values do not matter.
        read = read[1:]
    return read, written


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
