"""The two figures of a page, as plain JSON values for plotly.js.

``steps.step_figure`` draws curves over steps; ``timeline.timeline_figure`` what each process did
over time. Colours of text, grid and background are left to the page's two themes.
"""
