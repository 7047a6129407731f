"""Calls of loss functions, activations, layers and ``backward``.

What losses are given, their labels and signs.

`FunctionMode` sees the calls. Nothing is changed: no random number is drawn, and every function
    returns what it
returned without the mode. Rules judge what is collected here by the place of each loss.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from holdfast.learning.facts import LossFacts
from holdfast.learning.measures import append_newest
from holdfast.numerics.eager import is_symbolic

_LOGIT_LOSSES = ("cross_entropy", "binary_cross_entropy_with_logits")
_REGRESSION = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_CLASS_LOSSES = ("cross_entropy", "nll_loss")
_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_REACH = {
    "Tanh": (-1.0, 1.0),
    "Sigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Relu": (0.0, math.inf),
}
_MOST_COLUMNS = 4096
_MOST_LABELS = 65536
_ROWS = 256
"""Rows of an input that are looked at.

Enough for a yes or no, and little work beside the loss itself.
"""

# Nodes of the graph that move values without changing them, so that the node behind them is the
# real source.
_MOVES = (
    "View",
    "UnsafeView",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Alias",
    "Select",
    "Slice",
)
_TURNS = ("Transpose", "Permute", "T")
_REORDERS = (*_TURNS, "Index", "Gather", "Clamp", "ClampMin")
_WITH_TARGET = (*_LOGIT_LOSSES, *_REGRESSION, "nll_loss", "binary_cross_entropy", "kl_div")
# Losses whose targets are 1 and -1, and the place of the target among their arguments.
_SIGNED_TARGETS = dict.fromkeys(
    ("cosine_embedding_loss", "margin_ranking_loss"), 2
) | dict.fromkeys(("hinge_embedding_loss", "soft_margin_loss"), 1)
_LAYERS = (
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "embedding",
    "matmul",
)
_NORMALISERS = ("softmax", "log_softmax", "log")
_DIFFERENCES = ("sub", "rsub", "__sub__", "__rsub__", "subtract")
_ACTIVATIONS = {
    "relu": "relu",
    "relu_": "relu",
    "tanh": "tanh",
    "tanh_": "tanh",
    "sigmoid": "sigmoid",
}
_BACKWARD = "backward"
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_GRADIENT: Any = torch.Tensor.grad
_READS = _GRADIENT.__get__
_ALWAYS_SEEN = frozenset((*_WITH_TARGET, _BACKWARD))
_SEEN = _ALWAYS_SEEN.union(
    _ACTIVATIONS,
    _LAYERS,
    _SIGNED_TARGETS,
    _NORMALISERS,
    _DIFFERENCES,
    ("ctc_loss", _READS.__name__),
)


class FunctionMode(TorchFunctionMode):
    """Sees calls while it is entered.

    Facts about losses go into `places`. Called are `on_activation` with the name and the output of
    each relu, tanh and sigmoid, `on_backward` with the loss, and `on_weight` with each parameter
    that a layer computes with and whether there is a graph.
    """

    def __init__(
        self,
        places: LossPlaces,
        on_activation: Callable[[str, Tensor], None],
        on_backward: Callable[[Tensor], None],
        on_weight: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        super().__init__()
        self.closely = True  # else only the values and the targets of losses are looked at
        self.in_backward = False
        self.order = ""
        """Of this step: c for each gradient that was clipped, b for each backward pass."""
        self._embedded: list[Tensor] = []  # in this pass, sequences only
        self._places = places
        self._on_activation, self._on_backward, self._on_weight = (
            on_activation,
            on_backward,
            on_weight,
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and look at what it was given if it is one that we know."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in (_SEEN if self.closely else _ALWAYS_SEEN) or is_symbolic():
            return func(*args, **kwargs)
        if name == _BACKWARD and args and isinstance(args[0], Tensor):
            self._on_backward(args[0])
            self.order += "b"
            self._embedded.clear()
            self.in_backward = True
            try:
                return func(*args, **kwargs)
            finally:
                self.in_backward = False
        result = func(*args, **kwargs)
        if func == _READS:
            self.order += "c" if _is_clipping() else ""
        elif name in _LAYERS:
            self._layer(name, args, result)
        elif torch.is_grad_enabled() and isinstance(result, Tensor) and result.requires_grad:
            self._look(name, args, kwargs, result)
        return result

    def _look(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        if name in _WITH_TARGET:
            self._loss(name, args, kwargs, result)
        elif name in _ACTIVATIONS:
            self._on_activation(_ACTIVATIONS[name], result.detach())
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

    def _layer(self, name: str, args: Sequence[Any], result: Tensor) -> None:
        graph = torch.is_grad_enabled() and result.requires_grad
        for given in args:
            if isinstance(given, torch.nn.Parameter):
                self._on_weight(given, graph=graph)
        if graph and name == "embedding" and args[0].dim() > 1 and args[0].shape[0] > 1:
            self._embedded.append(args[0])

    def _note(self, name: str, **flags: bool) -> None:
        self._places.enter(name).note(flags)

    def _loss(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        given, target = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "target")
        if not (
            isinstance(given, Tensor)
            and isinstance(target, Tensor)
            and given.numel()
            and target.numel()
        ):
            return
        place, reduction = (
            self._places.enter(name, closely=self.closely),
            kwargs.get("reduction", "mean"),
        )
        with torch.no_grad():
            if self.closely and given.requires_grad and given.is_floating_point():
                place.note(_flags_of(name, given, target))
            if self.closely and name in _REGRESSION and _pairs_all(given.shape, target.shape):
                place.note(
                    {"broadcast": True}, shapes=f"{tuple(given.shape)} and {tuple(target.shape)}"
                )
            plain = kwargs.get("weight") is None and not kwargs.get("label_smoothing")
            plain = (
                plain
                and kwargs.get("pos_weight") is None
                and not (len(args) > 2 and args[2] is not None)
            )
            ignored = kwargs.get("ignore_index", -100)
            place.note_targets(target, ignored=ignored)
            # A decoder embeds a second time
            if self.closely and name in _CLASS_LOSSES and len(self._embedded) == 1:
                place.note({"copied_tokens": _are_tokens(target, self._embedded[0], ignored)})
            value = float(result.detach() if result.dim() == 0 else result.detach().float().mean())
            items = max(1, target.numel() if name in _CLASS_LOSSES else given.numel())
            value = value / items if reduction == "sum" else value
            place.note_value(value, comparable=plain and kwargs.get("beta", 1.0) == 1.0)
        if self.closely and name != "kl_div" and reduction != "none":
            # Seen when backward comes by: the sign with which the loss enters the whole.
            result.register_hook(lambda gradient: place.note_sign(float(gradient)))  # type: ignore[no-untyped-call]

    def _normaliser(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        given = _argument(args, kwargs, 0, "input")
        if not (isinstance(given, Tensor) and given.requires_grad):
            return
        source, dim, _ = source_of(given, shifted=name == "log")
        over_batch = (
            source in ("Softmax", "LogSoftmax")
            and dim in (0, -2)
            and name == "log"
            and not _are_pairs(given)
        )
        twice = name != "log" and source == "Softmax"
        if name == "log_softmax":
            place = self._places.enter(name)
            wrong = _are_by_class(result) and kwargs.get(
                "dim", args[1] if len(args) > 1 else None
            ) in (0, -2)
            place.note(
                {
                    "softmax_input": twice,
                    "rectified_source": source == "Relu",
                    "batch_axis_made": wrong,
                }
            )
            result.register_hook(lambda gradient: place.note_sign(_likelihood_sign(gradient)))  # type: ignore[no-untyped-call]
        elif twice or over_batch:
            self._note(name, softmax_input=twice, batch_axis=over_batch)

    def _difference(self, args: Sequence[Any], result: Tensor) -> None:
        if len(args) < 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
            return
        predicted, data = args[:2] if args[0].requires_grad else (args[1], args[0])
        if (
            predicted.shape == data.shape
            and not data.requires_grad
            and (beyond := _beyond_reach(predicted, data))
        ):
            self._places.enter("difference").note(beyond)
        left, right = args[0].shape, args[1].shape
        # (N, 1) - (N,) is N x N: one side is predicted, the other is data.
        flat, column = sorted((tuple(left), tuple(right)), key=len)
        is_data = not (args[0].requires_grad and args[1].requires_grad)
        if (
            is_data
            and result.dim() == 2
            and len(flat) == 1
            and column == (*flat, 1)
            and flat[0] > 1
        ):
            shapes = f"{tuple(left)} and {tuple(right)}"
            self._places.enter("difference").note({"broadcast": True}, shapes=shapes)


def _is_clipping() -> bool:
    """Return whether a gradient is read by one of torch's functions that clip, itself or in a
    list display.
    """
    reader = sys._getframe(2)
    frames = (reader, reader.f_back) if reader.f_code.co_name == "<listcomp>" else (reader,)
    return any(frame is not None and frame.f_code.co_name in _CLIPPING for frame in frames)


def _are_tokens(target: Tensor, tokens: Tensor, ignored: int) -> bool:
    """Return whether each target that counts is the token at its own position."""
    wanted, given = target.detach().reshape(-1), tokens.detach().reshape(-1)
    counts = wanted != ignored
    return wanted.shape == given.shape and bool(counts.any() and (wanted == given)[counts].all())


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _likelihood_sign(gradient: Tensor) -> float:
    """Return 1 if all log-probabilities are pushed up, as a likelihood wants it, -1 if all down,
    0 if neither.
    """
    lowest, highest = (float(value) for value in torch.aminmax(gradient.detach()))
    if lowest < 0 < highest or lowest == highest == 0 or not math.isfinite(lowest + highest):
        return 0.0
    return 1.0 if highest <= 0 else -1.0


class LossObserver:
    """What was seen at one call of one loss function, step after step.

    `known`, completed by `facts`.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self.known = LossFacts(function=function)
        self._comparable = True  # with the loss of a constant
        self._labels: Counter[int] = Counter()
        self._distinct: list[tuple[int, int]] = []  # labels of a batch: different ones, all
        self._sums: Tensor | None = None  # of targets, by column
        self._squares: Tensor | None = None
        self._count = 0
        self._deviations: list[float] = []
        # The loss of the best constant so far, on the newest targets
        self._constant_now: float | None = None

    def note(self, flags: dict[str, bool], *, shapes: str = "") -> None:
        """Count the flags that are true."""
        for key in (key for key, value in flags.items() if value):
            self.known.flags[key] = self.known.flags.get(key, 0) + 1
        self.known.shapes = shapes or self.known.shapes

    def note_sign(self, value: float) -> None:
        """Add the factor with which the loss enters the whole."""
        if math.isfinite(value) and value != 0:
            self.known.signs.append(1 if value > 0 else -1)

    def note_value(self, value: float, *, comparable: bool) -> None:
        """Keep the mean loss of a call; `comparable` if a constant's loss is on the same scale."""
        self._comparable = self._comparable and comparable
        if math.isfinite(value):
            self.known.first = value if self.known.first is None else self.known.first
            append_newest(self.known.values, value)
            if self._constant_now is not None:
                append_newest(self.known.gains, self._constant_now - value)

    def note_targets(self, target: Tensor, *, ignored: int) -> None:
        """Add the targets of a call to what the best constant is computed from."""
        if self._function in _CLASS_LOSSES and not target.is_floating_point():
            labels = target.detach().reshape(-1)[:_MOST_LABELS]
            seen = [label for label in labels.tolist() if label != ignored]
            counts = Counter(seen)
            self._labels.update(counts)
            total = self._labels.total()
            logs = [n * math.log(self._labels[label] / total) for label, n in counts.items()]
            self._constant_now = -sum(logs) / len(seen) if seen else None
            if target.dim() == 1:
                append_newest(self._distinct, (len(set(seen)), len(seen)))
        elif (
            target.dtype.is_complex or self._function == "kl_div" or self._function in _CLASS_LOSSES
        ):
            self._comparable = False
        else:
            self._add_columns(target.detach())

    def _add_columns(self, target: Tensor) -> None:
        wide = (
            target.reshape(target.shape[0], -1).double()
            if target.dim()
            else target.reshape(1, 1).double()
        )
        if wide.shape[1] > _MOST_COLUMNS or (
            self._sums is not None and wide.shape[1] != self._sums.shape[0]
        ):
            wide = wide.reshape(-1, 1)
        sums, squares = wide.sum(0).cpu(), wide.square().sum(0).cpu()
        if self._sums is None or self._squares is None:
            self._sums, self._squares = torch.zeros_like(sums), torch.zeros_like(squares)
        if wide.shape[1] != self._sums.shape[0]:
            self._comparable = False
            return
        self._sums, self._squares = self._sums + sums, self._squares + squares
        self._count += wide.shape[0]
        mean, now = self._sums / self._count, wide.cpu()
        if self._function in _BINARY:
            p = mean.clamp(1e-12, 1 - 1e-12)
            self._constant_now = -float((now * p.log() + (1 - now) * (1 - p).log()).mean())
        if self._function == "mse_loss":
            self._constant_now = float((now - mean).square().mean())
            append_newest(self.known.target_sizes, float(wide.abs().max()))
        if self._function == "l1_loss":
            self._deviations.append(float((wide - wide.median(0).values).abs().mean()))
        if self._function in _BINARY and wide.shape[1] == 1:
            append_newest(self._distinct, (len(set(wide.flatten().tolist())), wide.shape[0]))

    def facts(self) -> LossFacts:
        """Return what was seen."""
        facts, distinct = self.known, [n for n, _ in self._distinct]
        facts.baseline = self._baseline() if self._comparable else None
        facts.labelled_calls = len(distinct)
        facts.distinct_labels = sum(distinct) / len(distinct) if distinct else None
        facts.expected_labels = self._expected_labels()
        facts.constant_target = self._constant()
        if self._function == "mse_loss" and self._squares is not None and self._count:
            facts.target_scale = float((self._squares / self._count).mean())
        return facts

    def _moments(self) -> tuple[Tensor, Tensor] | None:
        """Return mean and variance of the targets by column."""
        if self._sums is None or self._squares is None or self._count < 2:
            return None
        mean = self._sums / self._count
        return mean, self._squares / self._count - mean.square()

    def _baseline(self) -> float | None:
        """Return the loss of the best constant prediction, None if it is unknown."""
        if self._labels:
            total = sum(self._labels.values())
            return -sum(n / total * math.log(n / total) for n in self._labels.values())
        moments = self._moments()
        if moments is None:
            return None
        mean, variance = moments
        if self._function in _BINARY:
            p = mean.clamp(1e-12, 1 - 1e-12)
            return float(-(p * p.log() + (1 - p) * (1 - p).log()).mean())
        if self._function == "mse_loss":
            return float(variance.mean())
        known = self._function == "l1_loss" and len(self._deviations) >= 10
        return sum(self._deviations) / len(self._deviations) if known else None

    def _expected_labels(self) -> float | None:
        """Return how many different labels a batch would hold if batches were drawn at random.

        None if unknown.
        """
        if not self._distinct:
            return None
        total = sum(self._labels.values())
        size = sorted(n for _, n in self._distinct)[len(self._distinct) // 2]
        if self._labels:
            return sum(1 - (1 - n / total) ** size for n in self._labels.values())
        if self._sums is None or self._function not in _BINARY:
            return None
        p = float(self._sums[0]) / max(1, self._count)
        return (1 - (1 - p) ** size) + (1 - p**size)

    def _constant(self) -> float | None:
        """Return the one value that all targets have, None if there is no such."""
        if self._labels:
            return float(next(iter(self._labels))) if len(self._labels) == 1 else None
        moments = self._moments()
        if moments is None:
            return None
        mean, variance = moments
        spread = variance.clamp_min(0).max().sqrt()
        return float(mean[0]) if spread <= 1e-6 * (1e-12 + mean.abs().max()) else None


class LossPlaces:
    """All places of one run, known by their function and by their order within a pass."""

    def __init__(self) -> None:
        self._places: dict[str, LossObserver] = {}
        self._in_pass: Counter[str] = Counter()

    def begin_pass(self) -> None:
        """Start to count the calls of a pass anew."""
        self._in_pass.clear()

    def enter(self, function: str, *, closely: bool = True) -> LossObserver:
        """Return the place of this call and count it; `closely`: its arguments are looked at."""
        self._in_pass[function] += 1
        # A loss over a varying number of parts shares its last place, so that places stay few.
        key = f"{function}#{min(self._in_pass[function], 8)}"
        place = self._places.setdefault(key, LossObserver(function))
        place.known.calls += 1
        place.known.examined += closely
        return place

    def facts(self, *, windows: bool = True) -> dict[str, LossFacts]:
        """Return what was seen by place; without `windows` only what was counted."""
        return {
            key: place.facts() if windows else place.known for key, place in self._places.items()
        }


def source_of(tensor: Tensor, *, shifted: bool = False) -> tuple[str, int | None, bool]:
    """Return what made a tensor, behind views.

    The operation, its dimension if it has one, and if it was clamped.

    `shifted`: also behind a sum with a number, such as the one that keeps a logarithm finite.

    Such as ``("Softmax", 1, False)``; the name is ``""`` for a tensor without a graph, and the
    dimension None where something reordered the axes in between.
    """
    node, moved, clamped = tensor.grad_fn, False, False
    for _ in range(8):
        if node is None:
            break
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        raised = (
            shifted
            and name == "Add"
            and sum(branch is not None for branch, _ in node.next_functions) == 1
        )
        if not (raised or name in _MOVES or name in _REORDERS):
            dim = (
                getattr(node, "_saved_dim", None)
                if name in ("Softmax", "LogSoftmax") and not moved
                else None
            )
            # Saved as an unsigned 64-bit number.
            return name, dim - 2**64 if dim is not None and dim >= 2**63 else dim, clamped
        moved = moved or name in _TURNS
        clamped = clamped or name == "Clamp"
        node = node.next_functions[0][0] if node.next_functions else None
    return "", None, clamped


def unscaled(loss: Tensor) -> float:
    """Return the value of a loss of one element, without the factor of a loss scaler.

    One host sync.
    """
    value, node = float(loss.detach()), loss.grad_fn
    factor = (
        getattr(node, "_saved_other", None)
        if node is not None and node.name() == "MulBackward0"
        else None
    )
    if isinstance(factor, Tensor) and factor.numel() == 1 and not factor.requires_grad:
        scale = float(factor)
        if scale > 1 and math.log2(scale).is_integer():  # as torch.amp.GradScaler's are
            return value / scale
    return value


def _are_pairs(scores: Tensor) -> bool:
    """Return whether scores may be of pairs, scored both ways as in CLIP, and not of samples and
    classes.
    """
    return scores.dim() > 2 or (scores.dim() == 2 and scores.shape[0] == scores.shape[1])


def _are_by_class(scores: Tensor) -> bool:
    """Return whether scores are of samples and classes."""
    return scores.dim() == 2 and scores.shape[0] > 1 and not _are_pairs(scores)


def _beyond_reach(predicted: Tensor, target: Tensor) -> dict[str, bool]:
    """Return whether many targets lie beyond what the activation that made the predictions can
    give.
    """
    source, _, _ = source_of(predicted)
    if source not in _REACH:
        return {}
    least, most = _REACH[source]
    outside = (target.detach() < least) | (target.detach() > most)
    return {f"beyond_{source.lower()}": bool(outside.float().mean() > 0.25)}


def _pairs_all(given: torch.Size, target: torch.Size) -> bool:
    """Return whether broadcasting makes more pairs than either side has values."""
    if given == target:
        return False
    whole = math.prod(torch.broadcast_shapes(given, target))  # type: ignore[no-untyped-call]
    return whole > max(math.prod(given), math.prod(target))


def _flags_of(name: str, given: Tensor, target: Tensor) -> dict[str, bool]:
    """Return what can be said for sure about the first argument of a loss function, one host
    sync.
    """
    rows = _rows(given).float()
    source, dim, clamped = source_of(given)
    lowest, highest = rows.aminmax()
    sums, zeros, none = (
        (rows.sum(-1) - 1).abs().max(),
        (rows == 0).float().mean(),
        rows.new_zeros(()),
    )
    log_sums = rows.logsumexp(-1).abs().max() if name == "nll_loss" else none
    bounds = (
        ((rows <= lowest) | (rows >= highest)).float().mean()
        if name == "binary_cross_entropy"
        else none
    )
    low, high = target.detach().float().aminmax() if target.is_floating_point() else (none, none)
    numbers = torch.stack([lowest, highest, sums, log_sums, zeros, bounds, low, high]).tolist()
    least, most, sum_error, log_error, zero_share, at_bounds, target_low, target_high = numbers
    classes = rows.shape[-1] > 1
    unit = least >= 0 and most <= 1 and rows.numel() >= 16
    found = {
        "batch_axis": (
            source in ("Softmax", "LogSoftmax") and _are_by_class(given) and dim in (0, -2)
        )
    }
    if name in _LOGIT_LOSSES:
        found |= {
            # Catalogue 36
            "softmax_input": source == "Softmax" or (classes and unit and sum_error < 1e-4),
            "sigmoid_source": source == "Sigmoid",
            "tanh_source": source == "Tanh",
            "unit_spread": least < 0.1 and most > 0.9,
            "unit_range": unit and source != "Softmax" and name != "cross_entropy",
            "rectified_source": source == "Relu",
            "rectified": least == 0 and most > 0 and zero_share > 0.15,  # catalogue 37
        }
    if name == "nll_loss":
        found |= {
            "positive": most > 1e-4,
            "not_normalised": most <= 1e-4 and classes and log_error > 1e-2,
        }
    if name == "kl_div":
        found["positive"] = most > 1e-4
    if name == "binary_cross_entropy":
        found["clamped_scores"] = (
            clamped and source not in ("Sigmoid", "Softmax", "") and at_bounds > 0.2
        )
    if name in _REGRESSION:
        found |= _beyond_reach(given, target)
    if name in _BINARY and target.is_floating_point():
        found["target_out_of_range"] = target_low < 0 or target_high > 1
    return found


def _rows(given: Tensor) -> Tensor:
    """Return at most `_ROWS` rows of class scores, shape ``(rows, classes)``."""
    wide = given.detach()
    if wide.dim() < 2:
        return wide.reshape(1, -1)
    wide = wide[: max(1, _ROWS // max(1, math.prod(wide.shape[2:])))]
    return wide.movedim(1, -1).reshape(-1, given.shape[1])[:_ROWS]
