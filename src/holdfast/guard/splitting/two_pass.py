"""Split a loss that compares samples with each other.

Outputs of all parts first, then one loss, then its backward.

    pass 1    outputs of each part, without a graph
    loss      over the outputs of all samples, and its gradient with respect to them
    pass 2    each part once more, with its random numbers, and its slice of that gradient sent back

Exact wherever the outputs of a sample depend on that sample alone. It costs one more forward pass
of each part. After Gao et al., "Scaling deep contrastive learning batch size under memory limited
setup" (2021), for any loss.
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
    """A loss function in two halves, so that a batch can be split although its samples are
    compared.

    Args:
        outputs: Takes a batch, or a part of one, and returns any pytree of tensors whose first
            dimension is the batch. The outputs of a sample must not depend on other samples. It may
            run twice for each part.
        loss: Takes the outputs of all samples and the whole batch, and returns what a loss function
            may return. It runs once in a step, and may use parameters itself, such as a
            temperature.

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
    """How the two passes are carried out."""

    call: Call  # calls a function with a batch or a part, in the contexts that a forward pass needs
    # Of a loss into these; None: everywhere
    backward: Callable[[torch.Tensor, Sequence[torch.Tensor] | None], None]
    # Returns a keeper of buffers and states, which shall move once for each part
    keeper: Callable[[], BufferKeeper]
    devices: Sequence[torch.device]  # whose random state counts
    inputs: Inputs  # where gradients may go, asked before each backward

    def accumulate(
        self, split_loss: TwoPass, batch: Any, parts: Sequence[tuple[Any, int]]
    ) -> Terms:
        """Add the gradient of the loss over all samples to ``.grad``, part by part.

        Return that loss.
        """
        buffers_at_first, buffers_at_last = self.keeper(), self.keeper()
        buffers_at_first.keep()
        joined, states = self._first_pass(split_loss, parts)
        terms = read_loss(
            self.call(lambda given: split_loss.loss(joined, given), batch),
            sum(samples for _, samples in parts),
        )
        leaves = [each for each in pytree.tree_leaves(joined) if isinstance(each, torch.Tensor)]
        reached = self.inputs()
        self.backward(
            terms.total(),
            (
                None
                if reached is None
                else [*(each for each in leaves if each.requires_grad), *reached]
            ),
        )
        buffers_at_last.keep()
        random_at_last = capture(self.devices)
        buffers_at_first.put_back()
        self._second_pass(split_loss, parts, states, pytree.tree_leaves(joined))
        buffers_at_last.put_back()
        restore(random_at_last)
        return terms

    def _first_pass(
        self, split_loss: TwoPass, parts: Sequence[tuple[Any, int]]
    ) -> tuple[Any, list[Any]]:
        """Return the outputs of all samples, as leaves of a graph, and the random state before
        each part.
        """
        states: list[Any] = []
        found: list[list[Any]] = []
        form = None
        with torch.no_grad():
            for part, samples in parts:
                states.append(capture(self.devices))
                leaves, form = pytree.tree_flatten(self.call(split_loss.outputs, part))
                _check_outputs(leaves, samples, found[0] if found else leaves)
                found.append(leaves)
            joined = [
                None if column[0] is None else torch.cat(column)
                for column in zip(*found, strict=True)
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
        start = 0
        for (part, samples), state in zip(parts, states, strict=True):
            restore(state)
            pairs = [
                (output, leaf.grad[start : start + samples])
                for output, leaf in zip(
                    pytree.tree_leaves(self.call(split_loss.outputs, part)), joined, strict=True
                )
                if leaf is not None and leaf.grad is not None and output.requires_grad
            ]
            start += samples
            reached = self.inputs()
            if pairs and (reached is None or reached):
                outputs, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(outputs, gradients, inputs=reached)


def _check_outputs(leaves: Sequence[Any], samples: int, first: Sequence[Any]) -> None:
    """Raise H201 unless these outputs of a part can be joined with those of the first part."""
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
                "outputs of all parts are joined along their first dimension, which must be the"
                " batch"
            ),
            fix=(
                "return tensors with one entry per sample, padded alike in each part; compute what"
                " belongs to the whole batch in the second function."
            ),
            rule="H201",
        )


def _forms(leaves: Sequence[Any]) -> str:
    found = (
        tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in leaves
    )
    return f"[{', '.join(map(str, found))}]"
