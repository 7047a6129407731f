"""`FlightFinding`: what the dumps of torch's flight recorder say about a collective."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """The newest collective of one rank, in words.

    Attributes:
        rank: The rank.
        text: The collective, its number, its group, its state and where it was called.
        file: The name of the file that says so.
    """

    rank: int
    text: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFinding:
    """The first collective in which the ranks differ.

    Attributes:
        rule: The id of the signature, such as ``"H1660"``.
        sentence: Which ranks differ, in which collective and since when.
        where: The line to look at first, as ``file:line in function``; empty if unknown.
        rank: The only rank that differs from the others; None if there are several or none.
        ranks: The newest collective of each rank.
    """

    rule: str
    sentence: str
    where: str = ""
    rank: int | None = None
    ranks: tuple[RankLine, ...] = ()
