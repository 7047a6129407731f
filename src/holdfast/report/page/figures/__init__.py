"""Draw the two kinds of figures on a page, as JSON values for plotly.js.

``steps.step_figure`` draws curves over steps, and ``timeline.timeline_figure`` shows the activity
of each process over time. The data comes from a `GatheredRun` (see ``page.gathering``). The colors
of text, grid and background are set by the page's themes.
"""
