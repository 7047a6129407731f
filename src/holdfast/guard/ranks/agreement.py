"""Check that ranks agree on their settings, and reject features that need a single process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.guard.ranks.failures import out_of_step
from holdfast.guard.ranks.interface import PLACE


def check_agreement(facts_by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Check that facts are the same on all ranks.

    Args:
        facts_by_rank: For each rank, a mapping from the name of a fact to its value.

    Raises:
        RankError: H116 if ranks differ in the fact named `PLACE`, their position in the data.
        PolicyError: H115 if ranks differ in any other fact.
    """
    for name, value in facts_by_rank[0].items():
        differing = [rank for rank, facts in enumerate(facts_by_rank) if facts.get(name) != value]
        if not differing:
            continue
        other = differing[0]
        difference = (
            f"{name} is {facts_by_rank[other].get(name)!r:.200} on rank {other} and"
            f" {value!r:.200} on rank 0"
        )
        if name == PLACE:
            raise out_of_step(f"{difference}: one of them has skipped a batch")
        raise PolicyError(
            difference,
            limit="all ranks train one model and share one run directory",
            fix=(
                "pass the same value on all ranks, and put the run directory where every rank can"
                " read and write it."
            ),
            rule="H115",
        )


def unsupported(what: str) -> PolicyError:
    """Return error H108 for a feature that only works with a single process.

    Args:
        what: The feature, as a noun phrase with which the error message begins.
    """
    return PolicyError(
        f"{what} with several ranks",
        limit="this version does not support that with several ranks",
        fix="remove it, or run one process per run directory.",
        rule="H108",
    )
