"""Programs of the set `design`."""
