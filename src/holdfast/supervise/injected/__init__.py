"""A directory that holdfast prepends to the ``PYTHONPATH`` of a supervised command.

Its only module is ``sitecustomize``, which Python imports automatically at startup.
"""
