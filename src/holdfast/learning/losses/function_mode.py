"""`FunctionMode`: observes calls of loss functions, layers, gradient clipping and ``backward``.

The mode draws no random numbers and does not change the result of any function. Observations about
losses are stored in `LossSites` and interpreted by the learning rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from holdfast.learning.losses.arguments import (
    LOG_TOLERANCE,
    has_known_range,
    measure_flags,
    measure_range,
    pairs_all_with_all,
)
from holdfast.learning.losses.loss_functions import (
    CLASS_LOSSES,
    REGRESSION_LOSSES,
    SIGNED_TARGET_LOSSES,
    TARGET_LOSSES,
)
from holdfast.learning.losses.sites import LossSite, LossSites
from holdfast.learning.losses.sources import source_of
from holdfast.learning.measurements import Measurements
from holdfast.numerics.eager import is_symbolic

LAYERS = frozenset(
    {
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "embedding",
        "matmul",
    }
)
SOFTMAXES = ("softmax", "log_softmax")
DIFFERENCES = frozenset({"sub", "rsub", "__sub__", "__rsub__", "subtract"})
CLIPPING_FUNCTIONS = frozenset({"clip_grad_norm_", "clip_grad_value_"})
# A function mode sees each read of ``parameter.grad`` as a call of this getter. torch's clipping
# functions read this attribute.
_GRADIENT: Any = torch.Tensor.grad
GRADIENT_GETTER = _GRADIENT.__get__

# OBSERVED_FUNCTIONS are observed in every sampled step, EXAMINED_FUNCTIONS only in examined steps.
OBSERVED_FUNCTIONS = frozenset({*TARGET_LOSSES, "backward"})
EXAMINED_FUNCTIONS = OBSERVED_FUNCTIONS.union(
    LAYERS,
    SIGNED_TARGET_LOSSES,
    SOFTMAXES,
    DIFFERENCES,
    ("log", "ctc_loss", GRADIENT_GETTER.__name__),
)


class FunctionMode(TorchFunctionMode):
    """Observes function calls while the mode is active.

    Args:
        sites: Stores the observations about losses.
        on_backward: Called with each loss before its backward pass.
        on_weight: Called with each parameter that a layer uses while autograd records a graph.
    """

    def __init__(
        self,
        sites: LossSites,
        on_backward: Callable[[Tensor], None],
        on_weight: Callable[[nn.Parameter], None],
    ) -> None:
        super().__init__()
        self._sites = sites
        # The measurements of the current step.
        self._measurements = Measurements()
        self._on_backward = on_backward
        self._on_weight = on_weight
        # False in steps in which only the values and targets of losses are recorded.
        self.examine = True
        self.in_backward = False
        self._clips_and_backwards: list[Literal["clip", "backward"]] = []

    def begin_step(self, measurements: Measurements, *, examine: bool) -> None:
        """Start a sampled step.

        Args:
            measurements: The measurements of the step, to which the mode adds.
            examine: Whether the step is also examined in detail.
        """
        self._measurements = measurements
        self.examine = examine
        self._clips_and_backwards.clear()

    def clipped_too_early(self) -> bool | None:
        """Return whether the current step clipped gradients only before backward.

        Returns None if the step did not clip any gradients.
        """
        calls = self._clips_and_backwards
        if "clip" not in calls:
            return None
        return calls[0] == "clip" and calls[-1] == "backward"

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, and examine its arguments and result if it is an observed function."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._observes(name):
            return func(*args, **kwargs)
        if name == "backward" and args and isinstance(args[0], Tensor):
            return self._run_backward(func, args, kwargs)
        result = func(*args, **kwargs)
        if func == GRADIENT_GETTER:
            self._note_clipping(reader=sys._getframe(1))
        elif torch.is_grad_enabled() and isinstance(result, Tensor) and result.requires_grad:
            self._observe_call(name, args, kwargs, result)
        return result

    def _observes(self, name: str) -> bool:
        names = EXAMINED_FUNCTIONS if self.examine else OBSERVED_FUNCTIONS
        return name in names and not is_symbolic()

    def _note_clipping(self, reader: FrameType) -> None:
        """Record a clipping call if one of torch's clipping functions reads a gradient."""
        callers = {reader.f_code.co_name}
        # Before Python 3.12, a list comprehension has its own frame.
        if reader.f_code.co_name == "<listcomp>" and reader.f_back is not None:
            callers.add(reader.f_back.f_code.co_name)
        if not CLIPPING_FUNCTIONS.isdisjoint(callers):
            self._clips_and_backwards.append("clip")

    def _run_backward(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call ``backward``, and record the call."""
        self._on_backward(args[0])
        self._clips_and_backwards.append("backward")
        self.in_backward = True
        try:
            return func(*args, **kwargs)
        finally:
            self.in_backward = False

    def _observe_call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> None:
        """Pass a call to the method that observes this kind of function."""
        if name in TARGET_LOSSES:
            self._observe_loss(name, args, kwargs, result)
        elif name in LAYERS:
            for argument in args:
                if isinstance(argument, nn.Parameter):
                    self._on_weight(argument)
        elif name in SIGNED_TARGET_LOSSES:
            self._observe_signed_target(name, args, kwargs)
        elif name in SOFTMAXES:
            self._observe_softmax(name, args, kwargs)
        elif name == "log":
            self._observe_log(args, kwargs)
        elif name == "ctc_loss":
            self._observe_ctc(args, kwargs)
        elif name in DIFFERENCES:
            self._observe_difference(args)

    def _observe_loss(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> None:
        """Measure the flags, targets, value and sign of a call of a loss function."""
        scores = _argument(args, kwargs, 0, "input")
        target = _argument(args, kwargs, 1, "target")
        if not _are_filled_tensors(scores, target):
            return
        site = self._enter_site(name)
        with torch.no_grad():
            if self.examine:
                self._examine_arguments(site, name, scores, target)
            ignore_index = kwargs.get("ignore_index", -100)
            site.measure_targets(self._measurements, target, ignore_index=ignore_index)
            self._measure_value(site, name, args, kwargs, result)
        if self.examine and name != "kl_div" and result.dim() == 0:
            # In backward, this hook receives the derivative of the minimized objective with respect
            # to this loss.
            measure_sign = partial(self._measure_sign, site)
            result.register_hook(measure_sign)  # type: ignore[no-untyped-call]

    def _enter_site(self, name: str) -> LossSite:
        """Count a call of a function, and return its site."""
        site = self._sites.enter(name)
        self._measurements.add(partial(site.note_call, examined=self.examine))
        return site

    def _examine_arguments(self, site: LossSite, name: str, scores: Tensor, target: Tensor) -> None:
        """Flag scores that the loss does not accept, and shapes that are accidentally broadcast."""
        if scores.requires_grad and scores.is_floating_point():
            measure_flags(self._measurements, name, scores, target, site.note_flags)
        if name in REGRESSION_LOSSES and pairs_all_with_all(scores.shape, target.shape):
            self._measurements.add(partial(site.note_broadcast, scores.shape, target.shape))

    def _measure_value(
        self,
        site: LossSite,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Tensor,
    ) -> None:
        """Measure the result of a loss function, averaged over its elements."""
        divisor = 1
        if kwargs.get("reduction", "mean") == "sum":
            counted = _argument(args, kwargs, 1, "target")
            if name not in CLASS_LOSSES:
                counted = _argument(args, kwargs, 0, "input")
            divisor = counted.numel()
        comparable = _is_unweighted(args, kwargs)
        note = partial(_note_value, site, divisor=divisor, comparable=comparable)
        # The script may change its loss in place afterwards.
        value = result.detach().clone() if result.dim() == 0 else result.detach().float().mean()
        self._measurements.add(note, value)

    def _measure_sign(self, site: LossSite, gradient: Tensor) -> None:
        self._measurements.add(site.note_sign, gradient.detach().clone())

    def _observe_signed_target(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Flag a target other than 1 or -1 that is passed to a loss that accepts only these."""
        target = _argument(args, kwargs, SIGNED_TARGET_LOSSES[name], "target")
        site = self._enter_site(name)
        if isinstance(target, Tensor):
            is_out_of_range = (target.detach().abs() != 1).any()
            self._measurements.add(partial(_note_if, site, "target_out_of_range"), is_out_of_range)

    def _observe_softmax(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Flag a softmax whose input comes from another softmax or, before a loss, from a ReLU."""
        scores = _argument(args, kwargs, 0, "input")
        if not isinstance(scores, Tensor):
            return
        operation = source_of(scores).name
        if operation == "Softmax":
            self._flag_call(name, "softmax_input")
        # A softmax inside a model, such as in attention, may legitimately follow a ReLU.
        if operation == "Relu" and name == "log_softmax":
            self._flag_call(name, "relu_source")

    def _observe_log(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Flag a hand-written log-softmax over the samples instead of the classes."""
        probabilities = _argument(args, kwargs, 0, "input")
        if not isinstance(probabilities, Tensor):
            return
        if source_of(probabilities, behind_sums=True).is_softmax_over_batch:
            self._flag_call("log", "batch_axis")

    def _flag_call(self, name: str, flag: str) -> None:
        """Count a call of a function that has raised a flag. Other calls are not counted."""
        site = self._enter_site(name)
        self._measurements.add(partial(site.note_flags, [flag]))

    def _observe_ctc(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Flag a CTC loss that receives log-probabilities above 0."""
        site = self._enter_site("ctc_loss")
        log_probabilities = _argument(args, kwargs, 0, "log_probs")
        is_positive = log_probabilities.detach().max() > LOG_TOLERANCE
        self._measurements.add(partial(_note_if, site, "positive"), is_positive)

    def _observe_difference(self, args: Sequence[Any]) -> None:
        """Examine the difference between a prediction and data, as in a hand-written loss."""
        if len(args) < 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
            return
        first, second = args[:2]
        if first.requires_grad and second.requires_grad:
            return
        predicted = first if first.requires_grad else second
        data = second if first.requires_grad else first
        if predicted.shape == data.shape:
            if has_known_range(predicted):
                note_flags = partial(_note_flagged_call, self._sites.enter("difference"))
                measure_range(self._measurements, predicted, data, note_flags)
        elif _is_column_against_row(predicted, data):
            site = self._enter_site("difference")
            self._measurements.add(partial(site.note_broadcast, first.shape, second.shape))


def _note_value(site: LossSite, value: Tensor, *, divisor: int, comparable: bool) -> None:
    site.note_value(float(value) / divisor, comparable=comparable)


def _note_flagged_call(site: LossSite, flags: Sequence[str]) -> None:
    # A call that has raised no flag is not counted.
    if flags:
        site.note_call(examined=True)
        site.note_flags(flags)


def _note_if(site: LossSite, flag: str, is_raised: Tensor) -> None:
    if bool(is_raised):
        site.note_flags([flag])


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _are_filled_tensors(*values: Any) -> bool:
    return all(isinstance(value, Tensor) and value.numel() > 0 for value in values)


def _is_unweighted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a loss has no weights and no label smoothing.

    Only then can it be compared with the loss of a constant prediction.
    """
    weight = _argument(args, kwargs, 2, "weight")
    return weight is None and kwargs.get("pos_weight") is None and not kwargs.get("label_smoothing")


def _is_column_against_row(predicted: Tensor, data: Tensor) -> bool:
    """Return whether the shapes are ``(N, 1)`` and ``(N,)``, in either order, with N above 1."""
    row, column = sorted((tuple(predicted.shape), tuple(data.shape)), key=len)
    return len(row) == 1 and row[0] > 1 and column == (*row, 1)
