"""The directory that is put on the ``PYTHONPATH`` of a supervised command.

It contains ``sitecustomize`` and nothing else.
"""
