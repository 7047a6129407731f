"""The rules about learning: pure functions from observations to findings, by subject.

Start with `registry` (what a rule is); `judge` applies all of them.
"""
