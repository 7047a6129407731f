"""Gathering a run for a checkpoint, writing it, and copies in host memory."""
