"""What the page of folklore says is what its benchmark found."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.folklore import CLAIMS, PAGE, table

_RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "folklore.json"


def test_every_figure_and_verdict_of_the_page_comes_from_the_result_file() -> None:
    """The table of the page is the one that the result file gives.

    Nobody types a number or a verdict.
    """
    assert table(json.loads(_RESULT.read_text())) in PAGE.read_text()


def test_every_claim_is_explained() -> None:
    """Each claim of the table has a section of the page that bears its words."""
    page = PAGE.read_text()
    assert [claim.claim for claim in CLAIMS] == [
        line[3:] for line in page.splitlines() if line.startswith("## ")
    ]
