"""Detect losses that select samples by values that the model has computed.

Examples are hard-example mining (the mean of the largest quarter of the losses), a threshold
(``loss[loss > 0.7].mean()``) and a mean over pseudo-labels with high confidence. As long as such a
loss selects all samples, it equals a plain mean, and a trial split shows no difference. Later, when
it selects only some samples, splitting would change the gradient.

`find_selection` compares the selections that a loss makes for some samples and for a part of them.
A ``TorchFunctionMode`` traces one call of the loss function. It marks tensors that depend on
parameters, on a loss or on a selection, and masks that were computed from such tensors. A selection
counts only if the returned loss depends on it. For example, the selection in an accuracy that is
only logged does not count.

Some selections do not count, because they give the same result in a part as in the whole batch:
masks computed from the batch alone (padding, ``ignore_index``), selections within a sample (the
classes of a beam, the pixels of an image), and selections inside the model (the experts for a
token) that do not depend on a loss.

Values that are converted to an array or a list cannot be traced. If the loss function then picks
entries of a loss vector by position, it may have computed the positions from those values, so this
counts as a selection. Single numbers (``.item()``) and TorchScript are not traced. Only the checks
that are repeated while batches are being split can reveal selections based on them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.guard.splitting.trial.evaluation import LossEvaluator

# Functions that select by rank order, with the position of their `dim` argument and its default.
# None means all dimensions.
_BY_RANK: dict[str, tuple[int, int | None]] = {
    "topk": (2, -1),
    "sort": (1, -1),
    "argsort": (1, -1),
    "msort": (1, 0),
    "kthvalue": (2, -1),
    "median": (1, None),
    "nanmedian": (1, None),
    "quantile": (2, None),
    "nanquantile": (2, None),
    "multinomial": (3, -1),
}
_COMPARISONS = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("gt", "ge", "lt", "le", "eq", "ne")
    for prefix, suffix in (("", ""), ("__", "__"))
) | {
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "not_equal",
    "isfinite",
    "isnan",
    "isinf",
    "isclose",
}
# The result of one of these functions is a mask if all its marked arguments are masks.
_KEEP_MASKS = frozenset(
    {
        "__and__",
        "__or__",
        "__xor__",
        "__invert__",
        "__rand__",
        "__ror__",
        "__rxor__",
        "__iand__",
        "__ior__",
    }
    | {
        "logical_and",
        "logical_or",
        "logical_xor",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
    }
    | {
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "bool",
        "cpu",
        "cuda",
    }
    | {
        "view",
        "reshape",
        "flatten",
        "ravel",
        "squeeze",
        "unsqueeze",
        "expand",
        "expand_as",
        "repeat",
        "__get__",
    }
    | {"detach", "clone", "contiguous", "transpose", "permute", "t", "cat", "stack", "any", "all"}
    | {"mul", "__mul__", "__rmul__", "multiply", "__rsub__", "rsub", "ones_like", "zeros_like"}
    | {"sum", "count_nonzero", "nansum", "mean"}
)
# Reductions that count the entries of a mask.
_COUNTS = frozenset({"sum", "count_nonzero", "nansum", "mean"})
# Functions that select by a mask.
_BY_MASK = frozenset({"masked_select", "nonzero", "argwhere"})
# Functions that convert the values of a tensor to an array or a list, and functions that pick
# entries by position.
_TO_HOST = frozenset({"numpy", "tolist", "__array__"})
_BY_POSITION = frozenset({"__getitem__", "index_select", "take", "gather"})
_LOSSES = frozenset(
    {"cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
)
MASK = "mask"
HOST = "positions chosen outside of torch"


class Selection(NamedTuple):
    """A selection made by the loss function.

    Attributes:
        function: The name of the torch function, such as ``"topk"``. `MASK` stands for any use of a
            mask, and `HOST` for positions that may have been computed outside of torch.
        size: The size of the dimension along which the function selects.
    """

    function: str
    size: int


@dataclass(frozen=True, slots=True)
class _Marks:
    """The origin of a tensor's values.

    Attributes:
        parameters: Whether the tensor depends on parameters.
        loss: Whether the tensor is the result of a loss function or depends on one.
        is_mask: Whether the tensor is a mask computed from marked values.
        selections: The selections on which the tensor depends, as indices of
            `SelectionFinder._selections`.
    """

    parameters: bool = False
    loss: bool = False
    is_mask: bool = False
    selections: frozenset[int] = frozenset()


_NO_MARKS = _Marks()


class SelectionFinder(TorchFunctionMode):
    """Traces the selections made in one call of a loss function.

    Args:
        models: The models of the run. Selections inside them do not count.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self._modules = {id(module) for model in models for module in model.modules()}
        self._marks = WeakTensorKeyDictionary()
        self._selections: list[Selection] = []
        # Whether values that depend on parameters or losses were converted to an array or a list.
        self._values_left_torch = False

    def reaching(self, losses: Sequence[torch.Tensor]) -> list[Selection]:
        """Return the selections on which these losses depend, in chronological order."""
        indices: set[int] = set()
        for loss in losses:
            indices |= self._marks_of(loss).selections
        return [self._selections[index] for index in sorted(indices)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function, and mark the tensors that it returns or writes to."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _TO_HOST:
            self._note_conversion(args[0])
        argument_marks = self._marks_among((args, kwargs))
        if argument_marks:
            marks = self._marks_of_result(name, args, kwargs, argument_marks)
            # `__setitem__` writes into its first argument and returns None.
            outputs = args[:1] if name == "__setitem__" else result
            for tensor in _tensors_in(outputs):
                self._marks[tensor] = marks
        return result

    def _note_conversion(self, tensor: torch.Tensor) -> None:
        """Record that the values of a tensor are converted to an array or a list."""
        if tensor.ndim and self._selects_for_loss(self._marks_of(tensor)):
            self._values_left_torch = True

    def _marks_among(self, arguments: Any) -> list[_Marks]:
        """Return the marks of those arguments of a call that are marked tensors."""
        marks = [self._marks_of(tensor) for tensor in _tensors_in(arguments)]
        return [mark for mark in marks if mark != _NO_MARKS]

    def _marks_of(self, tensor: torch.Tensor) -> _Marks:
        marks: _Marks | None = self._marks.get(tensor)  # type: ignore[no-untyped-call]
        if marks is not None:
            return marks
        # Frozen parameters count too, since they may be an average of the trained weights.
        return (
            _Marks(parameters=True)
            if isinstance(tensor, nn.Parameter) or tensor.requires_grad
            else _NO_MARKS
        )

    def _marks_of_result(
        self, name: str, args: Any, kwargs: Any, argument_marks: Sequence[_Marks]
    ) -> _Marks:
        """Derive the marks of a function's result from its marked arguments."""
        selections: frozenset[int] = frozenset().union(
            *(marks.selections for marks in argument_marks)
        )
        selection = self._selection(name, args, kwargs)
        if selection is not None:
            self._selections.append(selection)
            selections |= {len(self._selections) - 1}
        is_mask = name in _KEEP_MASKS and all(marks.is_mask for marks in argument_marks)
        is_mask = is_mask or (
            name in _COMPARISONS and any(map(self._selects_for_loss, argument_marks))
        )
        is_loss = name in _LOSSES or name.endswith("_loss")
        return _Marks(
            parameters=any(marks.parameters for marks in argument_marks),
            loss=is_loss or any(marks.loss for marks in argument_marks),
            is_mask=is_mask,
            selections=selections,
        )

    def _selects_for_loss(self, marks: _Marks) -> bool:
        """Return whether a selection by values with these marks is part of the loss.

        Inside a model's ``forward``, a selection is part of the loss only if the values depend on a
        loss or a mask. Otherwise, it is part of the model.
        """
        return marks.loss or marks.is_mask or (marks.parameters and not self._is_in_model())

    def _is_in_model(self) -> bool:
        """Return whether the ``forward`` method of any of the models' modules is running."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if (
                frame.f_code.co_name == "forward"
                and id(frame.f_locals.get("self")) in self._modules
            ):
                return True
            frame = frame.f_back
        return False

    def _selection(self, name: str, args: Any, kwargs: Any) -> Selection | None:
        """Return the selection that a function call makes, or None if it makes none."""
        if name in _BY_RANK:
            return self._selection_by_rank(name, args, kwargs)
        mask = self._selecting_mask(name, args, kwargs)
        if mask is not None:
            return Selection(MASK, mask.shape[0]) if mask.ndim else None
        return self._selection_on_host(name, args, kwargs)

    def _selection_on_host(self, name: str, args: Any, kwargs: Any) -> Selection | None:
        """Return a selection by positions that may have been computed outside of torch."""
        values = args[0] if args else kwargs.get("input")
        if (
            not self._values_left_torch
            or name not in _BY_POSITION
            or not isinstance(values, torch.Tensor)
        ):
            return None
        if values.ndim != 1 or not self._selects_for_loss(self._marks_of(values)):
            return None
        # A slice or a single index picks entries regardless of their values.
        if name == "__getitem__" and not isinstance(args[1], (list, np.ndarray, torch.Tensor)):
            return None
        return Selection(HOST, values.shape[0])

    def _selection_by_rank(self, name: str, args: Any, kwargs: Any) -> Selection | None:
        """Return the selection that a call of a function in `_BY_RANK` makes, or None."""
        values = args[0] if args else kwargs.get("input")
        if not isinstance(values, torch.Tensor) or not values.ndim:
            return None
        if not self._selects_for_loss(self._marks_of(values)):
            return None
        position, default = _BY_RANK[name]
        dimension = kwargs.get("dim", args[position] if len(args) > position else default)
        if dimension is None:
            return Selection(name, values.numel())
        return Selection(name, values.shape[dimension]) if isinstance(dimension, int) else None

    def _selecting_mask(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return the mask by which a call selects or counts over the first dimension, or None."""
        if name == "__getitem__":
            candidates = pytree.tree_leaves(args[1:])
        elif name in _BY_MASK or (name == "where" and len(args) + len(kwargs) == 1):
            candidates = pytree.tree_leaves((args, kwargs))
        elif name in _COUNTS and _covers_first(args, kwargs):
            candidates = args[:1]
        else:
            return None
        for candidate in candidates:
            if isinstance(candidate, torch.Tensor) and self._marks_of(candidate).is_mask:
                return candidate
        return None


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments or the result of a call."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _covers_first(args: Any, kwargs: Any) -> bool:
    """Return whether a reduction covers the first dimension of its argument."""
    dimensions = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dimensions is None or not args or not isinstance(args[0], torch.Tensor):
        return True
    dimensions = [dimensions] if isinstance(dimensions, int) else list(dimensions)
    # The modulo turns a negative dimension into the equivalent positive one.
    return not dimensions or any(dimension % max(1, args[0].ndim) == 0 for dimension in dimensions)


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
