"""Reports on runs: the HTML page, the live view, comparisons, and metrics for other tools.

Everything is drawn from recordings, never from a live training process, so it also works after a
crash. This package never imports torch.

Entry points, all given a run directory:

- ``gathering.gather`` reads a whole run, and ``page.render`` turns it into the HTML page.
- ``watching.Watched`` polls a run, and ``live.draw`` draws it in a terminal.
- ``comparing.Comparison`` sets several gathered runs side by side.
- ``metrics.copying.follow`` copies a run to TensorBoard, JSON lines or Weights & Biases.

Read ``run_snapshot`` first (what is known about a run), then ``sources`` and ``run_follower``
(where that comes from); then ``gathering`` with ``lanes``, ``curves``, ``attachments`` and
``images``, or ``watching`` with ``run_state`` and ``outlook``; then the output: ``page`` with
``figures``, ``step_figure``, ``timeline_figure``, ``goodput`` and ``environment``, or ``live``.
``offline_page`` keeps hostile text harmless on a page.
"""
