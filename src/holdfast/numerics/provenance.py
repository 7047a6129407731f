"""Find the origin of NaN or Inf in a step: replay the step under a tracer, then walk back.

The tracer records every operation that returned NaN or Inf as a *suspect* (`tracer.Suspect`). The
walk starts at the loss or at the gradients that are not finite, and follows operands with NaN or
Inf back to the earliest suspect, which is the origin. An Inf that never reaches the loss or a
gradient is harmless and is ignored. An Inf that was written on purpose, such as a mask, is not the
origin either. In that case, the origin is the operation that could not handle the Inf, such as a
softmax over a row that is fully masked.

The caller must restore the gradients, buffers and random state that the replay changes, and decide
how to react to the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from holdfast.numerics.eager import eager
from holdfast.numerics.mechanisms import Confidence, explain, readable
from holdfast.numerics.operands import Operand, nonfinite
from holdfast.numerics.tracer import OUTSIDE, NamedTensor, OriginTracer, Pass, Suspect

OriginKind = Literal["operation", "finite_overflow", "input", "parameter", "buffer", "constant"]

_MOST_PARAMETERS = 3
_MOST_OPERANDS = 4
# Maximum number of names listed in a line of text.
_MOST_NAMED = 5
# Operations that write constants. An Inf written by such an operation was written on purpose.
_WRITES_CONSTANTS = re.compile(
    r"(masked_|index_)?fill|(new_)?full(_like)?|scalar_tensor|masked_scatter|where"
    r"|constant_pad_nd|lift_fresh"
)
# Operations that pass on an Inf without turning it into NaN. Most of them only move values.
_MOVES_VALUES = re.compile(
    r"cat|stack|index(_select|_put)?|gather|scatter|copy|clone|to|repeat"
    r"|(slice|select)_(backward|scatter)|log_softmax|unsafe_view|roll|flip|baddbmm"
    r"|masked_(scatter|select)|tril|triu|constant_pad_nd|unfold_backward"
)


class UntraceableError(Exception):
    """The origin cannot be found, for the reason that the message states."""


class NeedsOtherRanksError(RuntimeError):
    """Raised if user code calls a collective while only this rank replays a step.

    Args:
        collective: The name of the collective.
        arguments: The arguments of the collective.

    Attributes:
        tensors: The tensors among the arguments.
    """

    def __init__(self, collective: str, arguments: Sequence[object] = ()) -> None:
        super().__init__(f"{collective} needs all ranks, but only this rank replays the step")
        self.tensors = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The operation or tensor in which the NaN or Inf of a step originated.

    The fields can be written as JSON.
    """

    # The kind of origin. "finite_overflow" means that a result in the backward pass exceeded the
    # range of fp16 although its operands were finite, so the loss scale is too large. "constant"
    # means a tensor that is not an input, parameter or buffer, such as a plain attribute of a
    # module.
    kind: OriginKind
    # The name by which users know the operation, such as "log". In a backward pass, this is the
    # operation whose derivative ran. For a custom Function or a tensor, its name.
    op: str
    # The operator that actually ran, such as "aten.div". Empty for a tensor.
    aten: str = ""
    # The path of the module, or "loss function".
    module: str
    # The pass in which NaN or Inf appeared. Always "backward" if the loss is finite.
    phase: Pass = "forward"
    # The name of the parameter that contains NaN or Inf, or the names of the first few parameters
    # whose gradient does.
    parameters: tuple[str, ...] = ()
    # The samples that are probably bad: rows along the batch axis of the result. Empty if they are
    # unknown, or if all samples are bad.
    samples: tuple[int, ...]
    # The first few operands.
    operands: tuple[Operand, ...] = ()
    # The result of the operation, or the tensor that contains NaN or Inf.
    produced: Operand
    # The line of user code, such as "model.py:12 in forward". For an operation in the backward
    # pass, this is the line of the forward operation.
    line: str = ""
    # A short explanation of how NaN or Inf came about.
    mechanism: str
    # How certain the mechanism is. "certain" means that the operands confirm it.
    confidence: Confidence
    # Whether a collective in user code sent the NaN or Inf to other ranks.
    sent: bool = False

    def __str__(self) -> str:
        parts = self._operation_text() if self.aten else [f"{self.mechanism}: {self.produced}"]
        if self.operands:
            parts.append(f"of {', '.join(map(str, self.operands))}")
        if self.samples:
            parts.append(f"rows {_first_few(self.samples)}")
        if self.sent:
            parts.append("sent to the other ranks by a collective in the loss or the model")
        if self.parameters and self.kind != "parameter":
            parts.append(f"makes the gradient of {_first_few(self.parameters)} non-finite")
        return "; ".join(parts)

    def _operation_text(self) -> list[str]:
        place = self.module
        if self.module != OUTSIDE:
            place = f"module {self.module or '(unknown)'}"
        line = f" ({self.line})" if self.line else ""
        return [
            f"{self.op} in the {place}{line}, {self.phase} pass: {self.mechanism}",
            f"gave {self.produced}",
        ]


def _first_few(values: Sequence[object]) -> str:
    text = ", ".join(str(value) for value in values[:_MOST_NAMED])
    if len(values) > _MOST_NAMED:
        text += ", ..."
    return text


def trace(
    run_once: Callable[[], torch.Tensor],
    models: Mapping[str, nn.Module],
    parameters: Sequence[tuple[str, torch.Tensor]],
    batch_tensors: Sequence[tuple[str, torch.Tensor]],
    batch_size: int | None,
) -> Origin | None:
    """Replay a step that had NaN or Inf, and return the origin.

    If `run_once` raises `NeedsOtherRanksError`, only the operations before the collective are
    examined.

    Cost: 3 to 30 times that of a normal step.

    Args:
        run_once: Runs forward and backward, so that ``.grad`` of `parameters` is set, and returns
            the detached loss, shape ``()``. It must restore the random state itself.
        models: The models, keyed by name. The paths of modules begin with this name, unless it is
            ``"model"``.
        parameters: The parameters whose gradients are checked, each with its name.
        batch_tensors: The tensors in the batch, each with its name.
        batch_size: Number of samples in the batch that `run_once` passes to the model, or None if
            unknown.

    Returns:
        The origin, or None if everything was finite in the replay.

    Raises:
        UntraceableError: If operations that may be the origin could not be examined.
    """
    existing = _existing_tensors(models, parameters, batch_tensors)
    tracer = OriginTracer(dict(models), existing, batch_size)
    collective: NeedsOtherRanksError | None = None
    with eager(), tracer:
        try:
            loss = run_once()
        except NeedsOtherRanksError as error:
            collective = error
    if collective is not None:
        return _before_collective(tracer, collective)
    bad_gradients = [
        (name, parameter.grad)
        for name, parameter in parameters
        if parameter.grad is not None and nonfinite(parameter.grad) is not None
    ]
    loss_is_finite = nonfinite(loss) is None
    if loss_is_finite and not bad_gradients:
        return None
    if tracer.missed_some:
        raise UntraceableError(
            "part of the loss is computed with forward-mode AD, in which values cannot be read"
        )
    failures = [gradient for _, gradient in bad_gradients] if loss_is_finite else [loss]
    culprit = _find_culprit([_failure(tracer, tensor) for tensor in failures], tracer.suspects)
    origin = _origin(culprit, loss_is_finite=loss_is_finite)
    if culprit.kind == "parameter":
        return origin
    return replace(origin, parameters=tuple(name for name, _ in bad_gradients[:_MOST_PARAMETERS]))


def _existing_tensors(
    models: Mapping[str, nn.Module],
    parameters: Sequence[tuple[str, torch.Tensor]],
    batch_tensors: Sequence[tuple[str, torch.Tensor]],
) -> list[NamedTensor]:
    """Return all tensors that exist before a step: batch tensors, parameters and buffers."""
    tensors = [NamedTensor("input", name, tensor) for name, tensor in batch_tensors]
    tensors += [NamedTensor("parameter", name, tensor) for name, tensor in parameters]
    for key, model in models.items():
        prefix = "" if key == "model" else f"{key}."
        for name, parameter in model.named_parameters():
            tensors.append(NamedTensor("parameter", prefix + name, parameter))
        for name, buffer in model.named_buffers():
            tensors.append(NamedTensor("buffer", prefix + name, buffer))
    return tensors


def find_nan(tensors: Sequence[tuple[str, torch.Tensor]], batch_size: int | None) -> Origin | None:
    """Return an origin for the first tensor of a batch that contains NaN, or None without one."""
    named = [NamedTensor("input", name, tensor) for name, tensor in tensors]
    tracer = OriginTracer({}, named, batch_size)
    for _, tensor in tensors:
        if nonfinite(tensor) is None:
            continue
        suspect = tracer.find(tensor)
        if suspect.produced.nan:
            return _origin(suspect, loss_is_finite=False)
    return None


def _before_collective(tracer: OriginTracer, collective: NeedsOtherRanksError) -> Origin:
    """Return the origin of NaN or Inf that appeared before a collective.

    If tensors with NaN or Inf were passed to the collective, the result is their origin. Otherwise,
    it is the first suspect that was not written on purpose.

    Raises:
        UntraceableError: If everything before the collective was finite.
    """
    failures = [
        _failure(tracer, tensor) for tensor in collective.tensors if nonfinite(tensor) is not None
    ]
    # A tensor to which no operation has written is an output that the collective would have filled,
    # so ignore its contents.
    sent = [failure for failure in failures if failure.suspect.kind != "constant"]
    if sent:
        culprit = _find_culprit(sent, tracer.suspects)
        return replace(_origin(culprit, loss_is_finite=False), sent=True)
    first = _first_accidental(tracer.suspects)
    if first is None:
        raise UntraceableError(
            "everything before the first collective was finite, and a single rank cannot repeat"
            " the collective"
        )
    return _origin(_find_culprit([_failure_of(first)], tracer.suspects), loss_is_finite=False)


@dataclass(frozen=True, slots=True)
class _ChainLink:
    """A suspect in a chain that leads from a non-finite loss or gradient back to the origin."""

    suspect: Suspect
    # Whether the chain follows NaN at this suspect. If False, it follows Inf.
    by_nan: bool

    def parents(self) -> list[_ChainLink]:
        """Return a link for each operand that may have caused the NaN or Inf in the result."""
        by_nan = self.by_nan and self.suspect.took_nan
        parents = []
        for operand in self.suspect.bad_operands:
            is_cause = operand.nan if by_nan else operand.inf
            if is_cause:
                parents.append(_ChainLink(operand.suspect, by_nan))
        return parents


def _failure(tracer: OriginTracer, tensor: torch.Tensor) -> _ChainLink:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return _ChainLink(tracer.find(tensor), by_nan=bool(torch.isnan(values).any()))


def _failure_of(suspect: Suspect) -> _ChainLink:
    return _ChainLink(suspect, by_nan=suspect.produced.nan > 0)


def _find_culprit(failures: Sequence[_ChainLink], suspects: Sequence[Suspect]) -> Suspect:
    """Walk back from the non-finite loss or gradients, and return the earliest origin.

    Args:
        failures: The suspects that produced the non-finite loss or gradients.
        suspects: All suspects, in the order in which they were recorded.
    """
    if suspects and all(failure.suspect.kind == "constant" for failure in failures):
        # No recorded operation wrote these tensors. The chain was interrupted, for example by
        # ``.item()``, so start from the first suspect instead.
        failures = [_failure_of(_first_accidental(suspects) or suspects[0])]
    successors = _walk_back(failures)
    origins: list[Suspect] = []
    for link in successors:
        if link.parents():
            continue
        if _is_on_purpose(link.suspect):
            origins.append(_first_user_of_mask(link, successors))
        else:
            origins.append(link.suspect)
    return min(origins, key=lambda suspect: suspect.index)


def _first_accidental(suspects: Sequence[Suspect]) -> Suspect | None:
    """Return the first suspect that was not written on purpose, or None."""
    return next((suspect for suspect in suspects if not _is_on_purpose(suspect)), None)


def _walk_back(failures: Sequence[_ChainLink]) -> dict[_ChainLink, _ChainLink | None]:
    """Find all links from which the failures can be reached.

    Returns:
        A dict from each link to the next link toward a failure, in breadth-first order. The
        failures themselves come first and are mapped to None.
    """
    queue = list(dict.fromkeys(failures))
    successors: dict[_ChainLink, _ChainLink | None] = dict.fromkeys(queue)
    # The loop appends to `queue` while iterating over it.
    for link in queue:
        for parent in link.parents():
            if parent not in successors:
                successors[parent] = link
                queue.append(parent)
    return successors


def _is_on_purpose(suspect: Suspect) -> bool:
    """Return whether a suspect is an Inf that was written on purpose: a constant or a mask."""
    if suspect.produced.nan or suspect.kind == "parameter":
        return False
    if suspect.kind == "operation" and _WRITES_CONSTANTS.fullmatch(readable(suspect.name)):
        return True
    is_all_infinite = suspect.kind == "constant" and suspect.produced.least is None
    return suspect.produced.is_mask or is_all_infinite


def _first_user_of_mask(
    mask: _ChainLink, successors: Mapping[_ChainLink, _ChainLink | None]
) -> Suspect:
    """Return the first operation after a mask that computes with the Inf instead of moving it."""
    link = mask
    successor = successors[link]
    while successor is not None:
        link = successor
        if not _passes_inf_on(link.suspect):
            break
        successor = successors[link]
    return link.suspect


def _passes_inf_on(suspect: Suspect) -> bool:
    creates_nan = suspect.produced.nan > 0 and not suspect.took_nan
    if creates_nan:
        return False
    return suspect.pointwise or _MOVES_VALUES.fullmatch(readable(suspect.name)) is not None


def _origin(culprit: Suspect, *, loss_is_finite: bool) -> Origin:
    """Return a suspect as an origin.

    Args:
        culprit: The operation or tensor.
        loss_is_finite: Whether only gradients, and not the loss, are NaN or Inf.
    """
    if culprit.kind == "operation":
        origin = _origin_of_operation(culprit)
    else:
        origin = _origin_of_tensor(culprit)
    if not loss_is_finite:
        return origin
    if culprit.kind == "operation" and origin.phase == "forward":
        hidden = f"{origin.mechanism}, which affects the gradient but not the loss"
        origin = replace(origin, mechanism=hidden)
    return replace(origin, phase="backward")


def _origin_of_operation(culprit: Suspect) -> Origin:
    mechanism, confidence = explain(culprit)
    location = culprit.location
    # True if the backward pass produced an Inf in fp16 from finite operands.
    is_fp16_overflow = (
        location.phase == "backward"
        and culprit.produced.dtype == "float16"
        and culprit.produced.inf > 0
        and not culprit.bad_operands
    )
    return Origin(
        kind="finite_overflow" if is_fp16_overflow else "operation",
        op=location.function or readable(location.node or culprit.name),
        aten=f"aten.{culprit.name}",
        module=location.module,
        phase=location.phase,
        samples=culprit.rows,
        operands=culprit.operands[:_MOST_OPERANDS],
        produced=culprit.produced,
        line=location.line,
        mechanism=mechanism,
        confidence=confidence,
    )


def _origin_of_tensor(culprit: Suspect) -> Origin:
    module = ""
    if culprit.kind in ("parameter", "buffer"):
        module = culprit.name.rpartition(".")[0] or "model"
    return Origin(
        kind=culprit.kind,
        op=culprit.name,
        module=module,
        parameters=(culprit.name,) if culprit.kind == "parameter" else (),
        samples=culprit.rows,
        produced=culprit.produced,
        mechanism=_text_of_tensor(culprit),
        confidence="certain",
    )


def _text_of_tensor(culprit: Suspect) -> str:
    value = "NaN" if culprit.produced.nan else "Inf"
    if culprit.kind == "input":
        return f"{value} in the batch ({culprit.name})"
    if culprit.kind == "parameter":
        return f"weight {culprit.name} is {value}"
    if culprit.kind == "buffer":
        return f"buffer {culprit.name} is {value}"
    return f"a tensor created before the step contains {value}"
