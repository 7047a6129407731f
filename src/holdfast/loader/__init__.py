"""Samples: their order, their random numbers, and the workers that load them.

Entry points:

- `loader.DataLoader`: a drop-in for torch's loader that resumes exactly.
- `splitting`: cuts a batch into micro-batches.
- `random_state`: captures and restores the random state of the process.
- `foreign`: loaders that are not holdfast's: what a resume can promise for one, and what it carries
  from epoch to epoch.

Where things are:

- `loader`, `arguments`, `epoch`, `position`: the loader, its arguments, the iterator over the
  batches of an epoch, and where it is in the data.
- `order`: which sample is at which position of an epoch, and in which batch.
- `workers`: how batches are made in worker processes. **How a lost worker is replaced:**
  `workers/recovery.py` notices the loss and starts new workers; what changes before that, such as
  fewer workers or a quarantined sample, is the table in `workers/remedies.py`.
- `streams`: iterable datasets.
- `samplers`: the samplers of any loader.
- `quarantine`: the samples that are left out because they cannot be read.
- `seeds`, `random_state`: where the random numbers of samples and batches come from.
- `machine`, `device`, `signalled`: what the machine has room for, the copy to an accelerator, and
  exceptions of signal handlers.

Read `loader` first, then `order.batches`, then `workers` in the order that its docstring names.
"""
