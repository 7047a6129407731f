"""Hostile files for everything that reads what others wrote."""
