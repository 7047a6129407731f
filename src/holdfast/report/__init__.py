"""What people look at: drawn from facts that were recorded, never from a live run."""
