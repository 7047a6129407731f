"""Programs of the set `held_out_3`."""
