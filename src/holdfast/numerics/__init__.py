"""Check losses and gradients for NaN, Inf and spikes, and find out where NaN and Inf come from.

Read the modules in this order:

- ``loss``: check the result of a loss function.
- ``gradients``: compute gradient norms, check a step for NaN and Inf, and clip gradients.
- ``spikes``: detect spikes and divergence, by comparing each step with ``usual_values``.
- ``decisions``: decide what to do about a step with NaN or Inf, or a spike.
- ``provenance``: find the operation that produced the first NaN or Inf. It replays the step under
  ``tracer``, which records all operations that returned NaN or Inf, and walks back from the loss or
  gradient to the first of them. ``mechanisms`` explains in words how that operation produced NaN or
  Inf, based on the tensor statistics from ``operands``.
- ``bad_samples``: find the samples of a batch that cause NaN or Inf.
- ``eager``: detect compiled or traced code, and run compiled modules eagerly in a replay.
"""
