"""Copy a run's metrics to other tools: TensorBoard, JSON lines and Weights & Biases.

Entry points: `sinks.open_sinks` opens the targets, and `copying.follow` copies a run to them.
Read ``copying`` first, then ``sinks``.
"""
