"""The order of the samples in an epoch, and how they are grouped into batches.

- `orders`: orders that can compute the indices for any range of positions, so that a resume does
  not read earlier samples again.
- `sampler_order`: the order of the user's own sampler. `sampler_history` and `sampler_state` find
  the state that the sampler carries from epoch to epoch, so that a resume can restore it.
- `batches`: groups an order into batches. `ranks`: divides the samples of a step among ranks.
- `host_epochs`: translates the epoch numbers that a framework or training loop sets.
"""
