"""Metrics where people already look: TensorBoard, JSON lines, Weights & Biases, MLflow."""

from holdfast.report.metrics.copying import Copied, follow
from holdfast.report.metrics.sinks import check_targets, open_sinks

__all__ = ["Copied", "check_targets", "follow", "open_sinks"]
