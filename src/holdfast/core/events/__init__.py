"""What happens in a run: one class for each kind of event."""
