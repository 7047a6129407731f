"""Where a non-finite value came from.

One replay under a tracer, then a walk back from what failed to its origin.

An Inf that never reaches the loss or a gradient is nobody's fault, and one that was written on
purpose (a mask) is not to blame either: then it is the operation that could not bear it, such as a
softmax over a row that is masked entirely.

Does not: undo what the replay does to gradients, buffers and random state, nor decide what to do
about the finding.
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
from holdfast.numerics.tracer import OUTSIDE, Kind, OriginTracer, Phase, Suspect

_MOST_PARAMETERS = 3
_MOST_OPERANDS = 4
_ON_PURPOSE = re.compile(
    r"(masked_|index_)?fill|(new_)?full(_like)?|scalar_tensor|masked_scatter|where|constant_pad_nd|lift_fresh"
)
_CARRIERS = re.compile(
    r"cat|stack|index(_select|_put)?|gather|scatter|copy|clone|to|repeat|(slice|select)_(backward|scatter)|log_softmax|"
    r"unsafe_view|roll|flip|baddbmm|masked_(scatter|select)|tril|triu|constant_pad_nd|unfold_backward"
)


class UntraceableError(Exception):
    """A step holds NaN or Inf, and not all of its operations can be examined; says why."""


class NeedsOtherRanksError(RuntimeError):
    """A rank that makes a step again by itself has come to a collective of the loss or the model.

    `given` holds what the collective was called with, tensors among other things.
    """

    def __init__(self, collective: str, given: Sequence[object] = ()) -> None:
        super().__init__(
            f"{collective} needs the other ranks, and this one makes the step again by itself"
        )
        self.given = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where NaN or Inf came from, as facts that JSON can hold.

    ``"finite_overflow"``: the backward pass left fp16's range with finite factors, so the loss
    scale is too large. ``"constant"``: a bad tensor that is no input, parameter or buffer, such as
    one that a module keeps to itself.
    """

    kind: Literal["operation", "finite_overflow", "input", "parameter", "buffer", "constant"]
    # As users know it ("log"; in backward that whose derivative ran), a custom Function, or the bad
    # tensor
    op: str
    aten: str  # the operation that really ran, such as "aten.div"; empty for a tensor
    module: str  # its path, or "loss function"
    phase: Phase  # "backward" if the loss is finite
    parameters: tuple[str, ...]  # the bad one, or the first whose gradients are hit
    # Bad rows of the output along the batch axis, a hint; empty if unknown, or all are
    samples: tuple[int, ...]
    operands: tuple[Operand, ...]  # what the operation was given, the first few
    produced: Operand  # what it returned, or the bad tensor
    # Such as "model.py:12 in forward": the user's code, in the backward pass that of the forward
    # one
    line: str
    mechanism: str  # how it happened, one clause
    confidence: Confidence  # "certain": the operands bear the mechanism out
    sent: bool = False  # it went into a collective of the loss or the model, and so to other ranks

    def __str__(self) -> str:
        if self.kind in ("operation", "finite_overflow"):
            place = (
                self.module if self.module == OUTSIDE else f"module {self.module or '(unknown)'}"
            )
            line = f" ({self.line})" if self.line else ""
            parts = [
                f"{self.op} in the {place}{line}, {self.phase} pass: {self.mechanism}",
                f"gave {self.produced}",
            ]
        else:
            parts = [f"{self.mechanism}: {self.produced}"]
        if self.operands:
            parts.append(f"of {', '.join(map(str, self.operands))}")
        if self.samples:
            parts.append(f"rows {_some(self.samples)}")
        if self.sent:
            parts.append("went to the other ranks in a collective of the loss or the model")
        if self.parameters and self.kind != "parameter":
            parts.append(f"hits the gradient of {_some(self.parameters)}")
        return "; ".join(parts)


def _some(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:5])) + ", ..." * (len(values) > 5)


def trace(
    run_once: Callable[[], torch.Tensor],
    models: Mapping[str, nn.Module],
    parameters: Sequence[tuple[str, torch.Tensor]],
    batch_tensors: Sequence[tuple[str, torch.Tensor]],
    batch_size: int | None,
) -> Origin | None:
    """Run a failing step once more and say where its NaN or Inf comes from.

    None if all was finite this time.

    Cost: about three to thirty times a step. Random state is touched by `run_once` alone, which
    runs forward and backward into ``.grad`` of `parameters`, and returns the detached loss, shape
    ``()``. Parts of a single model called ``"model"`` keep their bare paths. `batch_size` is as
    `run_once` passes the batch to the model; None if unknown. `UntraceableError` if operations that
    may be to blame could not be examined.

    Where `run_once` raises `NeedsOtherRanksError`, what came before is looked at, and
    `UntraceableError` is raised if all of that was finite.
    """
    known: list[tuple[Kind, str, torch.Tensor]] = [
        ("input", name, tensor) for name, tensor in batch_tensors
    ]
    known += [("parameter", name, tensor) for name, tensor in parameters]
    for key, model in models.items():
        prefix = "" if key == "model" else f"{key}."
        known += [("parameter", prefix + name, tensor) for name, tensor in model.named_parameters()]
        known += [("buffer", prefix + name, tensor) for name, tensor in model.named_buffers()]
    tracer = OriginTracer(dict(models), known, batch_size)
    collective: NeedsOtherRanksError | None = None
    with eager(), tracer:
        try:
            loss = run_once()
        except NeedsOtherRanksError as error:
            collective = error
    if collective is not None:
        return _before_a_collective(tracer, collective)
    hidden = nonfinite(loss) is None
    hit = [
        (name, p.grad)
        for name, p in parameters
        if p.grad is not None and nonfinite(p.grad) is not None
    ]
    if hidden and not hit:
        return None
    if tracer.missed_some:
        raise UntraceableError(
            "part of the loss is computed by forward-mode AD, where values cannot be looked at"
        )
    ends = [gradient for _, gradient in hit] if hidden else [loss]
    culprit = _find_culprit([(tracer.find(end), _holds_nan(end)) for end in ends], tracer.suspects)
    origin = _describe(culprit, hidden=hidden)
    if culprit.kind == "parameter":
        return origin
    return replace(origin, parameters=tuple(name for name, _ in hit[:_MOST_PARAMETERS]))


def find_nan(tensors: Sequence[tuple[str, torch.Tensor]], batch_size: int | None) -> Origin | None:
    """Return the first tensor of a batch, by name, that holds NaN, or None."""
    tracer = OriginTracer({}, [("input", name, tensor) for name, tensor in tensors], batch_size)
    for _, tensor in tensors:
        if nonfinite(tensor) is None:
            continue
        suspect = tracer.find(tensor)
        if suspect.produced.nan:
            return _describe(suspect, hidden=False)
    return None


def _before_a_collective(tracer: OriginTracer, collective: NeedsOtherRanksError) -> Origin:
    """Return where NaN or Inf came up before a collective, at best that which the collective was
    given.
    """
    bad = [tensor for tensor in collective.given if nonfinite(tensor) is not None]
    ends = [(tracer.find(tensor), _holds_nan(tensor)) for tensor in bad]
    # A tensor that nothing was seen to write is one that the collective is to fill.
    sent = [end for end in ends if end[0].kind != "constant"]
    if sent:
        return replace(_describe(_find_culprit(sent, tracer.suspects), hidden=False), sent=True)
    accidental = [suspect for suspect in tracer.suspects if not _on_purpose(suspect)]
    if not accidental:
        raise UntraceableError(
            "what was computed before it was finite, and one rank cannot make a collective again by"
            " itself"
        )
    culprit = _find_culprit([(accidental[0], accidental[0].produced.nan > 0)], tracer.suspects)
    return _describe(culprit, hidden=False)


def _holds_nan(tensor: torch.Tensor) -> bool:
    return bool(torch.isnan(tensor.coalesce().values() if tensor.is_sparse else tensor).any())


_Bad = tuple[Suspect, bool]  # and whether its NaN counts, rather than its Inf


def _find_culprit(ends: Sequence[_Bad], suspects: Sequence[Suspect]) -> Suspect:
    """Walk back from what made the loss or the gradients bad.

    Of several origins the earliest one is to blame.
    """
    # The chain is broken, as by a number
    if all(suspect.kind == "constant" for suspect, _ in ends) and suspects:
        chosen = next((suspect for suspect in suspects if not _on_purpose(suspect)), suspects[0])
        ends = [(chosen, chosen.produced.nan > 0)]
    queue = list(dict.fromkeys(ends))
    users: dict[_Bad, _Bad | None] = dict.fromkeys(queue)
    origins: list[Suspect] = []
    for bad in queue:
        suspect, nan = bad
        nan = nan and suspect.took_nan
        parents = [(link.suspect, nan) for link in suspect.links if (link.nan if nan else link.inf)]
        for parent in parents:
            if parent not in users:
                users[parent] = bad
                queue.append(parent)
        if not parents:
            origins.append(_first_that_breaks(bad, users) if _on_purpose(suspect) else suspect)
    return min(origins, key=lambda suspect: suspect.index)


def _on_purpose(suspect: Suspect) -> bool:
    """Return whether Inf was put there.

    By an operation that writes constants, or as an additive mask.
    """
    if suspect.produced.nan or suspect.kind == "parameter":
        return False
    if suspect.kind == "operation" and _ON_PURPOSE.fullmatch(readable(suspect.name)):
        return True
    return suspect.produced.is_mask or (
        suspect.kind == "constant" and suspect.produced.least is None
    )


def _first_that_breaks(mask: _Bad, users: Mapping[_Bad, _Bad | None]) -> Suspect:
    """Return the first operation, from a mask towards the failure, that does not merely pass Inf
    on.
    """
    bad = mask
    while (user := users[bad]) is not None:
        bad = user
        suspect = bad[0]
        creates_nan = suspect.produced.nan > 0 and not suspect.took_nan
        if creates_nan or not (suspect.pointwise or _CARRIERS.fullmatch(readable(suspect.name))):
            break
    return bad[0]


def _describe(culprit: Suspect, *, hidden: bool) -> Origin:
    """Return what is known about an operation or a tensor; `hidden`: the loss is finite."""
    kind: Literal[Kind, "finite_overflow"] = culprit.kind
    op, aten, module = culprit.name, "", culprit.module
    if kind == "operation":
        op, aten = (
            culprit.function or readable(culprit.node or culprit.name),
            f"aten.{culprit.name}",
        )
        mechanism, confidence = explain(culprit)
        if hidden and culprit.phase == "forward":
            mechanism += ", hidden from the loss but not from its gradient"
        produced = culprit.produced
        if (
            culprit.phase == "backward"
            and produced.dtype == "float16"
            and produced.inf
            and not culprit.links
        ):
            kind = "finite_overflow"
    else:
        what = "NaN" if culprit.produced.nan else "Inf"
        mechanism, confidence = (
            {
                "input": f"{what} in the batch ({op})",
                "parameter": f"weight {op} is {what}",
                "buffer": f"buffer {op} is {what}",
            }.get(kind, f"a tensor that was made before the step holds {what}"),
            "certain",
        )
        if kind in ("parameter", "buffer"):
            module = op.rpartition(".")[0] or "model"
    return Origin(
        kind=kind,
        op=op,
        aten=aten,
        module=module,
        phase="backward" if hidden else culprit.phase,
        parameters=(op,) if kind == "parameter" else (),
        samples=culprit.rows,
        operands=culprit.operands[:_MOST_OPERANDS],
        produced=culprit.produced,
        line=culprit.line,
        mechanism=mechanism,
        confidence=confidence,
    )
