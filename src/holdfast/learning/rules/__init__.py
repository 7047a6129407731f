"""The learning rules: pure functions from observations to findings, one module per subject.

Start with `registry`, which defines what a rule is. There are two tiers of rules: contract rules
are applied from the first steps on, and window rules at intervals and at the end of the run.
`judge` applies all rules.
"""
