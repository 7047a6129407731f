"""Iterable datasets."""
