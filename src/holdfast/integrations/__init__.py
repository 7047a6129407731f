"""Guarded training inside the frameworks that people already use, each imported by its name."""
