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
    """A batch or a part of one, with its number of samples; None if that is not known."""

    batch: Any
    samples: int | None


class BatchEvaluator:
    """Evaluates functions on batches.

    It remembers for each function how many samples have fit into memory, also from one evaluation
    to the next.

    Args:
        models: The models of the run.
        devices: The accelerators of the models.
        device_type: Where the models are, such as ``"cuda"``.
        precision: The precision of the forward pass.
        may_split: Whether a batch may be split. Several ranks must call their model equally often.
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
        # The most samples that fit into memory, by the code of the function: a lambda in a loop is
        # another object in each evaluation, but its code is the same.
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
            split: Where the batch dimension is.
            emit: Records an event, for a batch that had to be split.

        Raises:
            BatchError: H204 if there is no batch, or for outputs that cannot be combined; H205 for
                a scalar output of a batch that had to be split.
            OutOfMemoryError: H401 for a batch that does not fit and cannot be split further.
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
        """Return the outputs for each part of a batch, in order, with the part's samples.

        Parts that are complete are not evaluated again when a later part does not fit.

        Args:
            batch: The batch.
            function: Called with the batch, or with its parts in order.
            split: Where the batch dimension is.
            emit: Records an event.
            held_bytes: Size of the outputs for the batches before, for an error.
        """
        code = _code_of(function)
        most = self._fitting_samples.get(code)
        outputs = []
        # The parts that are still to be evaluated; the next one is the last in the list.
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
                # oneDNN has failed, and not the size of the part: evaluate the part once more.
                emit(run_events.OnednnSwitchedOff())
                continue
            decision = self._decide_to_halve(part, shortage, held_bytes)
            emit(decision)
            most = decision.micro_batch_size
            if self._device_type == "cpu" and switch_off_if_unsafe(self._models):
                # oneDNN creates kernels for new sizes, which is unsafe when memory is short.
                emit(run_events.OnednnSwitchedOff())
        if most is not None:
            # Only a size that has fitted is remembered.
            self._fitting_samples[code] = most
        return outputs

    def _switches_onednn_off(self, part: _Part, shortage: str) -> bool:
        """Switch oneDNN off if it has failed, and return whether it was switched off.

        oneDNN can fail for any size once memory was short. Without it, a single sample may fit.
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
        """Return the outputs on the CPU and None, or None and one line about an out-of-memory."""
        try:
            with autocast(self._device_type, self._precision):
                return _on_cpu(function(batch)), None
        except Exception as error:
            shortage = find_out_of_memory(error)
            if shortage is None:
                raise
            failure = error
        # The frames of the failed call hold its activations, and can be cleared only outside of
        # the exception handler.
        clear_exception_frames(failure)
        del failure
        release_memory(self._devices)
        return None, shortage

    def _decide_to_halve(
        self, part: _Part, shortage: str, held_bytes: int
    ) -> run_events.EvaluationSplit:
        """Decide to evaluate half of the samples of a part that did not fit.

        Args:
            part: The part.
            shortage: One line about the out-of-memory.
            held_bytes: Size of the outputs for the batches before, which are on the host.

        Raises:
            OutOfMemoryError: H401 if the part cannot be split.
        """
        reason = None
        if not self._may_split:
            reason = "it is not split, because several ranks must call the model equally often"
        elif part.samples is None:
            reason = "it cannot be split, because its batch dimension is not known"
        elif part.samples == 1:
            reason = f"a single sample does not fit beside {size(held_bytes)} of earlier outputs"
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
            micro_batch_size=(part.samples + 1) // 2,
        )


class EvaluationResults:
    """Combines the outputs of all batches into one tree of the same structure.

    Outputs that cannot be combined are refused with the batch that they belong to, and not only
    after all batches have been evaluated.
    """

    def __init__(self) -> None:
        # Size of all outputs.
        self.held_bytes = 0
        self._has_outputs = False
        # The outputs for the first part, which give the structure.
        self._example: Any = None
        # The kind of each leaf, by its path; see `_kind_of`.
        self._kinds: dict[str, str] = {}
        # The values of each leaf, in the order of the samples, by the path of the leaf.
        self._values: dict[str, list[Any]] = {}

    def add_batch(self, outputs: list[tuple[Any, int | None]]) -> None:
        """Add the outputs for the parts of one batch.

        Args:
            outputs: For each part in order, its outputs and its number of samples.

        Raises:
            BatchError: H204 or H205 for outputs that cannot be combined.
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
        """Return the outputs of all batches.

        Raises:
            BatchError: H204 if there was no batch, or if the rows of a tensor differ in shape.
        """
        if not self._has_outputs:
            raise _bad_output(
                "the loader yielded no batch to evaluate",
                "pass a loader that is not empty; an iterator that has ended has no batch left.",
            )
        combined = {path: _combine(path, values) for path, values in self._values.items()}
        return _rebuilt(self._example, "the output", combined)


# --- one leaf of the outputs


def _check_leaf(path: str, value: Any, samples: int | None, *, is_split: bool) -> None:
    """Check that a leaf can be combined with those of other batches.

    Args:
        path: Where the leaf is in the outputs.
        value: The leaf.
        samples: The samples that it was computed from; None if not known.
        is_split: Whether these are a part of a batch, instead of a whole one.

    Raises:
        BatchError: H205 for a scalar of a part of a batch; H204 for a value of another type, or one
            that does not have one entry for each sample.
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
    """Raise H204 for a pair that may be two results, and for a `Loss` with further outputs.

    A count, such as that of correct predictions, is an integer too. It is at most the number of
    samples, while a mean is over at least one item per sample.
    """
    if isinstance(value, Loss):
        if value.extra is not None:
            raise _bad_output(
                f"{path} is a Loss with extra outputs", "return these beside the Loss, in a dict."
            )
        return
    items = float(value[1])
    if samples is not None and items < samples:
        raise _bad_output(
            f"{path} is a pair with {items:g} as its second number, for {_described(samples)}: it"
            " may be a mean over so many items, or two results",
            "return Loss(mean, items) for a mean over fewer items than samples, and a dict for two"
            " results.",
        )


def _combine(path: str, values: list[Any]) -> Any:
    """Return one leaf of the combined outputs, from the checked values of all parts."""
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
    """Return how a leaf is combined: as "nothing", "mean", "scalar", "tensor" or "list".

    For a value of any other type, which cannot be combined, return the name of its type.
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
    """Return the mean over all items of means over some of them; NaN if there are no items."""
    total = 0.0
    total_items = 0.0
    for value in values:
        mean, items = (value.mean, value.items) if isinstance(value, Loss) else value
        if float(items) == 0.0:
            # The mean over no items is NaN, and has no weight.
            continue
        total += float(mean) * float(items)
        total_items += float(items)
    if total_items == 0.0:
        return float("nan")
    return total / total_items


def _concatenated(path: str, tensors: list[torch.Tensor]) -> torch.Tensor:
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
    """Return whether an output is a `Loss`, or a pair of a real mean and a whole number of items.

    Two integers, such as the number of correct predictions and that of all, are two results.
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
    """Return the children of a container by key, or None for a leaf, such as a list."""
    if isinstance(node, (list, Loss)) or _is_mean(node):
        return None
    return children_of(node)


def _leaves(node: Any, path: str) -> list[tuple[str, Any]]:
    """Return every leaf with its path, in order."""
    children = _children(node)
    if children is None:
        return [(path, node)]
    return [leaf for key, child in children.items() for leaf in _leaves(child, f"{path}[{key!r}]")]


def _rebuilt(node: Any, path: str, leaves: dict[str, Any]) -> Any:
    """Return the tree with each leaf replaced by the one with its path."""
    children = _children(node)
    if children is None:
        return leaves[path]
    return _container_like(
        node, {key: _rebuilt(child, f"{path}[{key!r}]", leaves) for key, child in children.items()}
    )


def _container_like(node: Any, children: dict[Any, Any]) -> Any:
    """Return a container of the same type with other children, or a dict in place of a mapping.

    Some mappings, such as the outputs of Hugging Face's models, refuse to be changed.
    """
    return children if isinstance(node, Mapping) else rebuild(node, children)


def _on_cpu(output: Any) -> Any:
    """Return outputs with every tensor copied to the CPU, and arrays and NumPy scalars as tensors.

    A copy is made of tensors on the CPU too: they may be views of memory that the loader or the
    model uses again for the next batch.
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
    """Return an object that is the same each time a script defines the same function or lambda."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def _parts_of(part: _Part, most: int, split: Split) -> list[_Part]:
    """Return a batch in parts of at most `most` samples, in order."""
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
