"""Metrics where people already look: TensorBoard, JSON lines, Weights & Biases."""
