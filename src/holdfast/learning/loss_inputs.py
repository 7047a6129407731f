"""What loss functions are given: shapes, ranges and labels, seen through a ``TorchFunctionMode`` in sampled steps.

Only measures; what a number means is judged by the rules in ``diagnose``. Nothing is changed: no random number is
drawn, and every function returns what it returned without the mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from holdfast.learning.loss_sites import LossSites, elements
from holdfast.numerics.eager import is_symbolic

_LOGIT_LOSSES = ("cross_entropy", "binary_cross_entropy_with_logits")
_REGRESSION = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_WITH_TARGET = (*_LOGIT_LOSSES, *_REGRESSION, "nll_loss", "binary_cross_entropy", "kl_div")
_SIGNED_TARGETS = {
    "cosine_embedding_loss": 2, "margin_ranking_loss": 2, "hinge_embedding_loss": 1, "soft_margin_loss": 1,
}  # fmt: skip
"""Losses whose targets are 1 and -1, and the place of the target among their arguments."""
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "embedding", "matmul")
_REACH = {"Tanh": (-1.0, 1.0), "Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Relu": (0.0, math.inf)}
_NORMALISERS = ("softmax", "log_softmax", "log")
_DIFFERENCES = ("sub", "rsub", "__sub__", "__rsub__", "subtract")
_ACTIVATIONS = {"relu": "relu", "relu_": "relu", "tanh": "tanh", "tanh_": "tanh", "sigmoid": "sigmoid"}
_ROWS = 256
"""Rows of an input that are looked at: enough for a yes or no, and little work beside the loss itself."""

# Nodes of the graph that move values without changing them, so that the node behind them is the real source.
_MOVES = ("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Select", "Slice")
_REORDERS = ("Transpose", "Permute", "T", "Index", "Gather", "Clamp")


def source_of(tensor: Tensor) -> tuple[str, int | None, bool]:
    """Return what made a tensor, behind views: the operation, its dimension if it has one, and if it was clamped.

    Args:
        tensor: Of any shape, with a graph.

    Returns:
        Such as ``("Softmax", 1, False)``; the name is ``""`` for a tensor without a graph. The dimension is None
        where something reordered the axes in between.
    """
    node, moved, clamped = tensor.grad_fn, False, False
    for _ in range(8):
        if node is None:
            return "", None, clamped
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name not in _MOVES and name not in _REORDERS:
            dim = getattr(node, "_saved_dim", None) if name in ("Softmax", "LogSoftmax") else None
            return name, None if dim is None or moved else _signed(dim), clamped
        moved = moved or name in ("Transpose", "Permute", "T")
        clamped = clamped or name == "Clamp"
        node = node.next_functions[0][0] if node.next_functions else None
    return "", None, clamped


def unscaled(loss: Tensor) -> float:
    """Return the value of a loss, without the factor of a loss scaler; one host sync.

    Args:
        loss: One element, on which backward is about to be called.
    """
    value, node = float(loss.detach()), loss.grad_fn
    factor = getattr(node, "_saved_other", None) if node is not None and node.name() == "MulBackward0" else None
    if isinstance(factor, Tensor) and factor.numel() == 1 and not factor.requires_grad:
        scale = float(factor)
        if scale > 1 and math.log2(scale).is_integer():  # as torch.amp.GradScaler's are
            return value / scale
    return value


def _signed(dim: int) -> int:
    # Saved as an unsigned 64-bit number.
    return dim - 2**64 if dim >= 2**63 else dim


class LossInputs(TorchFunctionMode):
    """Sees calls of loss functions, of activations and of ``backward`` while it is entered.

    Args:
        sites: Where the facts are collected, by the place of the call.
        on_activation: Called with the name and the output of each relu, tanh and sigmoid.
        on_backward: Called with the loss before each backward pass.
        on_weight: Called with each parameter that a layer computes with.
    """

    def __init__(
        self,
        sites: LossSites,
        on_activation: Callable[[str, Tensor], None],
        on_backward: Callable[[Tensor], None],
        on_weight: Callable[[torch.nn.Parameter], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.loaded = False
        """Whether a torch loader with workers was asked for a batch to train with, since this was last False."""
        self._on_weight = on_weight
        self._sites = sites
        self._on_activation = on_activation
        self._on_backward = on_backward
        self.in_backward = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and look at what it was given if it is one that we know."""
        del types
        kwargs = kwargs or {}
        if is_symbolic():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "backward" and args and isinstance(args[0], Tensor):
            self._on_backward(args[0])
            self.in_backward = True
            try:
                return func(*args, **kwargs)
            finally:
                self.in_backward = False
        result = func(*args, **kwargs)
        if not (torch.is_grad_enabled() and isinstance(result, Tensor) and result.requires_grad):
            # Each batch of a torch loader is a range of the profiler, which carries the name of its class.
            if name == "_record_function_enter_new" and "#_MultiProcessing" in str(args[0]):
                self.loaded = self.loaded or torch.is_grad_enabled()
            return result
        if name in _WITH_TARGET:
            self._loss(name, args, kwargs, result)
        elif name in _ACTIVATIONS:
            self._on_activation(_ACTIVATIONS[name], result.detach())
        elif name in _LAYERS:
            for given in args:
                if isinstance(given, torch.nn.Parameter):
                    self._on_weight(given)
        elif name in _SIGNED_TARGETS:
            target = _argument(args, kwargs, _SIGNED_TARGETS[name], ("target",))
            if isinstance(target, Tensor):
                self._sites.note(name, target_out_of_range=bool((target.detach().abs() != 1).any()))
        elif name in _NORMALISERS:
            self._normaliser(name, args, kwargs, result)
        elif name in _DIFFERENCES:
            self._difference(args, result)
        elif name == "ctc_loss":
            given = _argument(args, kwargs, 0, ("log_probs",))
            self._sites.note("ctc_loss", positive=float(given.detach().max()) > 1e-4)
        return result

    def _loss(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        given = _argument(args, kwargs, 0, ("input",))
        target = _argument(args, kwargs, 1, ("target",))
        if not (isinstance(given, Tensor) and isinstance(target, Tensor) and given.numel() and target.numel()):
            return
        site = self._sites.enter(name)
        with torch.no_grad():
            if given.requires_grad and given.is_floating_point():
                site.add(_flags(name, given, target))
            if name in _REGRESSION and _grows(given.shape, target.shape):
                site.add({"broadcast": True}, shapes=f"{tuple(given.shape)} and {tuple(target.shape)}")
            plain = kwargs.get("weight") is None and not kwargs.get("label_smoothing")
            plain = plain and kwargs.get("pos_weight") is None and not (len(args) > 2 and args[2] is not None)
            site.targets(target, ignored=kwargs.get("ignore_index", -100))
            value = result.detach().float()
            value = value / elements(name, given, target) if kwargs.get("reduction") == "sum" else value.mean()
            site.value(float(value), comparable=plain and kwargs.get("beta", 1.0) == 1.0)
        if name != "kl_div":
            _watch_sign(site.signs, result, kwargs.get("reduction", "mean"))

    def _normaliser(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        given = _argument(args, kwargs, 0, ("input",))
        if not (isinstance(given, Tensor) and given.requires_grad):
            return
        source, dim, _ = source_of(given)
        over_batch = source in ("Softmax", "LogSoftmax") and dim in (0, -2) and name == "log" and not _square(given)
        twice = name != "log" and source == "Softmax"
        if name == "log_softmax":
            site = self._sites.enter(name)
            wrong = _one_axis(result) and _dimension(args, kwargs) in (0, -2)
            site.add({"softmax_input": twice, "rectified_source": source == "Relu", "batch_axis_made": wrong})
            result.register_hook(lambda gradient: site.signs.extend(_likelihood_sign(gradient)))  # type: ignore[no-untyped-call]
        elif twice or over_batch:
            self._sites.note(name, softmax_input=twice, batch_axis=over_batch)

    def _difference(self, args: Sequence[Any], result: Tensor) -> None:
        if len(args) < 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
            return
        predicted, data = args[:2] if args[0].requires_grad else (args[1], args[0])
        if predicted.shape == data.shape and not data.requires_grad and (beyond := _beyond(predicted, data)):
            self._sites.enter("difference").add(beyond)
        left, right = args[0].shape, args[1].shape
        # (N, 1) - (N,) is N x N: one side is predicted, the other is data.
        lost = sorted((left, right), key=len)
        if len(lost[0]) == 1 and len(lost[1]) == 2 and lost[1][1] == 1 and lost[0][0] == lost[1][0] > 1:
            data = not args[0].requires_grad or not args[1].requires_grad
            if data and result.dim() == 2:
                self._sites.note("difference", shapes=f"{tuple(left)} and {tuple(right)}", broadcast=True)


def _watch_sign(signs: list[int], result: Tensor, reduction: str) -> None:
    """Note, when backward comes by, with which sign a loss enters the whole."""
    if reduction == "none":
        return

    def note(gradient: Tensor) -> None:
        value = float(gradient)
        if math.isfinite(value) and value != 0:
            signs.append(1 if value > 0 else -1)

    result.register_hook(note)  # type: ignore[no-untyped-call]


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, names: tuple[str, ...]) -> Any:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _one_axis(scores: Tensor) -> bool:
    """Return whether scores are of samples and classes. A square may be pairs, scored both ways, as in CLIP."""
    return scores.dim() == 2 and scores.shape[0] > 1 and not _square(scores)


def _square(scores: Tensor) -> bool:
    return scores.dim() > 2 or (scores.dim() == 2 and scores.shape[0] == scores.shape[1])


def _beyond(predicted: Tensor, target: Tensor) -> dict[str, bool]:
    """Return whether many targets lie beyond what the activation that made the predictions can give."""
    source, _, _ = source_of(predicted)
    if source not in _REACH:
        return {}
    least, most = _REACH[source]
    outside = (target.detach() < least) | (target.detach() > most)
    return {f"beyond_{source.lower()}": bool(outside.float().mean() > 0.25)}


def _dimension(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("dim", args[1] if len(args) > 1 else None)


def _likelihood_sign(gradient: Tensor) -> list[int]:
    """Return the direction in which a log-probability is pushed, if all agree: -1 is what a likelihood wants."""
    lowest, highest = (float(value) for value in torch.aminmax(gradient.detach()))
    if lowest < 0 < highest or lowest == highest == 0 or not math.isfinite(lowest + highest):
        return []
    return [1] if highest <= 0 else [-1]  # told as the sign of the likelihood's loss: 1 is right


def _grows(given: torch.Size, target: torch.Size) -> bool:
    """Return whether broadcasting makes more pairs than either side has values."""
    if given == target:
        return False
    whole = math.prod(torch.broadcast_shapes(given, target))  # type: ignore[no-untyped-call]
    return whole > max(math.prod(given), math.prod(target))


def _rows(given: Tensor) -> Tensor:
    """Return at most `_ROWS` rows of class scores, shape ``(rows, classes)``."""
    if given.dim() < 2:
        return given.detach().reshape(1, -1)
    wide = given.detach()
    per_sample = math.prod(wide.shape[2:])
    wide = wide[: max(1, _ROWS // max(1, per_sample))]
    return wide.movedim(1, -1).reshape(-1, given.shape[1])[:_ROWS]


def _flags(name: str, given: Tensor, target: Tensor) -> dict[str, bool]:
    """Return what can be said for sure about the first argument of a loss function, one host sync."""
    rows = _rows(given).float()
    source, dim, clamped = source_of(given)
    one_axis = _one_axis(given) and dim in (0, -2)
    sums = rows.sum(-1)
    log_sums, zeros = rows.logsumexp(-1), (rows == 0).float().mean()
    bounds = ((rows <= rows.min()) | (rows >= rows.max())).float().mean()
    low, high = target.detach().float().aminmax() if target.is_floating_point() else (rows.new_zeros(()),) * 2
    numbers = torch.stack(
        [rows.min(), rows.max(), (sums - 1).abs().max(), log_sums.abs().max(), zeros, bounds, low, high]
    ).tolist()
    least, most, sum_error, log_error, zero_share, at_bounds, target_low, target_high = numbers
    classes = rows.shape[-1] > 1
    unit = least >= 0 and most <= 1 and rows.numel() >= 16
    found: dict[str, bool] = {"batch_axis": source in ("Softmax", "LogSoftmax") and one_axis}
    if name in _LOGIT_LOSSES:
        found |= {
            "softmax_input": source == "Softmax" or (classes and unit and sum_error < 1e-4),  # catalogue 36
            "sigmoid_source": source == "Sigmoid",
            "tanh_source": source == "Tanh",
            "unit_spread": least < 0.1 and most > 0.9,
            "unit_range": unit and source != "Softmax" and name != "cross_entropy",
            "rectified_source": source == "Relu",
            "rectified": least == 0 and most > 0 and zero_share > 0.15,  # catalogue 37
        }
    if name == "nll_loss":
        found |= {"positive": most > 1e-4, "not_normalised": most <= 1e-4 and classes and log_error > 1e-2}
    if name == "kl_div":
        found |= {"positive": most > 1e-4}
    if name == "binary_cross_entropy":
        found["clamped_scores"] = clamped and source not in ("Sigmoid", "Softmax", "") and at_bounds > 0.2
    if name in _REGRESSION:
        found |= _beyond(given, target)
    if name.startswith("binary") and target.is_floating_point():
        found["target_out_of_range"] = target_low < 0 or target_high > 1
    return found
