"""The trial split: compare the gradient of a few samples with that of their parts.

Read `split_check` first: it says what is checked.

- `subsets` chooses the samples. `comparer` compares them with their parts, each time with a
  `comparison`. `draws` gives the parts the random numbers of the whole set.
- `side_effects` and `selection` look for what no comparison shows: state that each forward pass
  changes, and losses that select samples.
- All of them call the loss function through an `evaluation`.
- `split_result` is the result of a trial. `forked_check` runs one in a forked copy of the process.
"""
