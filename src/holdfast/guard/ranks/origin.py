"""Decide on which rank NaN or Inf appeared first, from what each rank has found out by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.guard.result import Provenance


class OriginReport(NamedTuple):
    """What a rank has found out about NaN or Inf by itself. It sends this to all ranks."""

    has_origin: bool
    # Whether NaN or Inf went into a collective of the loss or the model.
    is_sent: bool
    # The origin, or why it is not known.
    text: str
    # Whether the loss or the model has collectives.
    has_collectives: bool


def report_of(own: Provenance, *, has_collectives: bool) -> OriginReport:
    """Return the report about what a rank has found out.

    Args:
        own: What it has found out.
        has_collectives: Whether the loss or the model has collectives.
    """
    return OriginReport(
        has_origin=own.origin is not None,
        is_sent=own.origin is not None and own.origin.sent,
        text=str(own.origin) if own.origin is not None else own.problem,
        has_collectives=has_collectives,
    )


def origin_among_ranks(
    rank: int, own: Provenance, suspects: Sequence[int], reports: Sequence[OriginReport]
) -> Provenance:
    """Return on which rank NaN or Inf appeared first, and where it came from there.

    The first rank in this order is blamed: a suspect that has sent NaN in a collective of the loss,
    a suspect that has found an origin, any rank that has sent NaN. If there is none, the result
    names all suspects.

    Args:
        rank: This rank.
        own: What this rank has found out. Only the rank itself knows the details.
        suspects: The ranks whose loss is not finite, or all ranks.
        reports: What all ranks have found out, in order of rank.
    """
    senders = [sender for sender, report in enumerate(reports) if report.is_sent]
    candidates = [
        *(sender for sender in senders if sender in suspects),
        *(suspect for suspect in suspects if reports[suspect].has_origin),
        *senders,
    ]
    if candidates:
        blamed = candidates[0]
        where = _listed([blamed])
        if blamed == rank:
            return replace(own, where=where)
        return Provenance(problem=reports[blamed].text, where=where)
    where = _listed(suspects)
    if any(report.has_collectives for report in reports):
        where += ", after a collective of the loss or the model"
    return Provenance(problem=reports[suspects[0]].text, where=where)


def _listed(ranks: Sequence[int]) -> str:
    """Return the ranks as a list in a sentence, such as "ranks 0 and 2"."""
    *others, last = map(str, ranks)
    if not others:
        return f"rank {last}"
    return f"ranks {', '.join(others)} and {last}"
