"""Samples: their order, their random numbers, and the workers that load them.

Entry points:

- `loader.DataLoader`: a drop-in for torch's loader that resumes exactly.
- `splitting`: cuts a batch into micro-batches.
- `random_state`: captures and restores the random state of the process.
- `foreign`: loaders of other libraries: what a resume can promise for one, and the state that it
  carries from epoch to epoch.

Where things are:

- `loader`, `arguments`, `epoch`, `position`: the loader, its arguments, the iterator over the
  batches of an epoch, and the loader's position in the data.
- `order`: which sample is at which position of an epoch, and in which batch. **How the order is
  made and resumed:** it is computed from (seed, epoch) in `order/orders.py`, so a position in the
  epoch is all that a resume needs. The order of the user's own sampler is drawn in
  `order/sampler_order.py`, whose docstring says how its state is restored.
- `workers`: how batches are made in worker processes. **How a lost worker is replaced:**
  `workers/recovery.py` notices the loss and starts new workers; what changes before that, such as
  fewer workers or a quarantined sample, is the table in `workers/remedies.py`.
- `streams`: iterable datasets.
- `samplers`: the samplers of any loader.
- `quarantine`: the ledger of samples that are left out because they cannot be read.
- `seeds`, `random_state`: the seeds of samples, and the random state of the process.
- `machine`, `device`, `signalled`: the limits of the machine, the copy to an accelerator, and
  exceptions raised by signal handlers.

Read `loader` first, then `order.batches`, then `workers` in the order that its docstring names.
"""
