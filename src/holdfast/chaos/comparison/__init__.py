"""Find where and why an attempt diverges from the undisturbed run.

Read `differences` for the vocabulary, `reference` for how an attempt is placed in the undisturbed
run, `divergence` for the first step that differs and its cause, `saved_entries` for what only a
checkpoint shows, and `timeline` for all attempts of a trial together. Entry points are
`timeline.compare` and `timeline.compare_undisturbed`.
"""
