"""The directory that is put on ``PYTHONPATH`` of a supervised command.

Holds ``sitecustomize`` and nothing else.
"""
