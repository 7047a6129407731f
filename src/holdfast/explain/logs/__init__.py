"""Logs of any size, read into statements."""
