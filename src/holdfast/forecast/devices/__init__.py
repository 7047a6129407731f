"""Devices: their catalogue and speed."""
