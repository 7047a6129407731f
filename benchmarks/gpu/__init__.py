"""The figures that need a CUDA device.

Without one each script says so and ends with exit code 0.
"""
