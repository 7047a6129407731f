"""Corpora with known answers, and what holdfast makes of them."""
