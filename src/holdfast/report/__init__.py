"""What people look at: the page, the live view, comparisons, and metrics for other tools.

Everything is drawn from what was recorded, never from a live training process, so it also works
after a crash. This package never imports torch.

Entry points, all given a run directory:

- ``gathering.gather`` reads a whole run, and ``page.render`` makes the HTML page of it.
- ``watching.Watched`` looks at a run again and again, and ``live.draw`` draws it in a terminal.
- ``comparing.Comparison`` sets several gathered runs side by side.
- ``metrics.copying.follow`` copies a run to TensorBoard, JSON lines or Weights & Biases.

In which order to read it: ``run_snapshot`` (what is known of a run), ``sources`` and
``run_follower`` (where it comes from); then ``gathering`` with ``lanes``, ``curves``,
``attachments`` and ``images``, or ``watching`` with ``run_state`` and ``outlook``; then what is
drawn: ``page`` with ``figures``, ``step_figure``, ``timeline_figure``, ``goodput`` and
``environment``, or ``live``. ``offline_page`` keeps hostile text harmless on a page.
"""
