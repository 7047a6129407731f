"""Evaluate a function on every batch of a loader, and split a batch that does not fit into memory.

`BatchEvaluator` runs the function, and `EvaluationResults` combines what it returns. The context in
which they run (evaluation mode, no gradients, random state restored) is `Guard.evaluate`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.core.containers import children_of, rebuild
from holdfast.core.errors import BatchError, OutOfMemoryError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.core.policy.kinds import Precision
from holdfast.core.text import counted, size
from holdfast.guard.precision import autocast
from holdfast.loader.splitting import Split, batch_size, micro_batches
from holdfast.memory.onednn import (
    is_on,
    is_onednn_failure,
    switch_off,
    switch_off_if_broken,
    switch_off_if_unsafe,
)
from holdfast.memory.oom import clear_exception_frames, find_out_of_memory, release_memory
from holdfast.numerics.loss import Loss

# Takes a batch, or a part of one, and returns a tree of outputs.
EvaluationFunction = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Part:
    """A batch or a part of one, with its number of samples, or None if the number is unknown."""

    batch: Any
    samples: int | None


class BatchEvaluator:
    """Evaluates functions on batches.

    For each function, it remembers across evaluations how many samples fit into memory.

    Args:
        models: The models of the run.
        devices: The accelerators that the models are on.
        device_type: The type of device that the models are on, such as ``"cuda"``.
        precision: The precision of the forward pass.
        may_split: Whether a batch may be split. This must be False with several ranks, since all
            ranks must call the model equally often.
    """

    def __init__(
        self,
        models: Collection[nn.Module],
        devices: list[torch.device],
        device_type: str,
        precision: Precision,
        *,
        may_split: bool,
    ) -> None:
        self._models = models
        self._devices = devices
        self._device_type = device_type
        self._precision: Precision = precision
        self._may_split = may_split
        # The most samples that fit into memory, keyed by the function's code object. A lambda in a
        # loop is a new function object in each evaluation, but its code object is the same.
        self._fitting_samples: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def evaluate(
        self,
        batches: Iterable[Any],
        function: EvaluationFunction,
        split: Split,
        emit: Callable[[EventData], None],
    ) -> Any:
        """Return the combined outputs of a function for all batches; see `Guard.evaluate_batches`.

        Args:
            batches: The batches.
            function: Called with each batch, or with its parts in order.
            split: The position of the batch dimension, as for `Guard`.
            emit: Function that records an event, such as that a batch had to be split.

        Raises:
            BatchError: H204 if there is no batch, or if outputs cannot be combined. H205 if a batch
                that had to be split has a scalar output.
            OutOfMemoryError: H401 if a batch does not fit and cannot be split further.
        """
        results = EvaluationResults()
        for batch in batches:
            results.add_batch(self._outputs_of(batch, function, split, emit, results.held_bytes))
        return results.combined()

    def _outputs_of(
        self,
        batch: Any,
        function: EvaluationFunction,
        split: Split,
        emit: Callable[[EventData], None],
        held_bytes: int,
    ) -> list[tuple[Any, int | None]]:
        """Return the outputs for each part of a batch, in order, with the part's sample count.

        Parts that are complete are not evaluated again when a later part does not fit.

        Args:
            batch: The batch.
            function: Called with the batch, or with its parts in order.
            split: The position of the batch dimension, as for `Guard`.
            emit: Function that records an event.
            held_bytes: The size of the outputs for all earlier batches, for an error message.
        """
        code = _code_of(function)
        most = self._fitting_samples.get(code)
        outputs = []
        # A stack of the parts that have yet to be evaluated. The next part is the last entry.
        remaining = [_Part(batch, _samples_in(batch, split))]
        while remaining:
            part = remaining.pop()
            if part.samples is not None and most is not None and part.samples > most:
                remaining.extend(reversed(_parts_of(part, most, split)))
                continue
            output, shortage = self._run(function, part.batch)
            if shortage is None:
                outputs.append((output, part.samples))
                continue
            remaining.append(part)
            if self._switches_onednn_off(part, shortage):
                # oneDNN caused the failure, not the size of the part, so evaluate the part again.
                emit(run_events.OnednnSwitchedOff())
                continue
            decision = self._decide_to_halve(part, shortage, held_bytes)
            emit(decision)
            most = decision.micro_batch_size
            if self._device_type == "cpu" and switch_off_if_unsafe(self._models):
                # oneDNN would compile kernels for the new size, which is unsafe when memory is low.
                emit(run_events.OnednnSwitchedOff())
        if most is not None:
            # All parts were evaluated, so this size is known to fit.
            self._fitting_samples[code] = most
        return outputs

    def _switches_onednn_off(self, part: _Part, shortage: str) -> bool:
        """Switch oneDNN off if it has failed, and return whether this call switched it off.

        After a memory shortage, oneDNN can fail for inputs of any size. Without oneDNN, even a
        single sample on which it failed may fit.
        """
        if not is_onednn_failure(shortage) or not is_on():
            return False
        if switch_off_if_broken():
            return True
        if part.samples == 1:
            switch_off()
            return True
        return False

    def _run(self, function: EvaluationFunction, batch: Any) -> tuple[Any, str | None]:
        """Call a function on a batch, and catch an out-of-memory error.

        Returns:
            The outputs on the CPU and None, or None and a one-line message about the error.
        """
        try:
            with autocast(self._device_type, self._precision):
                return _on_cpu(function(batch)), None
        except Exception as error:
            shortage = find_out_of_memory(error)
            if shortage is None:
                raise
            failure = error
        # The frames of the failed call hold its activations. They can be cleared only outside the
        # exception handler.
        clear_exception_frames(failure)
        del failure
        release_memory(self._devices)
        return None, shortage

    def _decide_to_halve(
        self, part: _Part, shortage: str, held_bytes: int
    ) -> run_events.EvaluationSplit:
        """Return the decision to evaluate a part that did not fit in halves.

        Args:
            part: The part.
            shortage: A one-line message about the out-of-memory error.
            held_bytes: The size of the outputs for all earlier batches, which are on the host.

        Raises:
            OutOfMemoryError: H401 if the part cannot be split.
        """
        reason = None
        if not self._may_split:
            reason = (
                "it is not split, because all ranks must call the model the same number of times"
            )
        elif part.samples is None:
            reason = "it cannot be split, because its batch dimension is not known"
        elif part.samples == 1:
            reason = "a single sample does not fit"
            if held_bytes:
                reason += f" in addition to {size(held_bytes)} of earlier outputs"
        if reason is not None or part.samples is None:
            raise OutOfMemoryError(
                f"an evaluation of {_described(part.samples)} ran out of memory ({shortage})",
                limit=str(reason),
                fix=(
                    "use a smaller evaluation batch, free memory, or let fn return smaller outputs;"
                    " if the batch dimension is not known, pass split= to evaluate_batches."
                ),
                rule="H401",
            )
        return run_events.EvaluationSplit(
            error=shortage,
            batch_size=part.samples,
            # Round up, so that an odd number of samples also yields two parts.
            micro_batch_size=(part.samples + 1) // 2,
        )


class EvaluationResults:
    """Combines the outputs of all batches into one tree of the same structure.

    Outputs that cannot be combined raise an error as soon as their batch is added, not only after
    all batches have been evaluated.
    """

    def __init__(self) -> None:
        # The total size of all output tensors in bytes.
        self.held_bytes = 0
        self._has_outputs = False
        # The outputs for the first part, whose structure the combined outputs have.
        self._example: Any = None
        # The kind of each leaf, keyed by its path; see `_kind_of`.
        self._kinds: dict[str, str] = {}
        # The values of each leaf in the order of the samples, keyed by the leaf's path.
        self._values: dict[str, list[Any]] = {}

    def add_batch(self, outputs: list[tuple[Any, int | None]]) -> None:
        """Add the outputs for the parts of one batch.

        Args:
            outputs: The outputs and the number of samples of each part, in order.

        Raises:
            BatchError: H204 or H205 if the outputs cannot be combined.
        """
        is_split = len(outputs) > 1
        for output, samples in outputs:
            leaves = dict(_leaves(output, "the output"))
            kinds = {path: _kind_of(value) for path, value in leaves.items()}
            if not self._has_outputs:
                self._has_outputs = True
                self._example = output
                self._kinds = kinds
                self._values = {path: [] for path in leaves}
            if kinds != self._kinds:
                raise _bad_output(
                    f"fn returned {_described_kinds(kinds)} for this batch, and"
                    f" {_described_kinds(self._kinds)} for the first one",
                    "return the same structure for every batch; .squeeze() also drops the batch"
                    " dimension of a single sample.",
                )
            for path, value in leaves.items():
                _check_leaf(path, value, samples, is_split=is_split)
                self._values[path].append(value)
                if isinstance(value, torch.Tensor):
                    self.held_bytes += value.nbytes

    def combined(self) -> Any:
        """Return one tree with the combined outputs of all batches.

        Raises:
            BatchError: H204 if there was no batch, or if the rows of a tensor differ in shape.
        """
        if not self._has_outputs:
            raise _bad_output(
                "the loader yielded no batch to evaluate",
                "pass a loader that is not empty; an exhausted iterator has no batches left.",
            )
        combined = {path: _combine(path, values) for path, values in self._values.items()}
        return _rebuilt(self._example, "the output", combined)


# --- one leaf of the outputs


def _check_leaf(path: str, value: Any, samples: int | None, *, is_split: bool) -> None:
    """Check that a leaf can be combined with the corresponding leaves of other batches.

    Args:
        path: The path of the leaf in the outputs, for messages.
        value: The leaf.
        samples: The number of samples that the leaf was computed from, or None if unknown.
        is_split: Whether the leaf was computed from a part of a batch instead of a whole batch.

    Raises:
        BatchError: H205 if the leaf is a scalar and the batch was split. H204 if the leaf has an
            unsupported type, or does not have one entry for each sample.
    """
    kind = _kind_of(value)
    if kind == "nothing":
        return
    if kind == "mean":
        _check_mean(path, value, samples)
        return
    if kind == "scalar":
        if is_split:
            raise BatchError(
                f"{path} is a scalar of a part of a batch",
                limit=(
                    "a batch did not fit into memory and was split, and it is not known how"
                    " scalars of its parts are combined"
                ),
                fix="return (mean, items), Loss(mean, items), or one value per sample.",
                rule="H205",
            )
        return
    if kind not in ("tensor", "list"):
        raise _bad_output(
            f"{path} is a {kind}",
            "return tensors or lists with one entry per sample, scalars, or (mean, items).",
        )
    if samples is not None and len(value) != samples:
        raise _bad_output(
            f"{path} has {counted(len(value), 'row')} for {_described(samples)}",
            "return one entry per sample: a tuple or dict for several outputs, (mean, items) for a"
            " mean.",
        )


def _check_mean(path: str, value: Any, samples: int | None) -> None:
    """Raise H204 for a pair that may not be ``(mean, items)``, and for a `Loss` with ``extra``.

    The second number of a pair may be a result such as the number of correct predictions instead of
    a number of items. Such a count rarely exceeds the number of samples, whereas a mean usually has
    at least one item per sample. A pair is therefore refused if its second number is smaller than
    the number of samples.
    """
    if isinstance(value, Loss):
        if value.extra is not None:
            raise _bad_output(
                f"{path} is a Loss with extra outputs",
                "return the Loss without extra, in a dict with the others.",
            )
        return
    items = float(value[1])
    if samples is not None and items < samples:
        raise _bad_output(
            f"{path} is a pair whose second number is {items:g}, for {_described(samples)}: it may"
            " be a mean and its number of items, or two separate results",
            "return Loss(mean, items) for a mean over fewer items than samples, and a dict for two"
            " results.",
        )


def _combine(path: str, values: list[Any]) -> Any:
    """Combine the checked values of one leaf from all parts into one value, and return it."""
    kind = _kind_of(values[0])
    if kind == "nothing":
        return None
    if kind == "mean":
        return _combined_mean(values)
    if kind == "scalar":
        return torch.stack([torch.as_tensor(value) for value in values])
    if kind == "tensor":
        return _concatenated(path, values)
    return [entry for value in values for entry in value]


def _kind_of(value: Any) -> str:
    """Return the kind of a leaf, which determines how it is combined.

    Returns:
        ``"nothing"``, ``"mean"``, ``"scalar"``, ``"tensor"`` or ``"list"``. For any other value,
        which cannot be combined, a description of its type.
    """
    if value is None:
        return "nothing"
    if _is_mean(value):
        return "mean"
    if _is_scalar(value):
        return "scalar"
    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and not value.is_nested
        return "tensor" if is_dense else "sparse or nested tensor"
    return type(value).__name__


def _described_kinds(kinds: dict[str, str]) -> str:
    return ", ".join(f"{path} ({kind})" for path, kind in kinds.items())


def _combined_mean(values: list[Any]) -> float:
    """Return the mean over all items, given ``(mean, items)`` of each part; NaN without items."""
    total = 0.0
    total_items = 0.0
    for value in values:
        mean, items = (value.mean, value.items) if isinstance(value, Loss) else value
        if float(items) == 0.0:
            # The mean over no items is NaN, which would make the total NaN even with weight 0.
            continue
        total += float(mean) * float(items)
        total_items += float(items)
    if total_items == 0.0:
        return float("nan")
    return total / total_items


def _concatenated(path: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    # Only the first dimension, which counts the samples, may differ between batches.
    shapes = dict.fromkeys(tuple(tensor.shape[1:]) for tensor in tensors)
    if len(shapes) > 1:
        raise _bad_output(
            f"{path} has rows of different shapes: {', '.join(map(str, shapes))}",
            "pad the rows to one shape, or return a list with one tensor per sample.",
        )
    return torch.cat(tensors)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, (bool, int, float))


def _is_mean(value: Any) -> bool:
    """Return whether an output is a `Loss`, or a pair of a floating-point mean and an item count.

    A pair of two integers, such as the numbers of correct and of all predictions, is not a mean.
    """
    if isinstance(value, Loss):
        return True
    if type(value) is not tuple or len(value) != 2 or not all(map(_is_scalar, value)):
        return False
    mean, items = map(torch.as_tensor, value)
    if items.is_floating_point() or items.dtype is torch.bool:
        return False
    return mean.is_floating_point()


# --- the tree of outputs


def _children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, or None for a leaf. A list counts as a leaf."""
    if isinstance(node, (list, Loss)) or _is_mean(node):
        return None
    return children_of(node)


def _leaves(node: Any, path: str) -> list[tuple[str, Any]]:
    """Return every leaf under a node with its path, in order.

    Args:
        node: The root of the tree.
        path: The path of the root, with which the paths of its leaves begin.
    """
    children = _children(node)
    if children is None:
        return [(path, node)]
    return [leaf for key, child in children.items() for leaf in _leaves(child, f"{path}[{key!r}]")]


def _rebuilt(node: Any, path: str, leaves: dict[str, Any]) -> Any:
    """Return a copy of a tree in which each leaf is replaced by the value for its path.

    Args:
        node: The root of the tree.
        path: The path of the root.
        leaves: The new leaves by path.
    """
    children = _children(node)
    if children is None:
        return leaves[path]
    return _container_like(
        node, {key: _rebuilt(child, f"{path}[{key!r}]", leaves) for key, child in children.items()}
    )


def _container_like(node: Any, children: dict[Any, Any]) -> Any:
    """Return a container of the node's type with other children; a mapping becomes a dict.

    Some mappings, such as the outputs of Hugging Face models, cannot be rebuilt with other values.
    """
    return children if isinstance(node, Mapping) else rebuild(node, children)


def _on_cpu(output: Any) -> Any:
    """Return a copy of the outputs on the CPU. NumPy arrays and scalars become tensors.

    Tensors that are already on the CPU are copied too, since they may be views of memory that the
    loader or the model reuses for the next batch.
    """
    if isinstance(output, torch.Tensor):
        return output.detach().to("cpu", copy=True)
    if isinstance(output, (np.ndarray, np.generic)):
        return torch.tensor(output)
    if isinstance(output, Loss):
        return Loss(_on_cpu(output.mean), items=_on_cpu(output.items), extra=output.extra)
    if isinstance(output, list):
        return [_on_cpu(entry) for entry in output]
    children = children_of(output)
    if children is None:
        return output
    return _container_like(output, {key: _on_cpu(child) for key, child in children.items()})


def _code_of(function: EvaluationFunction) -> Any:
    """Return the code object of a function, or the type of a callable that has none.

    It is the same object each time that a script defines the same function or lambda.
    """
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def _parts_of(part: _Part, most: int, split: Split) -> list[_Part]:
    """Split a part into smaller parts of at most `most` samples, and return them in order."""
    assert part.samples is not None
    return [
        _Part(batch, samples)
        for batch, samples in micro_batches(part.batch, part.samples, most, split)
    ]


def _samples_in(batch: Any, split: Split) -> int | None:
    """Return the number of samples in a batch, or None if it has no known batch dimension.

    Raises:
        BatchError: H204 or H205 if `split` was passed and does not match the batch.
    """
    try:
        return batch_size(batch, split)
    except BatchError:
        if split != 0:
            raise
        return None


def _described(samples: int | None) -> str:
    if samples is None:
        return "a batch"
    return f"a batch of {counted(samples, 'sample')}"


def _bad_output(problem: str, fix: str) -> BatchError:
    return BatchError(
        problem,
        limit="the outputs of all batches are combined in the order of the samples",
        fix=fix,
        rule="H204",
    )
