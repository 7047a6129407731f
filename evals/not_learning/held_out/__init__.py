"""Programs of the set `held_out`."""
