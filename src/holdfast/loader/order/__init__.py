"""Which sample is at which position of an epoch, and in which batch.

- `orders`: orders that can be asked for any stretch of positions.
- `sampled`, `sampler_state`: samplers of the user, and what they carry from epoch to epoch.
- `batches`: an order cut into batches. `ranks`: which part of a step belongs to a rank.
- `host_epochs`: what the framework around the loader calls its epochs.
"""
