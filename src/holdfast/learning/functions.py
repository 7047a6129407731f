"""Calls of loss functions, activations, layers and ``backward``, seen through a ``TorchFunctionMode``.

Nothing is changed: no random number is drawn, and every function returns what it returned without the mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from holdfast.learning.losses import (
    LOGIT_LOSSES,
    REGRESSION,
    LossPlaces,
    are_by_class,
    are_pairs,
    beyond_reach,
    flags_of,
    items_of,
    pairs_all,
    source_of,
)
from holdfast.numerics.eager import is_symbolic

_WITH_TARGET = (*LOGIT_LOSSES, *REGRESSION, "nll_loss", "binary_cross_entropy", "kl_div")
# Losses whose targets are 1 and -1, and the place of the target among their arguments.
_SIGNED_TARGETS = dict.fromkeys(("cosine_embedding_loss", "margin_ranking_loss"), 2) | dict.fromkeys(
    ("hinge_embedding_loss", "soft_margin_loss"), 1
)
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "embedding", "matmul")
_NORMALISERS = ("softmax", "log_softmax", "log")
_DIFFERENCES = ("sub", "rsub", "__sub__", "__rsub__", "subtract")
_ACTIVATIONS = {"relu": "relu", "relu_": "relu", "tanh": "tanh", "tanh_": "tanh", "sigmoid": "sigmoid"}


class FunctionMode(TorchFunctionMode):
    """Sees calls while it is entered.

    Facts about losses go into `places`. Called are `on_activation` with the name and the output of each relu, tanh
    and sigmoid, `on_backward` with the loss, and `on_weight` with each parameter that a layer computes with.
    """

    def __init__(
        self,
        places: LossPlaces,
        on_activation: Callable[[str, Tensor], None],
        on_backward: Callable[[Tensor], None],
        on_weight: Callable[[torch.nn.Parameter], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.loaded = False
        """Whether a torch loader with workers was asked for a batch to train with, since this was last False."""
        self.in_backward = False
        self._places = places
        self._on_activation, self._on_backward, self._on_weight = on_activation, on_backward, on_weight

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
        if torch.is_grad_enabled() and isinstance(result, Tensor) and result.requires_grad:
            self._look(name, args, kwargs, result)
        # Each batch of a torch loader is a range of the profiler, which carries the name of its class.
        elif name == "_record_function_enter_new" and "#_MultiProcessing" in str(args[0]):
            self.loaded = self.loaded or torch.is_grad_enabled()
        return result

    def _look(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        if name in _WITH_TARGET:
            self._loss(name, args, kwargs, result)
        elif name in _ACTIVATIONS:
            self._on_activation(_ACTIVATIONS[name], result.detach())
        elif name in _LAYERS:
            for given in args:
                if isinstance(given, torch.nn.Parameter):
                    self._on_weight(given)
        elif name in _SIGNED_TARGETS:
            target = _argument(args, kwargs, _SIGNED_TARGETS[name], "target")
            if isinstance(target, Tensor):
                self._note(name, target_out_of_range=bool((target.detach().abs() != 1).any()))
        elif name in _NORMALISERS:
            self._normaliser(name, args, kwargs, result)
        elif name in _DIFFERENCES:
            self._difference(args, result)
        elif name == "ctc_loss":
            given = _argument(args, kwargs, 0, "log_probs")
            self._note(name, positive=float(given.detach().max()) > 1e-4)

    def _note(self, name: str, **flags: bool) -> None:
        self._places.enter(name).note(flags)

    def _loss(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        given, target = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "target")
        if not (isinstance(given, Tensor) and isinstance(target, Tensor) and given.numel() and target.numel()):
            return
        place, reduction = self._places.enter(name), kwargs.get("reduction", "mean")
        with torch.no_grad():
            if given.requires_grad and given.is_floating_point():
                place.note(flags_of(name, given, target))
            if name in REGRESSION and pairs_all(given.shape, target.shape):
                place.note({"broadcast": True}, shapes=f"{tuple(given.shape)} and {tuple(target.shape)}")
            plain = kwargs.get("weight") is None and not kwargs.get("label_smoothing")
            plain = plain and kwargs.get("pos_weight") is None and not (len(args) > 2 and args[2] is not None)
            place.note_targets(target, ignored=kwargs.get("ignore_index", -100))
            value = result.detach().float()
            value = value / items_of(name, given, target) if reduction == "sum" else value.mean()
            place.note_value(float(value), comparable=plain and kwargs.get("beta", 1.0) == 1.0)
        if name != "kl_div" and reduction != "none":
            # Seen when backward comes by: the sign with which the loss enters the whole.
            result.register_hook(lambda gradient: place.note_sign(float(gradient)))  # type: ignore[no-untyped-call]

    def _normaliser(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        given = _argument(args, kwargs, 0, "input")
        if not (isinstance(given, Tensor) and given.requires_grad):
            return
        source, dim, _ = source_of(given)
        over_batch = source in ("Softmax", "LogSoftmax") and dim in (0, -2) and name == "log" and not are_pairs(given)
        twice = name != "log" and source == "Softmax"
        if name == "log_softmax":
            place = self._places.enter(name)
            wrong = are_by_class(result) and kwargs.get("dim", args[1] if len(args) > 1 else None) in (0, -2)
            place.note({"softmax_input": twice, "rectified_source": source == "Relu", "batch_axis_made": wrong})
            result.register_hook(lambda gradient: place.note_sign(_likelihood_sign(gradient)))  # type: ignore[no-untyped-call]
        elif twice or over_batch:
            self._note(name, softmax_input=twice, batch_axis=over_batch)

    def _difference(self, args: Sequence[Any], result: Tensor) -> None:
        if len(args) < 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
            return
        predicted, data = args[:2] if args[0].requires_grad else (args[1], args[0])
        if predicted.shape == data.shape and not data.requires_grad and (beyond := beyond_reach(predicted, data)):
            self._places.enter("difference").note(beyond)
        left, right = args[0].shape, args[1].shape
        # (N, 1) - (N,) is N x N: one side is predicted, the other is data.
        flat, column = sorted((tuple(left), tuple(right)), key=len)
        is_data = not (args[0].requires_grad and args[1].requires_grad)
        if is_data and result.dim() == 2 and len(flat) == 1 and column == (*flat, 1) and flat[0] > 1:
            shapes = f"{tuple(left)} and {tuple(right)}"
            self._places.enter("difference").note({"broadcast": True}, shapes=shapes)


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _likelihood_sign(gradient: Tensor) -> float:
    """Return 1 if all log-probabilities are pushed up, as a likelihood wants it, -1 if all down, 0 if neither."""
    lowest, highest = (float(value) for value in torch.aminmax(gradient.detach()))
    if lowest < 0 < highest or lowest == highest == 0 or not math.isfinite(lowest + highest):
        return 0.0
    return 1.0 if highest <= 0 else -1.0
