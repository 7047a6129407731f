"""Decide whether a batch may be split for a loss function, and weight its micro-batches.

Read `split_safety` first: the step engine asks it whether to split, and how to weight the parts.

- **Whether to split.** `hazards` is the list of reasons not to split a batch, and says what a split
  promises. `split_trials` decides when a trial split is due, and where it runs. The package `trial`
  is the trial itself.
- **The loss function.** `loss_functions` calls it and refuses forbidden calls. `loss_identity`
  recognizes it in each step, and `loss_history` keeps the results of its trials.
- **How to split.** `weighting` finds out what the mean of a loss is taken over. `two_pass` splits
  batches for a loss that compares samples, and `window` represents a step over several batches.
"""
