"""Whether a batch may be split for a loss function, and how its micro-batches are weighted.

Read `split_safety` first, which answers both questions for the step engine.
`SplitSafety._hazards` lists the reasons not to split a batch. `split_check` runs trial splits, with
the help of `draws` (random numbers), `selection` (losses that select samples) and `loss_functions`
(side effects). `weighting` finds out what the mean of a loss is taken over. `two_pass` splits a
loss that compares samples, and `window` represents a step over several batches.
"""
