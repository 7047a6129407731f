"""Figures: what plotly accepts, with every curve and mark where it belongs, for runs of every
size.
"""

from __future__ import annotations

import json
import math

import pytest
from tests.unit.report.made_runs import GONE, add_process, happened, make_run, sample

from holdfast.core.text import as_json_value
from holdfast.report.page.figures.plotly_values import label
from holdfast.report.page.gathering import gather
from holdfast.report.page.run_page import figures

graph_objects = pytest.importorskip("plotly.graph_objects")


def _validated(figure):
    """Return plotly's own object; it raises for an attribute or a value that it does not know."""
    return graph_objects.Figure(
        json.loads(json.dumps(as_json_value(figure, depth=12), allow_nan=False))
    )


def test_the_figures_of_a_run_are_valid_and_complete(tmp_path):
    """Plotly knows every attribute.

    Each rank has its curves, or all have one, and each event a mark on its row.
    """
    drawn = figures(gather(make_run(tmp_path, ranks=2)))
    timeline, steps = _validated(drawn["timeline"]), _validated(drawn["steps"])
    assert {trace.name for trace in steps.data} == {"rank 0", "rank 1", "all alike", "error"}
    titles = [note.text.partition("&nbsp;")[0] for note in steps.layout.annotations]
    assert titles == [
        f"<b>{title}</b>"
        for title in (
            "loss",
            "gradient norm",
            "learning rate",
            "host memory",
            "waiting for data",
            "seconds per step",
        )
    ]
    assert steps.layout.annotations[0].text.count("rank") == 2
    assert {trace.name for trace in steps.data if trace.showlegend is not False} == {
        "rank 0",
        "rank 1",
        "all alike",
        "error",
    }
    assert list(timeline.layout.yaxis.categoryarray) == ["rank 1", "rank 0", "supervisor"]
    (marks,) = [trace for trace in timeline.data if trace.name == "error"]
    assert list(marks.y) == ["rank 0", "rank 1"]
    assert marks.hovertext[0].startswith("rank 0, step 300: ")
    assert "RuntimeError: shapes differ" in marks.hovertext[0]
    (bars,) = [trace for trace in timeline.data if trace.name == "training"]
    assert bars.base[0] == "2026-09-21 14:13:25.000"
    assert bars.x[0] == pytest.approx(30_000)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_runs_of_hardly_any_step_are_drawn(tmp_path, count):
    """With no step there are no curves, with one there is a point that can be seen."""
    add_process(tmp_path, [sample(step) for step in range(1, count + 1)], happened("exiting", 9))
    drawn = figures(gather(tmp_path))
    assert ("steps" in drawn) == (count > 0)
    _validated(drawn["timeline"])
    if count:
        assert _validated(drawn["steps"]).data[0].mode == "lines+markers"


def test_nan_is_a_gap_with_a_mark(tmp_path):
    """The line has no value there, and a cross at the foot of the panel says where."""
    samples = [sample(step, loss=math.nan if step == 5 else 1.0 / step) for step in range(1, 11)]
    add_process(tmp_path, samples)
    line, marks, *_ = _validated(figures(gather(tmp_path))["steps"]).data
    assert line.y[4] is None
    assert (list(marks.x), list(marks.y)) == ([5], [0.1])
    assert "NaN" in marks.hovertemplate


def test_a_curve_that_ends_in_nan_is_shaded_from_the_step_at_which_its_values_stop(tmp_path):
    """The shaded part names the rank, and the axis is that of the other rank's values."""
    add_process(tmp_path, [sample(step, loss=10.0 ** (3 - step)) for step in range(1, 6)], rank=0)
    losses = [1.0, 2.0, math.nan, math.inf, math.nan]
    samples = [sample(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    add_process(tmp_path, samples, rank=1, pid=GONE + 1)

    layout = figures(gather(tmp_path))["steps"]["layout"]

    assert layout["yaxis"]["type"] == "log"
    (shape,) = layout["shapes"]
    assert (shape["x0"], shape["x1"], shape["yref"]) == (3, 5, "y domain")
    assert shape["label"]["text"].startswith("rank 1")


def test_a_panel_without_any_value_has_no_numbers_on_its_axis(tmp_path):
    """An axis from -1 to 1 would look like values."""
    add_process(tmp_path, [sample(step, loss=math.nan) for step in range(1, 6)])
    figure = _validated(figures(gather(tmp_path))["steps"])
    assert figure.layout.yaxis.showticklabels is False
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1) == (1, 5)


def test_one_diverged_curve_does_not_flatten_the_others(tmp_path):
    """The axis ends a little above where it began to diverge; the title says how far it went."""
    add_process(tmp_path, [sample(step) for step in range(1, 51)], rank=0)
    losses = [2.0] * 40 + [10.0**power for power in range(10)]
    samples = [sample(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    add_process(tmp_path, samples, rank=1, pid=GONE + 1)

    layout = figures(gather(tmp_path))["steps"]["layout"]

    assert layout["yaxis"]["range"][1] < 25
    assert "1.0e+09" in layout["annotations"][0]["text"]


def test_values_over_decades_get_a_logarithmic_axis(tmp_path):
    """A norm that explodes is readable below the explosion too.

    A loss of one magnitude stays linear.
    """
    add_process(tmp_path, [sample(step, grad_norm=10.0 ** (step % 7)) for step in range(1, 50)])
    layout = figures(gather(tmp_path))["steps"]["layout"]
    assert "type" not in layout["yaxis"]
    assert layout["yaxis2"]["type"] == "log"


def test_a_label_draws_no_html():
    """Plotly.js draws tags and entities in texts: here they are the characters that they are."""
    assert label('<a href="javascript:x">&lt;') == '&lt;a href="javascript:x"&gt;&amp;lt;'
    assert len(label("x" * 500)) == 120


def test_a_constant_learning_rate_is_not_drawn_as_zero(tmp_path):
    """Its axis is as narrow as the rate is small: around it, and without 0."""
    add_process(tmp_path, [sample(step, learning_rate=1e-4) for step in range(1, 11)])
    layout = figures(gather(tmp_path))["steps"]["layout"]
    ranges = [
        axis["range"]
        for name, axis in layout.items()
        if name.startswith("yaxis") and "range" in axis
    ]
    assert [5e-5, 1.5e-4] in [[pytest.approx(each) for each in pair] for pair in ranges]


def test_ranks_share_a_curve_where_they_recorded_the_same(tmp_path):
    """The losses of two ranks differ and are two curves; the learning rate is one."""
    for rank in (0, 1):
        samples = [
            sample(step, loss=1.0 / (step + rank), learning_rate=0.3 / step) for step in range(1, 6)
        ]
        add_process(tmp_path, samples, rank=rank, pid=GONE + rank)
    figure = figures(gather(tmp_path))["steps"]
    (rate,) = [
        trace for trace in figure["data"] if trace["name"] == "all alike" and trace["y"][0] == 0.3
    ]
    assert rate["y"] == [pytest.approx(0.3 / step) for step in range(1, 6)]
    assert {"rank 0", "rank 1"} <= {trace["name"] for trace in figure["data"]}
