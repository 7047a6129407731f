"""Decide whether a batch may be split for a loss function, and weight its micro-batches.

Read `split_safety` first: the step engine asks it whether to split, and how to weight the parts.

- `hazards` is the list of reasons not to split a batch, and says what a split promises.
- `split_trials` decides when a trial split is due, and where it runs. `forked_check` runs it in a
  forked copy of the process.
- `split_check` is the trial itself. `subsets` chooses its samples, `comparer` compares them with
  their parts (each time with a `comparison`, and with `draws` for the random numbers), and
  `searches` looks for what no comparison shows, with the help of `selection` (losses that select
  samples) and `loss_functions` (forbidden calls, side effects). All of them call the loss function
  through an `evaluation`.
- `split_result` is its result. `loss_history` keeps the results of each loss function.
- `weighting` finds out what the mean of a loss is taken over.
- `two_pass` splits batches for a loss that compares samples, and `window` represents a step over
  several batches.
"""
