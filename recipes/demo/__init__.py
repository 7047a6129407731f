"""A training on real data through real faults, each promise held against its reference.

`make demo` runs it.
"""
