"""Will it fit, and what is the fastest plan that does: a training step is run on tensors without data."""
