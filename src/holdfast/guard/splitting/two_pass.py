"""Split a batch although its loss compares samples with each other.

    pass 1    compute the outputs of each part, without a graph
    loss      compute the loss from the outputs of all samples, and its gradient with respect to
              the outputs
    pass 2    compute the outputs of each part again with the same random numbers, and run backward
              with the part's slice of that gradient

The gradient is exact if the outputs of a sample depend only on that sample. Each part costs one
additional forward pass. The method generalizes Gao et al., "Scaling deep contrastive learning batch
size under memory limited setup" (2021), to any loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.core.errors import BatchError
from holdfast.core.text import counted
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.loader.random_state import capture, restore
from holdfast.numerics.loss import Terms, read_loss


@dataclass(frozen=True, slots=True)
class TwoPass:
    """A loss function in two parts, for a loss that compares samples with each other.

    Args:
        outputs: Function that takes a batch, or a part of it, and returns a pytree of tensors whose
            first dimension is the batch. The outputs of a sample must not depend on other samples.
            The function may be called twice for each part.
        loss: Function that takes the outputs of all samples and the whole batch, and returns any
            value that a loss function may return. It is called once per attempt, and may use
            parameters of its own, such as a temperature.

    Example:
        >>> spread = TwoPass(lambda x: 2 * x, lambda outputs, batch: outputs.std())
        >>> float(spread(torch.tensor([1.0, 2.0, 3.0])))
        2.0
    """

    outputs: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]

    def __call__(self, batch: Any) -> Any:
        """Return the loss of a batch in one pass: ``loss(outputs(batch), batch)``."""
        return self.loss(self.outputs(batch), batch)


Call = Callable[[Callable[[Any], Any], Any], Any]
Inputs = Callable[[], Sequence[torch.Tensor] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPassRun:
    """Runs the two passes of a split batch."""

    # Function that calls another function with a batch or a part of it, in the context for a
    # forward pass.
    call: Call
    # Function that runs backward from a loss into the given tensors. None means all tensors.
    backward: Callable[[torch.Tensor, Sequence[torch.Tensor] | None], None]
    # Function that returns a new `BufferKeeper`. Each part must change buffers and states only
    # once, although its forward pass runs twice.
    new_keeper: Callable[[], BufferKeeper]
    # The accelerators whose random state is restored.
    devices: Sequence[torch.device]
    # Function that returns the parameters that may receive gradients, called before each backward.
    inputs: Inputs

    def accumulate(
        self, split_loss: TwoPass, batch: Any, parts: Sequence[tuple[Any, int]]
    ) -> Terms:
        """Add the gradient of the loss over all samples to ``.grad``, part by part.

        Afterwards, buffers and random state are the same as if outputs and loss had been computed
        once.

        Args:
            split_loss: The loss function.
            batch: The whole batch.
            parts: The parts of the batch, with the number of samples in each.

        Returns:
            The loss over all samples.
        """
        first_buffers = self.new_keeper()
        first_buffers.capture()
        joined, states = self._first_pass(split_loss, parts)
        terms = read_loss(
            self.call(lambda whole: split_loss.loss(joined, whole), batch),
            sum(samples for _, samples in parts),
        )
        inputs = self.inputs()
        if inputs is not None:
            outputs = [
                leaf
                for leaf in pytree.tree_leaves(joined)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            inputs = [*outputs, *inputs]
        self.backward(terms.total(), inputs)

        last_buffers = self.new_keeper()
        last_buffers.capture()
        last_random_state = capture(self.devices)
        first_buffers.restore()
        self._second_pass(split_loss, parts, states, pytree.tree_leaves(joined))
        last_buffers.restore()
        restore(last_random_state)
        return terms

    def _first_pass(
        self, split_loss: TwoPass, parts: Sequence[tuple[Any, int]]
    ) -> tuple[Any, list[Any]]:
        """Compute the outputs of all parts without a graph.

        Returns:
            The concatenated outputs of all samples, which require gradients, and the random state
            before each part.
        """
        states: list[Any] = []
        outputs: list[list[Any]] = []
        form = None
        with torch.no_grad():
            for part, samples in parts:
                states.append(capture(self.devices))
                leaves, form = pytree.tree_flatten(self.call(split_loss.outputs, part))
                _check_outputs(leaves, samples, outputs[0] if outputs else leaves)
                outputs.append(leaves)
            joined = [
                None if column[0] is None else torch.cat(column)
                for column in zip(*outputs, strict=True)
            ]
        for leaf in joined:
            if leaf is not None and (leaf.is_floating_point() or leaf.is_complex()):
                leaf.requires_grad_()
        assert form is not None
        return pytree.tree_unflatten(joined, form), states

    def _second_pass(
        self,
        split_loss: TwoPass,
        parts: Sequence[tuple[Any, int]],
        states: Sequence[Any],
        joined: Sequence[Any],
    ) -> None:
        """Compute each part's outputs again, and run backward with their slice of the gradient.

        Args:
            split_loss: The loss function.
            parts: The parts, with the number of samples in each.
            states: The random state before each part.
            joined: The outputs of all samples, with their gradients.
        """
        start = 0
        for (part, samples), state in zip(parts, states, strict=True):
            restore(state)
            leaves = pytree.tree_leaves(self.call(split_loss.outputs, part))
            outputs = []
            gradients = []
            for output, whole in zip(leaves, joined, strict=True):
                if whole is not None and whole.grad is not None and output.requires_grad:
                    outputs.append(output)
                    gradients.append(whole.grad[start : start + samples])
            start += samples
            inputs = self.inputs()
            if outputs and (inputs is None or len(inputs) > 0):
                torch.autograd.backward(outputs, gradients, inputs=inputs)


def _check_outputs(leaves: Sequence[Any], samples: int, first: Sequence[Any]) -> None:
    """Raise H201 if the outputs of a part cannot be concatenated with those of the first part."""
    fits = len(leaves) == len(first) and all(
        (leaf is None and before is None)
        or (
            isinstance(leaf, torch.Tensor)
            and leaf.shape[:1] == (samples,)
            and leaf.shape[1:] == before.shape[1:]
        )
        for leaf, before in zip(leaves, first, strict=True)
    )
    if not fits:
        raise BatchError(
            f"the outputs of a TwoPass are {_forms(leaves)} for {counted(samples, 'sample')}, and"
            f" {_forms(first)} for others",
            limit=(
                "the outputs of all parts are concatenated along their first dimension, which must"
                " be the batch"
            ),
            fix=(
                "return tensors with one entry per sample, padded to the same size in each part."
                " Move any computation that concerns the whole batch to the second function."
            ),
            rule="H201",
        )


def _forms(leaves: Sequence[Any]) -> str:
    """Return the shapes of tensors and the types of other values, for an error message."""
    forms = (
        tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in leaves
    )
    return f"[{', '.join(map(str, forms))}]"
