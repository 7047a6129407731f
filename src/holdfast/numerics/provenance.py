"""Find where a non-finite value came from: replay the step under a tracer, then walk back.

The tracer records every operation that returned NaN or Inf (`tracer.Suspect`). The walk begins at
the loss or the gradients that are not finite, and follows the suspects' operands back to the
earliest one, which is the origin. An Inf that never reaches the loss or a gradient does no harm and
is ignored. An Inf that was written on purpose, such as a mask, is not to blame either: the origin
is then the operation that could not handle it, such as a softmax over a fully masked row.

The caller undoes what the replay does to gradients, buffers and random state, and decides what to
do about the finding.
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
# The most names listed in one line of text.
_MOST_NAMED = 5
# Operations that write constants, and so write an Inf on purpose.
_WRITES_CONSTANTS = re.compile(
    r"(masked_|index_)?fill|(new_)?full(_like)?|scalar_tensor|masked_scatter|where"
    r"|constant_pad_nd|lift_fresh"
)
# Operations that move values without computing with them, so that they pass an Inf on.
_MOVES_VALUES = re.compile(
    r"cat|stack|index(_select|_put)?|gather|scatter|copy|clone|to|repeat"
    r"|(slice|select)_(backward|scatter)|log_softmax|unsafe_view|roll|flip|baddbmm"
    r"|masked_(scatter|select)|tril|triu|constant_pad_nd|unfold_backward"
)


class UntraceableError(Exception):
    """A step holds NaN or Inf, but not all of its operations can be examined; the text says why."""


class NeedsOtherRanksError(RuntimeError):
    """A rank that replays a step on its own has reached a collective of the loss or the model.

    Attributes:
        given: The tensors passed to the collective.
    """

    def __init__(self, collective: str, given: Sequence[object] = ()) -> None:
        super().__init__(
            f"{collective} needs the other ranks, and this rank replays the step alone"
        )
        self.given = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where NaN or Inf came from, as JSON values."""

    # With "finite_overflow" the backward pass left the range of fp16 although its factors were
    # finite, so the loss scale is too large. With "constant" it is a bad tensor that is not an
    # input, parameter or buffer, such as one in a plain attribute of a module.
    kind: OriginKind
    # The name by which users know the operation ("log"; in the backward pass, the operation whose
    # derivative ran), a custom Function, or the bad tensor.
    op: str
    # The operation that actually ran, such as "aten.div"; empty for a tensor.
    aten: str = ""
    # The module's path, or "loss function".
    module: str
    # "backward" if the loss is finite.
    phase: Pass = "forward"
    # The bad parameter, or the first ones whose gradients are hit.
    parameters: tuple[str, ...] = ()
    # Rows along the batch axis in which the output is bad: a hint. Empty if unknown, or if all are.
    samples: tuple[int, ...]
    # The first few operands.
    operands: tuple[Operand, ...] = ()
    # What the operation returned, or the bad tensor.
    produced: Operand
    # The user's code, such as "model.py:12 in forward". In the backward pass, that of the forward
    # operation.
    line: str = ""
    # How it happened, in one clause.
    mechanism: str
    # "certain": the operands confirm the mechanism.
    confidence: Confidence
    # Whether it was sent to other ranks by a collective of the loss or the model.
    sent: bool = False

    def __str__(self) -> str:
        parts = self._operation_text() if self.aten else [f"{self.mechanism}: {self.produced}"]
        if self.operands:
            parts.append(f"of {', '.join(map(str, self.operands))}")
        if self.samples:
            parts.append(f"rows {_first_few(self.samples)}")
        if self.sent:
            parts.append("sent to the other ranks by a collective of the loss or the model")
        if self.parameters and self.kind != "parameter":
            parts.append(f"hits the gradient of {_first_few(self.parameters)}")
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
    """Replay a failing step and return where its NaN or Inf comes from.

    Cost: about 3 to 30 times that of a step.

    Args:
        run_once: Runs forward and backward, into ``.grad`` of `parameters`, and returns the
            detached loss, shape ``()``. It must handle the random state itself.
        models: The models by name. Parts of a single model called ``"model"`` keep their bare
            paths.
        parameters: Names and parameters whose gradients matter.
        batch_tensors: Names and tensors of the batch.
        batch_size: Samples in the batch as `run_once` passes it to the model, or None if unknown.

    Returns:
        None if everything was finite in the replay.

    Raises:
        UntraceableError: Operations that may be to blame could not be examined. If `run_once`
            raises `NeedsOtherRanksError`, only the operations before the collective are examined,
            and this is raised if all of them were finite.
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
            "part of the loss is computed by forward-mode AD, where values cannot be read"
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
    """Return everything that exists before the pass."""
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
    """Return the first named tensor of a batch that holds NaN as an origin, or None."""
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
    """Return where NaN or Inf first appeared before a collective.

    If possible, this is the origin of the tensors passed to the collective.
    """
    failures = [
        _failure(tracer, tensor) for tensor in collective.given if nonfinite(tensor) is not None
    ]
    # If no operation wrote a tensor, the collective is about to fill it.
    sent = [failure for failure in failures if failure.suspect.kind != "constant"]
    if sent:
        culprit = _find_culprit(sent, tracer.suspects)
        return replace(_origin(culprit, loss_is_finite=False), sent=True)
    first = _first_accidental(tracer.suspects)
    if first is None:
        raise UntraceableError(
            "everything before it was finite, and one rank cannot repeat a collective alone"
        )
    return _origin(_find_culprit([_failure_of(first)], tracer.suspects), loss_is_finite=False)


@dataclass(frozen=True, slots=True)
class _ChainLink:
    """A suspect as a link of the chain from the failure back to its origin."""

    suspect: Suspect
    # Whether the chain follows its NaN. If False, it follows its Inf.
    by_nan: bool

    def parents(self) -> list[_ChainLink]:
        """Return the links of the operands that may have made this suspect bad."""
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
    """Walk back from the suspects that made the loss or gradients bad to the earliest origin.

    Args:
        failures: The suspects that made the loss or the gradients bad.
        suspects: All suspects, in the order of events.
    """
    if suspects and all(failure.suspect.kind == "constant" for failure in failures):
        # The chain is broken, for example by ``.item()``.
        failures = [_failure_of(_first_accidental(suspects) or suspects[0])]
    successors = _walk_back(failures)
    origins: list[Suspect] = []
    for link in successors:
        if link.parents():
            continue
        if _is_on_purpose(link.suspect):
            origins.append(_first_that_breaks(link, successors))
        else:
            origins.append(link.suspect)
    return min(origins, key=lambda suspect: suspect.index)


def _first_accidental(suspects: Sequence[Suspect]) -> Suspect | None:
    """Return the first suspect that was not written on purpose, or None if there is none."""
    return next((suspect for suspect in suspects if not _is_on_purpose(suspect)), None)


def _walk_back(failures: Sequence[_ChainLink]) -> dict[_ChainLink, _ChainLink | None]:
    """Return all links that lead to the failures, each with its successor towards the failure.

    The failures come first, without a successor; then their parents, breadth first.
    """
    queue = list(dict.fromkeys(failures))
    successors: dict[_ChainLink, _ChainLink | None] = dict.fromkeys(queue)
    # The list grows while it is iterated.
    for link in queue:
        for parent in link.parents():
            if parent not in successors:
                successors[parent] = link
                queue.append(parent)
    return successors


def _is_on_purpose(suspect: Suspect) -> bool:
    """Return whether an Inf was written as a constant or belongs to a mask."""
    if suspect.produced.nan or suspect.kind == "parameter":
        return False
    if suspect.kind == "operation" and _WRITES_CONSTANTS.fullmatch(readable(suspect.name)):
        return True
    is_all_infinite = suspect.kind == "constant" and suspect.produced.least is None
    return suspect.produced.is_mask or is_all_infinite


def _first_that_breaks(
    mask: _ChainLink, successors: Mapping[_ChainLink, _ChainLink | None]
) -> Suspect:
    """Return the first operation after a mask that computes with its Inf, not just moves it."""
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
    """Return what is known about the operation or tensor that is to blame."""
    if culprit.kind == "operation":
        origin = _origin_of_operation(culprit)
    else:
        origin = _origin_of_tensor(culprit)
    if not loss_is_finite:
        return origin
    if culprit.kind == "operation" and origin.phase == "forward":
        hidden = f"{origin.mechanism}, hidden from the loss but not from its gradient"
        origin = replace(origin, mechanism=hidden)
    return replace(origin, phase="backward")


def _origin_of_operation(culprit: Suspect) -> Origin:
    mechanism, confidence = explain(culprit)
    location = culprit.location
    # The backward pass produced an Inf in fp16 from finite operands.
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
    return f"a tensor created before the step holds {value}"
