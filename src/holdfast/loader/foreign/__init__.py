"""Support for other libraries' loaders, such as torch's own ``DataLoader``.

- `promises`: whether a run that resumes with such a loader gets exactly the same batches.
- `carried_state`: finds the state that a loader carries from epoch to epoch, for checkpoints.
- `torch_workers`: restores the order of an epoch, which torch's persistent workers affect.
"""
