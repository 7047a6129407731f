"""What an attempt may change, kept at the beginning of a step so that it can be put back."""
