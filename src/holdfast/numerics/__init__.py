"""Values of losses and gradients: are they finite, how large are they, and what went wrong.

Read in this order:

- ``loss``: what a loss function may return.
- ``gradients``: norms, the one finite check of a step, and clipping.
- ``nonfinite``, ``spikes``: what to do about a step with NaN or Inf, and about one that stands out.
- ``provenance``: which operation made the first NaN or Inf. It reads what ``tracer`` recorded, and
  puts it into words by ``mechanisms``; ``operands`` measures one tensor.
- ``bad_samples``: which samples of a batch are to blame.
- ``eager``: run compiled modules as they are written, for a replay.
"""
