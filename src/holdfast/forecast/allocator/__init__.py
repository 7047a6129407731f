"""Simulate torch's caching allocator.

`replay.replay` plays a trace through `caching.CachingAllocator`. Read `caching`, then `replay`.
"""
