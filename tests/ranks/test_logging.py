"""Numbers that several ranks log: each has its own record, and what is alike is one curve."""

from __future__ import annotations

import pytest
from tests.ranks.harness import all_returned, run_ranks
from tests.ranks.test_ranks import batches_of as batches
from tests.ranks.test_ranks import loss_of, model_and_optimizer

import holdfast
from holdfast.report.page.gathering import gather
from holdfast.report.page.run_page import figures

pytestmark = pytest.mark.slow


def logging(rank, run):
    model, optimizer = model_and_optimizer()
    with holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=batches(rank, sizes=(4,) * 2)
    ) as guard:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, loss_of(model))
            guard.log(same=guard.global_step, own=rank)
            holdfast.log(again=rank)


def test_each_rank_logs_and_what_is_alike_is_one_curve(tmp_path):
    """Two ranks write side by side.

    The page has one curve of what they agree on, and two of the rest.
    """
    pytest.importorskip("plotly")
    all_returned(run_ranks(logging, 2, str(tmp_path)))
    steps = figures(gather(tmp_path))["steps"]
    # A panel with several curves has their colours behind its name.
    names = (each["text"].partition("</b>")[0] for each in steps["layout"]["annotations"])
    titles = {number: f"{name}</b>" for number, name in enumerate(names, start=1)}
    curves: dict[str, list[tuple[str, list[float]]]] = {}
    for each in steps["data"]:
        number = int(each["yaxis"].removeprefix("y") or 1)
        curves.setdefault(titles.get(number, "events"), []).append((each["name"], each["y"]))
    assert curves["<b>same</b>"] == [("all alike", [1, 2])]
    assert (
        curves["<b>own</b>"]
        == curves["<b>again</b>"]
        == [("guard rank0", [0, 0]), ("guard rank1", [1, 1])]
    )
