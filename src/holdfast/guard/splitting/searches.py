"""Search one call of a loss function for reasons against splitting that no gradient shows.

These are buffers that each forward pass changes, plain attributes and variables that each forward
pass changes, and selections of samples, which may change the gradient of later batches.
"""

from __future__ import annotations

import contextlib
from typing import Any

from holdfast.guard.splitting.evaluation import LossEvaluator
from holdfast.guard.splitting.loss_functions import find_side_effects
from holdfast.guard.splitting.selection import MASK, Selection, SelectionFinder
from holdfast.guard.state.buffers import BufferKeeper


def find_changed_buffer(evaluator: LossEvaluator, subset: Any) -> str:
    """Return the name of a buffer that a forward pass changes, or an empty string.

    Running statistics do not count. The change is not undone.
    """
    if not any(True for model in evaluator.models.values() for _ in model.buffers()):
        return ""
    buffers = BufferKeeper(dict(evaluator.models))
    buffers.capture()
    evaluator.loss_from_start(subset)
    buffers.learn()
    return next(iter(buffers.mutable_outside_norms()), "")


def search_side_effects(
    evaluator: LossEvaluator, subset: Any, *, include_logs: bool = False
) -> tuple[str, ...]:
    """Return the names of attributes and variables that each forward pass changes.

    Args:
        evaluator: Calls the loss function.
        subset: The samples to call it with.
        include_logs: Whether to include changes that do not affect the next loss.
    """
    buffers = BufferKeeper(dict(evaluator.models), evaluator.states)
    buffers.capture()

    # Undo each forward pass, so that the next one starts from the same state.
    def forward() -> float:
        loss = evaluator.loss_from_start(subset)
        buffers.restore()
        return loss

    return find_side_effects(
        evaluator.models,
        evaluator.loss_fn,
        forward,
        restored=evaluator.states.objects(),
        include_logs=include_logs,
    )


def find_selection(evaluator: LossEvaluator, whole: Any, part: Any) -> str:
    """Return the name of the function with which the loss selects samples, or an empty string.

    A function selects samples if the dimension from which it selects grows with their number.

    Args:
        evaluator: Calls the loss function, whose comparisons have succeeded.
        whole: Some samples.
        part: Some, but not all, of these samples.
    """
    in_whole = _selections(evaluator, whole)
    in_part = _selections(evaluator, part)
    if in_whole is None or in_part is None:
        return ""
    if len(in_whole) == len(in_part):
        for first, second in zip(in_whole, in_part, strict=True):
            if first.size != second.size:
                return first.function
        return ""
    # The number of selections differs. If both runs made selections, each sample probably made
    # its own, which is harmless. If only one run did, samples may be selected.
    if in_whole and in_part:
        return ""
    return (in_whole or in_part)[0].function


def _selections(evaluator: LossEvaluator, samples: Any) -> list[Selection] | None:
    """Return the selections that reach the loss of some samples, or None if this is unknown."""
    finder = SelectionFinder(evaluator.models.values())
    # The comparisons have shown that the loss can be called, so only the tracing can fail.
    terms = None
    with contextlib.suppress(Exception), finder:
        terms = evaluator.terms_from_start(samples)
    if terms is None:
        return None
    # With declared items, each part is weighted by the items that its threshold selects, which is
    # exact.
    return [
        selection
        for selection in finder.reaching(terms.means)
        if not (terms.declared and selection.function == MASK)
    ]
