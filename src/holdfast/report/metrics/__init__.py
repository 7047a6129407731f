"""Copy the metrics of a run to TensorBoard, JSON lines and Weights & Biases.

Entry points: `sinks.open_sinks` opens the targets, and `copying.follow` copies a run to them.
Read ``copying`` first, then ``sinks``.
"""
