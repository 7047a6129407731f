"""Decide whether a batch may be split for a loss function, and weight its micro-batches.

Read `split_safety` first: the step engine asks it whether to split, and how to weight the parts.
`SplitSafety._hazards` lists the reasons not to split a batch. `split_check` runs trial splits, with
the help of `draws` (random numbers), `selection` (losses that select samples) and `loss_functions`
(side effects). `weighting` finds out what the mean of a loss is taken over. `two_pass` splits
batches for a loss that compares samples, and `window` represents a step over several batches.
"""
