"""Will it fit, and what is the fastest plan that does.

A training step is run on tensors without data.
"""
