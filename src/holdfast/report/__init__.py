"""Report on runs: HTML pages, a live view in the terminal, and metrics for other tools.

All reports are based on recordings. They never communicate with a training process, so they also
work after a crash. This package never imports torch.

Read ``run_snapshot`` first (the data model that all views share), then ``sources`` and
``run_follower`` (reading recordings), ``curves`` (turning steps into curves) and ``verdicts``
(loading the verdict). Each kind of report has its own package:

- ``page``: ``gathering.gather`` reads a whole run, ``run_page.render`` turns it into an HTML page,
  and ``comparing.Comparison`` compares several runs.
- ``live``: ``watching.Watched`` polls a run, and ``view.draw`` shows its state in a terminal. Both
  also work for a run that has ended.
- ``metrics``: ``copying.follow`` copies a run to TensorBoard, JSON lines or Weights & Biases.
"""
