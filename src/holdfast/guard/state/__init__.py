"""Keep what an attempt may change at the beginning of a step, and restore it afterwards."""
