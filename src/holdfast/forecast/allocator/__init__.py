"""Simulate torch's caching allocator.

`replay.replay` replays a trace with `caching.CachingAllocator`. Read `caching` first.
"""
