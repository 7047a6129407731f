"""Which sample is at which position of an epoch, and in which batch.

- `orders`: orders that return the indices at any range of positions, so that a resume reads nothing
  again.
- `sampler_order`: the order of the user's own sampler. `sampler_history` and `sampler_state` find
  the state that it carries from epoch to epoch, so that a resume can restore it.
- `batches`: an order cut into batches. `ranks`: which part of a step belongs to a rank.
- `host_epochs`: what the framework around the loader calls its epochs.
"""
