"""Read iterable datasets.

- `stream`: divides the batches of a stream among workers and ranks.
- `items`: reads the items of a stream, each with its own random numbers, starting at any item.
- `sharding`: detects whether a dataset divides its items among workers or ranks itself.
"""
