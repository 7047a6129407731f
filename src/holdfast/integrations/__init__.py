"""Guarded training inside the frameworks that people already use: one thin module for each, imported by name."""
