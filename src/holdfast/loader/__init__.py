"""Load samples in a reproducible order and with reproducible random numbers.

Entry points:

- `loader.DataLoader`: a drop-in for torch's loader that resumes exactly.
- `splitting`: splits a batch into micro-batches.
- `random_state`: captures and restores the random state of the process.
- `foreign`: determines whether a run can resume exactly with another library's loader, and finds
  the state that such a loader carries from epoch to epoch.

Contents:

- `loader`, `arguments`, `epoch`, `position`: the loader, its arguments, the iterator over the
  batches of an epoch, and the loader's position in the data.
- `order`: the order of the samples in an epoch, and how they are grouped into batches. **How a
  resume restores the order:** `order/orders.py` computes the order from (seed, epoch), so a resume
  only needs the position in the epoch. If the user passes a sampler, `order/sampler_order.py` draws
  the order from it; its docstring explains how the sampler's state is restored.
- `workers`: makes batches in worker processes. **How a lost worker is replaced:**
  `workers/recovery.py` detects the loss and starts new workers. Before it starts them, it may
  reduce the number of workers or quarantine a sample, as the table in `workers/remedies.py`
  determines.
- `streams`: iterable datasets.
- `samplers`: finds the samplers of any loader.
- `quarantine`: the ledger of samples that are skipped because they cannot be read.
- `seeds`: the seed of each sample.
- `machine`: warns if the machine has too few resources for the workers.
- `device`: copies batches to an accelerator.
- `signalled`: recognizes exceptions that were raised by signal handlers.

Read `loader` first, then `order.batches`, then `workers` in the order given in its docstring.
"""
