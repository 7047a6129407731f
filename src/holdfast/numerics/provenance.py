"""Where a non-finite value came from: one replay under a tracer, then a walk back from what failed to its origin.

An Inf that never reaches the loss or a gradient is nobody's fault, and one that was written on purpose (a mask) is
not to blame either: then it is the operation that could not bear it, such as a softmax over a row that is masked
entirely.

Does not: undo what the replay does to gradients, buffers and random state, nor decide what to do about the finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from holdfast.numerics.eager import eager
from holdfast.numerics.mechanisms import Confidence, Facts, explain, readable
from holdfast.numerics.operands import Operand, nonfinite
from holdfast.numerics.origin import OUTSIDE, Birth, Births, Kind, Phase

_MOST_PARAMETERS = 3
_MOST_OPERANDS = 4
_ON_PURPOSE = {
    "fill", "full", "full_like", "new_full", "scalar_tensor", "masked_fill", "masked_scatter", "where", "index_fill",
    "constant_pad_nd", "lift_fresh",
}  # fmt: skip
_CARRIERS = {
    "cat", "stack", "index", "index_select", "gather", "index_put", "scatter", "copy", "clone", "to", "repeat",
    "select_backward", "slice_backward", "slice_scatter", "select_scatter", "log_softmax", "unsafe_view", "roll",
    "flip", "baddbmm", "masked_scatter", "masked_select", "tril", "triu", "constant_pad_nd", "unfold_backward",
}  # fmt: skip


class UntraceableError(Exception):
    """A step holds NaN or Inf, and not all of its operations can be examined; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where NaN or Inf came from, as facts that JSON can hold.

    Args:
        kind: ``"operation"``, ``"finite_overflow"`` (the backward pass left fp16's range with finite factors: the
            loss scale is too large), or the tensor that was bad before the step: ``"input"``, ``"parameter"``,
            ``"buffer"``, ``"constant"`` (none of these, such as a tensor that a module keeps to itself).
        op: Of torch, as users know it (``"log"``; in the backward pass the one whose derivative ran), the class of
            a custom ``autograd.Function``, or the name of the bad tensor.
        aten: The operation that really ran, such as ``"aten.div"``; empty for a tensor.
        module: Path of the module, or ``"loss function"``.
        phase: ``"backward"`` if the loss is finite.
        parameters: The bad parameter, or the first whose gradients are hit.
        samples: Rows of the output along the batch axis that are bad, a hint; empty if all are, or if there is no
            such axis.
        operands: What the operation was given, the first few.
        produced: What it returned, or the bad tensor.
        line: Such as ``"model.py:12 in forward"``: the user's code, in the backward pass that of the forward one.
        mechanism: How it happened, one clause.
        confidence: ``"certain"``: the operands bear the mechanism out; ``"likely"``; ``"unknown"``.
    """

    kind: Literal["operation", "finite_overflow", "input", "parameter", "buffer", "constant"]
    op: str
    aten: str
    module: str
    phase: Phase
    parameters: tuple[str, ...]
    samples: tuple[int, ...]
    operands: tuple[Operand, ...]
    produced: Operand
    line: str
    mechanism: str
    confidence: Confidence

    def __str__(self) -> str:
        if self.kind in ("operation", "finite_overflow"):
            place = self.module if self.module == OUTSIDE else f"module {self.module or '(unknown)'}"
            line = f" ({self.line})" if self.line else ""
            parts = [f"{self.op} in the {place}{line}, {self.phase} pass: {self.mechanism}", f"gave {self.produced}"]
        else:
            parts = [f"{self.mechanism}: {self.produced}"]
        if self.operands:
            parts.append(f"of {', '.join(map(str, self.operands))}")
        if self.samples:
            parts.append(f"rows {_some(self.samples)}")
        if self.parameters and self.kind != "parameter":
            parts.append(f"hits the gradient of {_some(self.parameters)}")
        return "; ".join(parts)


def _some(values: Sequence[object], most: int = 5) -> str:
    return ", ".join(map(str, values[:most])) + ", ..." * (len(values) > most)


def trace(
    run_once: Callable[[], torch.Tensor],
    models: Mapping[str, nn.Module],
    parameters: Sequence[tuple[str, torch.Tensor]],
    batch_tensors: Sequence[tuple[str, torch.Tensor]],
    batch_size: int | None,
) -> Origin | None:
    """Run a failing step once more and say where its NaN or Inf comes from.

    Args:
        run_once: Runs forward and backward; gradients land in ``.grad`` of `parameters`; returns the detached loss,
            shape ``()``. What it raises is passed on.
        models: By name; parts of a single one called ``"model"`` keep their bare paths.
        parameters: Those that get gradients, by name.
        batch_tensors: The tensors of the batch, by name.
        batch_size: Samples of the batch as `run_once` passes it to the model; None if unknown.

    Returns:
        The origin; None if loss and gradients were finite this time.

    Raises:
        UntraceableError: if operations that may be to blame could not be examined.

    Cost: about three to thirty times a step, and a read by the host for every operation. Random state is touched
    by `run_once` alone.
    """
    births = Births(dict(models), [*_tensors(models, parameters, batch_tensors)], batch_size)
    with eager(), births:
        loss = run_once()
    bad_loss = nonfinite(loss)
    hit = [(name, p.grad) for name, p in parameters if p.grad is not None and nonfinite(p.grad) is not None]
    if bad_loss is None and not hit:
        return None
    if births.missed_some:
        raise UntraceableError("part of the loss is computed by forward-mode AD, where values cannot be looked at")
    ends = [loss] if bad_loss is not None else [gradient for _, gradient in hit]
    culprit = _find_culprit([(births.find(end), _holds_nan(end)) for end in ends], births.events)
    origin = _describe(culprit, hidden=bad_loss is None)
    if culprit.kind == "parameter":
        return origin
    return replace(origin, parameters=tuple(name for name, _ in hit[:_MOST_PARAMETERS]))


def _tensors(
    models: Mapping[str, nn.Module],
    parameters: Sequence[tuple[str, torch.Tensor]],
    batch_tensors: Sequence[tuple[str, torch.Tensor]],
) -> list[tuple[Kind, str, torch.Tensor]]:
    found: list[tuple[Kind, str, torch.Tensor]] = [("input", name, tensor) for name, tensor in batch_tensors]
    found += [("parameter", name, tensor) for name, tensor in parameters]
    for key, model in models.items():
        prefix = "" if key == "model" else f"{key}."
        found += [("parameter", prefix + name, tensor) for name, tensor in model.named_parameters()]
        found += [("buffer", prefix + name, tensor) for name, tensor in model.named_buffers()]
    return found


def _holds_nan(tensor: torch.Tensor) -> bool:
    return bool(torch.isnan(tensor.coalesce().values() if tensor.is_sparse else tensor).any())


_Bad = tuple[Birth, bool]  # and whether its NaN counts, rather than its Inf


def _find_culprit(ends: Sequence[_Bad], events: Sequence[Birth]) -> Birth:
    """Walk back along non-finite operands; of several origins the earliest one is to blame.

    Args:
        ends: What made the loss or the gradients bad.
        events: All births of the pass.
    """
    if all(birth.kind == "constant" for birth, _ in ends) and events:  # the chain is broken, as by a number
        chosen = next((event for event in events if not _on_purpose(event)), events[0])
        ends = [(chosen, chosen.produced.nan > 0)]
    queue = list(dict.fromkeys(ends))
    users: dict[_Bad, _Bad | None] = dict.fromkeys(queue)
    origins: list[Birth] = []
    for bad in queue:
        birth, nan = bad
        nan = nan and birth.took_nan
        parents = [link.birth for link in birth.links if (link.nan if nan else link.inf)]
        for parent in [(parent, nan) for parent in parents]:
            if parent not in users:
                users[parent] = bad
                queue.append(parent)
        if not parents:
            origins.append(_first_that_breaks(bad, users) if _on_purpose(birth) else birth)
    return min(origins, key=lambda birth: birth.index)


def _on_purpose(birth: Birth) -> bool:
    """Return whether Inf was put there: by an operation that writes constants, or as an additive mask."""
    if birth.produced.nan or birth.kind == "parameter":
        return False
    if birth.kind == "operation" and readable(birth.name) in _ON_PURPOSE:
        return True
    return birth.produced.is_mask or (birth.kind == "constant" and birth.produced.least is None)


def _first_that_breaks(mask: _Bad, users: Mapping[_Bad, _Bad | None]) -> Birth:
    """Return the first operation, from a mask towards the failure, that does not merely hand Inf on."""
    bad = mask
    while (user := users[bad]) is not None:
        bad = user
        birth = bad[0]
        creates_nan = birth.produced.nan > 0 and not birth.took_nan
        if creates_nan or not (birth.pointwise or readable(birth.name) in _CARRIERS):
            break
    return bad[0]


def _describe(culprit: Birth, *, hidden: bool) -> Origin:
    """Return what is known about a culprit.

    Args:
        culprit: An operation or a tensor.
        hidden: Whether the loss is finite.
    """
    phase: Phase = "backward" if hidden else culprit.phase
    facts = Facts(
        op=culprit.function or readable(culprit.node or culprit.name),
        backward=bool(culprit.node),
        operands=culprit.operands,
        scalars=culprit.scalars,
        produced=culprit.produced,
    )
    operation = culprit.kind == "operation"
    if operation:
        inner = replace(facts, op=readable(culprit.name)) if culprit.function else facts
        mechanism, confidence = explain(inner)
        if hidden and culprit.phase == "forward":
            mechanism += ", hidden from the loss but not from its gradient"
    else:
        mechanism, confidence = _bad_tensor(culprit), "certain"
    scaled = culprit.phase == "backward" and culprit.produced.dtype == "float16" and not culprit.links
    return Origin(
        kind="finite_overflow" if scaled and culprit.produced.inf else culprit.kind,
        op=facts.op if operation else culprit.name,
        aten=f"aten.{culprit.name}" if operation else "",
        module=(culprit.name.rpartition(".")[0] or "model")
        if culprit.kind in ("parameter", "buffer")
        else culprit.module,
        phase=phase,
        parameters=(culprit.name,) if culprit.kind == "parameter" else (),
        samples=culprit.rows,
        operands=culprit.operands[:_MOST_OPERANDS],
        produced=culprit.produced,
        line=culprit.line,
        mechanism=mechanism,
        confidence=confidence,
    )


def _bad_tensor(culprit: Birth) -> str:
    what = "NaN" if culprit.produced.nan else "Inf"
    return {
        "input": f"{what} in the batch ({culprit.name})",
        "parameter": f"weight {culprit.name} is {what}",
        "buffer": f"buffer {culprit.name} is {what}",
    }.get(culprit.kind, f"a tensor that was made before the step holds {what}")
