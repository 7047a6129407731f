"""Which sample is at which position of an epoch."""
