"""Bytes: recognise out-of-memory, give memory back, and decide what to try next."""
