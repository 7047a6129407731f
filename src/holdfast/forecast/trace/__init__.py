"""Record one training step, attribute its memory, and scale it to any batch size.

Read in this order:

1. `events`: defines `Trace`, the record of a step. It lists the allocations, the frees and the
   owner of each storage.
2. `tracer`: records a step. It uses `storages` (which memory is alive), `attribution` (which module
   and line of user code run an operation), `operations` (the cost of an operation) and `recording`
   (the raw record and its conversion to a trace).
3. `extrapolation`: computes the trace at any micro-batch size from traces at two sizes.
4. `accumulation`: computes the trace of a step with several micro-batches.
"""
