"""Check losses and gradients: whether they are finite or spike, and where NaN and Inf come from.

Read in this order:

- ``loss``: what a loss function may return.
- ``gradients``: norms, the one finite check of a step, and clipping.
- ``spikes``: which steps stand out, by comparison with ``usual_values``.
- ``decisions``: what to do about a step with NaN or Inf, or one that stands out.
- ``provenance``: which operation produced the first NaN or Inf. The step is replayed under
  ``tracer``, which records the operations that returned NaN or Inf, and ``provenance`` walks back
  from the loss or gradient to the first of them. ``mechanisms`` explains it in words, and
  ``operands`` measures one tensor.
- ``bad_samples``: which samples of a batch are to blame.
- ``eager``: run compiled modules eagerly, for a replay.
"""
