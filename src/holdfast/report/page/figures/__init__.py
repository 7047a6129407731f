"""The two figures of a page, as plain JSON values for plotly.js.

``steps.step_figure`` draws curves over steps; ``timeline.timeline_figure`` shows what each process
did over time. Their data come from the `GatheredRun` of ``page.gathering``. Colours of text, grid
and background are left to the page's two themes.
"""
