"""Loaders of other libraries, such as torch's own ``DataLoader``.

- `promises`: what a resume can promise for such a loader.
- `carried_state`: what it carries from epoch to epoch, so that a checkpoint can hold it.
- `torch_workers`: how torch's persistent workers change the order of an epoch.
"""
