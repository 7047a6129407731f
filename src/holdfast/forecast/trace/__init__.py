"""Record one training step, attribute its memory, and scale it to another size.

A step is a `events.Trace`: allocations and frees in order, with owner, module and line. `tracer`
records one, `extrapolation` scales it to any size, and `accumulation` splits its batch into
micro-batches.

Read `events`, then `tracer` with its parts `storages` (what is alive), `attribution` (where an
operation belongs), `operations` (what it costs) and `recording` (the raw record), then
`extrapolation` and `accumulation`.
"""
