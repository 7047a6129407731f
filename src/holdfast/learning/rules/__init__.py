"""The rules about learning: pure functions from observations to findings, one module per subject.

Start with `registry`, which defines what a rule is and the two tiers: contracts are judged from the
first steps on, windows at intervals and at the end. `judge` applies all rules.
"""
