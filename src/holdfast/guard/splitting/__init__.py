"""Whether a batch may be split for a loss function, and how its micro-batches are weighted.

Read `split_safety` first, which answers both questions for the engine: `SplitSafety._hazards` lists
the reasons for which a batch is not split. It tries out a split with `split_check`, which in turn
uses `draws` (random numbers), `selection` (losses that select samples) and `loss_functions` (side
effects). `weighting` finds what the mean of a loss is taken over. `two_pass` splits a loss that
compares samples, and `window` is a step over several batches.
"""
