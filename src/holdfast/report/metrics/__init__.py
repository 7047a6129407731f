"""Copy what a run records to where people look already: TensorBoard, JSON lines, W&B.

Entry points: `sinks.open_sinks` opens the targets, and `copying.follow` copies a run to them.
Read ``copying`` first, then ``sinks`` and ``clients``.
"""
