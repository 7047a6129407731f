"""Iterable datasets.

- `stream`: the batches of a stream, dealt out to workers and ranks.
- `items`: the items of a stream, each with its own random numbers, and its position.
- `sharding`: whether a dataset divides its items itself.
"""
