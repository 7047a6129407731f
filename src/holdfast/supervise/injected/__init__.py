"""The directory that is prepended to the ``PYTHONPATH`` of a supervised command.

It contains ``sitecustomize`` and nothing else.
"""
