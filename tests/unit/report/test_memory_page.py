"""The page of a forecast: what it draws is what was forecast, and a text in it is never more than a text."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import numpy as np
import pytest
from tests.unit.forecast.made_forecasts import make_plans, small_device

from holdfast.forecast.trace.events import OWNERS, live_peak
from holdfast.report.memory_page import memory_figure, render, thinned

graph_objects = pytest.importorskip("plotly.graph_objects")
GIB = 1 << 30


def test_the_owners_are_stacked_up_to_the_live_peak():
    """Plotly takes the figure; its areas add up to the peak of the step, below the line of the device."""
    (plan,) = make_plans(small_device(400)).plans
    figure = graph_objects.Figure(json.loads(json.dumps(memory_figure(plan))))
    areas = [trace for trace in figure.data if trace.stackgroup]
    assert {trace.name for trace in areas} <= set(OWNERS)
    assert "gradients" in {trace.name for trace in areas}
    peak = live_peak(plan.trace, plan.shown.optimizer) / GIB
    assert np.sum([trace.y for trace in areas], axis=0).max() == pytest.approx(peak, abs=1e-4)
    (limit,) = [trace for trace in figure.data if "less context" in trace.name]
    assert limit.y[0] == pytest.approx(390 / 1024)
    assert peak < limit.y[0]
    (all_of_it,) = [trace for trace in figure.data if trace.name == "all"]
    assert set(all_of_it.text) == {"forward", "backward", "optimizer", "other"}


def test_a_long_step_is_thinned_without_losing_its_peak():
    """Of a million events a thousand are drawn, with the highest, the lowest, the first and the last."""
    total = np.random.default_rng(0).integers(0, 1 << 40, 1_000_000)
    kept = thinned(total)
    assert len(kept) <= 1001
    assert {int(total.argmax()), int(total.argmin()), 0, len(total) - 1} <= set(kept.tolist())
    assert thinned(total[:5]).tolist() == [0, 1, 2, 3, 4]


def test_the_page_tells_the_plan_the_table_and_the_assumptions():
    """All rows, the policy, the last trace, and each assumption with its lines, for every device."""
    forecast = make_plans(small_device(400, "one"), small_device(60, "two"))
    page = render(forecast, now=datetime(2026, 11, 22, tzinfo=UTC))
    assert page.count('class="plot"') == 2
    assert page.count("<td") >= 8 * sum(len(plan.rows) for plan in forecast.plans)
    assert page.count('<tr class="taken">') == 1
    assert "micro_batch_size=&#x27;auto&#x27;" in page
    assert "Nothing fits two" in page
    assert "(at model.py:31 in forward, model.py:40 in forward)" in page
    assert "2026-11-22" in page


def test_hostile_texts_stay_texts():
    """A device of a file, an assumption and a line with tags in them open no tag, in the HTML or in the script."""
    page = render(make_plans(small_device(400, "</script><img src=x onerror=window.hacked=1>")))
    body, _, script = page.partition('<script type="application/json"')
    assert "<script" not in body
    assert "<img" not in body
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in body
    data = script[: script.index("</script>")]
    assert "onerror" in data
    assert not re.search("[<>&]", data.partition(">")[2])
