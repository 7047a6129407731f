"""Faults on purpose: inject them into a training and say what survives."""
