"""The settings of a run.

The entry point is `policy.Policy`. Read `policy` first (the fields, and the precedence of the
sources of their values), then `kinds` (the allowed values of each field), `sources` (files,
environment variables and options) and `presets` (the settings of published recipes).
"""
