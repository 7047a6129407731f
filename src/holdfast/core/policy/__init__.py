"""The settings of a run.

The entry point is `policy.Policy`. Read `policy` first (the fields, and which source of a value
wins), then `kinds` (the allowed values of each field), `sources` (files, variables and options) and
`presets` (the settings of published recipes).
"""
