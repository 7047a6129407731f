"""A run: its loop, its steps, what is done when one goes wrong, and how all of it is restored."""
