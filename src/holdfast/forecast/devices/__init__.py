"""Devices: their catalogue, calibration and speed."""
