"""Whether a batch may be split for a loss function, and how its micro-batches are weighted.

Read `split_safety` first, which answers both questions for the engine. It tries a split with
`split_check`, whose tools are `draws` (random numbers), `selection` (losses that select samples)
and `loss_functions` (side effects). `weighting` finds what the mean of a loss is over; `two_pass`
and `window` are two forms of a step that users and frameworks ask for.
"""
