"""The settings of a run.

The entry point is `policy.Policy`. Read `policy` first (the fields, and how sources are layered),
then `kinds` (what each field may be), `sources` (files, variables and options) and `presets` (what
published recipes set).
"""
