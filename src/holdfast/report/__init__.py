"""Reports on runs: HTML pages, the live view, and metrics for other tools.

Everything is drawn from recordings, never from a live training process, so it also works after a
crash. This package never imports torch.

Read ``run_snapshot`` first (what every view knows about a run), then ``sources`` and
``run_follower`` (how it is read), ``curves`` (how steps become curves) and ``verdicts`` (where the
verdict comes from). Each kind of report has its own package:

- ``page``: ``gathering.gather`` reads a whole run, ``run_page.render`` turns it into the HTML page,
  and ``comparing.Comparison`` compares several.
- ``live``: ``watching.Watched`` polls a run, and ``view.draw`` draws it in a terminal, even after
  it has ended.
- ``metrics``: ``copying.follow`` copies a run to TensorBoard, JSON lines or Weights & Biases.
"""
