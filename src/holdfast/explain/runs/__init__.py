"""What a run directory holds, read into facts."""
