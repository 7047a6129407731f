"""Record one training step, attribute its memory, and scale it to any batch size.

Read in this order:

1. `events`: a `Trace`, which is the record of a step. It lists allocations and frees, and who owns
   the memory.
2. `tracer`: records a step. It uses `storages` (which memory is alive), `attribution` (the module
   and line of user code of an operation), `operations` (the cost of an operation) and `recording`
   (the raw record and its conversion to a trace).
3. `extrapolation`: computes the trace at any micro-batch size from traces at two sizes.
4. `accumulation`: computes the trace of a step with several micro-batches.
"""
