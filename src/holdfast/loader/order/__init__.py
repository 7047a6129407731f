"""Which sample is at which position of an epoch, and in which batch.

- `orders`: orders that can be asked for any stretch of positions.
- `sampler_order`: the order of a sampler of the user. `sampler_history` and `sampler_state` find
  what it carries from epoch to epoch.
- `batches`: an order cut into batches. `ranks`: which part of a step belongs to a rank.
- `host_epochs`: what the framework around the loader calls its epochs.
"""
