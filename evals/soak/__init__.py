"""Hours of training with faults, in pieces that add up."""
