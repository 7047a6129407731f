"""Iterable datasets.

- `stream`: the batches of a stream, distributed among workers and ranks.
- `items`: the items of a stream, each with its own random numbers, and how the stream resumes.
- `sharding`: whether a dataset itself divides its items among workers or ranks.
"""
