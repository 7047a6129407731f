"""Find out whether a loss chooses the samples that count by values that the model has computed.

Examples are hard-example mining (the mean of the largest quarter of the losses), a threshold
(``loss[loss > 0.7].mean()``) and a mean over the pseudo-labels that are confident enough. Such a loss may be a plain
mean over samples as long as all of them are chosen, and so pass every trial, until the model has learned more.

How it is found: a ``TorchFunctionMode`` follows values through one call of the loss function. Each tensor carries
marks: it depends on parameters; it is a loss or depends on one; it is a mask that such values made; selections went
into it. Only selections that reach the loss that is returned count, so an accuracy for a log does not.

What does not count, since the samples of a part are then treated as they are in the whole batch: masks made from the
batch alone (padding, ``ignore_index``), choices within a sample (the classes of a beam, the pixels of an image), and
choices inside of the model (the experts of a token) unless they are made by the values of a loss.

Does not see what leaves torch on the way (``.item()``, numpy) or is computed by TorchScript. For these there are the
checks that are repeated while batches are split.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

# Functions that choose by rank, with the place of `dim` among their arguments and its default. None: all dimensions.
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
) | {"greater", "greater_equal", "less", "less_equal", "not_equal", "isfinite", "isnan", "isinf", "isclose"}
# What is still a mask after these, if all that went into it were masks or values of the batch alone.
_KEEP_MASKS = frozenset(
    {"__and__", "__or__", "__xor__", "__invert__", "__rand__", "__ror__", "__rxor__", "__iand__", "__ior__"}
    | {"logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"}
    | {"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "cpu", "cuda"}
    | {"view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "expand", "expand_as", "repeat", "__get__"}
    | {"detach", "clone", "contiguous", "transpose", "permute", "t", "cat", "stack", "any", "all"}
    | {"mul", "__mul__", "__rmul__", "multiply", "__rsub__", "rsub", "ones_like", "zeros_like"}
    | {"sum", "count_nonzero", "nansum", "mean"}
)
_COUNTS = frozenset({"sum", "count_nonzero", "nansum", "mean"})
_BY_MASK = frozenset({"masked_select", "nonzero", "argwhere"})
_LOSSES = frozenset({"cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"})
MASK = "mask"


class Selection(NamedTuple):
    """One choice among samples."""

    function: str  # such as ``"topk"``; `MASK` for any use of a mask
    size: int  # of the dimension that was chosen from


@dataclass(frozen=True, slots=True)
class _Marks:
    """What a tensor was computed from."""

    parameters: bool = False
    loss: bool = False
    is_mask: bool = False
    selections: frozenset[int] = frozenset()  # places in `SelectionFinder._made`


_NONE = _Marks()


class SelectionFinder(TorchFunctionMode):
    """Follows one call of a loss function; `reaching` says which selections have gone into its result.

    Args:
        models: What counts as the model: its own choices are not those of the loss.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self._modules = {id(module) for model in models for module in model.modules()}
        self._marks = WeakTensorKeyDictionary()
        self._made: list[Selection] = []

    def reaching(self, losses: Sequence[torch.Tensor]) -> list[Selection]:
        """Return the selections that have gone into these losses, in the order in which they were made."""
        places: set[int] = set()
        for loss in losses:
            places |= self._marks_of(loss).selections
        return [self._made[place] for place in sorted(places)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function and mark what it returns."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        given = [marks for tensor in tensors if (marks := self._marks_of(tensor)) != _NONE]
        if given:
            marks = self._marks_of_result(name, args, kwargs, given)
            # A function that writes into its first argument may return nothing.
            written = args[:1] if name == "__setitem__" else pytree.tree_leaves(result)
            for tensor in written:
                if isinstance(tensor, torch.Tensor):
                    self._marks[tensor] = marks
        return result

    def _marks_of(self, tensor: torch.Tensor) -> _Marks:
        marks: _Marks | None = self._marks.get(tensor)  # type: ignore[no-untyped-call]
        if marks is not None:
            return marks
        # A frozen parameter counts too: an average of the weights that are trained is one.
        return _Marks(parameters=True) if isinstance(tensor, nn.Parameter) or tensor.requires_grad else _NONE

    def _marks_of_result(self, name: str, args: Any, kwargs: Any, given: Sequence[_Marks]) -> _Marks:
        selections: frozenset[int] = frozenset().union(*(marks.selections for marks in given))
        selection = self._selection(name, args, kwargs)
        if selection is not None:
            self._made.append(selection)
            selections |= {len(self._made) - 1}
        is_mask = name in _KEEP_MASKS and all(marks.is_mask for marks in given)
        is_mask = is_mask or (name in _COMPARISONS and any(map(self._may_choose, given)))
        return _Marks(
            parameters=any(marks.parameters for marks in given),
            loss=any(marks.loss for marks in given) or name in _LOSSES or name.endswith("_loss"),
            is_mask=is_mask,
            selections=selections,
        )

    def _may_choose(self, marks: _Marks) -> bool:
        """Say whether a choice by such values is one of the loss: the model's own values choose within the model."""
        return marks.loss or marks.is_mask or (marks.parameters and not self._is_in_model())

    def _is_in_model(self) -> bool:
        """Say whether the ``forward`` of a module of the models is running."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "forward" and id(frame.f_locals.get("self")) in self._modules:
                return True
            frame = frame.f_back
        return False

    def _selection(self, name: str, args: Any, kwargs: Any) -> Selection | None:
        """Return the choice among samples that a call makes, or None."""
        if name in _BY_RANK:
            return self._selection_by_rank(name, args, kwargs)
        mask = self._mask_that_chooses(name, args, kwargs)
        return None if mask is None or not mask.ndim else Selection(MASK, mask.shape[0])

    def _selection_by_rank(self, name: str, args: Any, kwargs: Any) -> Selection | None:
        values = args[0] if args else kwargs.get("input")
        if not isinstance(values, torch.Tensor) or not values.ndim or not self._may_choose(self._marks_of(values)):
            return None
        place, default = _BY_RANK[name]
        dimension = kwargs.get("dim", args[place] if len(args) > place else default)
        if dimension is None:
            return Selection(name, values.numel())
        return Selection(name, values.shape[dimension]) if isinstance(dimension, int) else None

    def _mask_that_chooses(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return a mask by which this call chooses, or which it counts over the first dimension."""
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


def _covers_first(args: Any, kwargs: Any) -> bool:
    """Say whether a reduction goes over the first dimension of its argument."""
    dimensions = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dimensions is None or not args or not isinstance(args[0], torch.Tensor):
        return True
    dimensions = [dimensions] if isinstance(dimensions, int) else list(dimensions)
    return not dimensions or any(dimension % max(1, args[0].ndim) == 0 for dimension in dimensions)
