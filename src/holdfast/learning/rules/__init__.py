"""The learning rules: pure functions from observations to findings, one module per subject.

Start with `registry`, which defines rules and their two tiers: contract rules are applied from the
first steps on, window rules at intervals and at the end. `judge` applies all rules.
"""
