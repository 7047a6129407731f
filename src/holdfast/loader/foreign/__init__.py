"""Support for other libraries' loaders, such as torch's own ``DataLoader``.

- `promises`: determines whether a run that resumes with such a loader gets the same batches.
- `carried_state`: finds the state that a loader carries from epoch to epoch, so that it can be
  saved in checkpoints.
- `torch_workers`: restores the order of an epoch if torch's persistent workers affect it.
"""
