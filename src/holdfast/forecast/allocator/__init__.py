"""torch's caching allocator, simulated."""
