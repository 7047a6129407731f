"""Explanations of what went wrong.

Standard library only: it must live on when the CUDA context is dead.
"""
