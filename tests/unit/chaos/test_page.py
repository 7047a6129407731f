"""The page of a campaign: what was found, first of all the verdict.

What the training says cannot do anything.
"""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.chaos.page import render
from holdfast.chaos.results import CampaignReport, FaultResult

_EVIL = "<script>alert(1)</script>\x1b[2J"


def test_the_page_says_what_was_found_and_runs_nothing():
    """Verdict, command, seed, versions, each fault, and curves of both losses.

    Text of the training is escaped.
    """
    losses = {"losses": [4.0, None, 2.0]}
    rows = [
        FaultResult(
            kind="kill", fault="SIGKILL in step 2", result="exact", attempts=2, comparison=losses
        ),
        FaultResult(
            kind="term",
            fault="SIGTERM in step 3",
            result="another training",
            detail=f"step 3: {_EVIL}",
            attempts=2,
        ),
        FaultResult(kind="nan", fault="a NaN", left_files=[_EVIL]),
    ]
    report = CampaignReport(
        command=["python"],
        seed=7,
        steps=3,
        undisturbed_seconds=[1.0, 2.0],
        unsteady=None,
        remarks=[_EVIL],
        rows=rows,
        losses=[4.0, 3.0, 2.0],
        versions={"torch": "2.13.0"},
    )
    page = render(
        report, f"python {_EVIL}", "It survives <b>", now=datetime(2026, 1, 2, tzinfo=UTC)
    )
    assert "<script" not in page
    assert "\x1b" not in page
    assert "default-src 'none'" in page
    for words in (
        "It survives &lt;b&gt;.",
        "python &lt;script&gt;",
        "step 3: &lt;script&gt;",
        "not tried",
        "no time",
        "--seed 7",
        "torch 2.13.0",
        "2026-01-02",
    ):
        assert words in page
    assert 'points="0.0,0.0 33.3,50.0 66.7,100.0"' in page  # from the largest to the smallest loss
    assert page.count("<svg") == 1
