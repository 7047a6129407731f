"""The same faults over frameworks as their documentation recommends them, and with holdfast."""
