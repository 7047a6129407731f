"""Reports on runs: HTML pages, the live view, and metrics for other tools.

Everything is drawn from recordings, never from a live training process, so it also works after a
crash. This package never imports torch.

Read ``run_snapshot`` first (what every view knows about a run), then ``sources`` and
``run_follower`` (where that comes from). What is made of it has one package each:

- ``page``: ``gathering.gather`` reads a whole run, ``run_page.render`` turns it into the HTML page,
  and ``comparing.Comparison`` compares several.
- ``live``: ``watching.Watched`` polls a run, and ``view.draw`` draws it in a terminal.
- ``metrics``: ``copying.follow`` copies a run to TensorBoard, JSON lines or Weights & Biases.
"""
