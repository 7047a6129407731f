"""The figures of a page, as plain JSON values for plotly.js.

Two figures are drawn: curves over steps (``step_figure``) and what each process did over time
(``timeline_figure``). Colours of text, grid and background are left to the page's two themes.
"""

from __future__ import annotations

from holdfast.report.plotly_values import Figure
from holdfast.report.run_snapshot import RunSnapshot
from holdfast.report.step_figure import share_equal_curves, step_figure
from holdfast.report.timeline_figure import timeline_figure


def figures(run: RunSnapshot) -> dict[str, Figure]:
    """Return figures by the id of the element that each is drawn in; empty ones are left out."""
    drawn = {
        "timeline": timeline_figure(run),
        "steps": step_figure(share_equal_curves(run.lanes), run.events),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}
