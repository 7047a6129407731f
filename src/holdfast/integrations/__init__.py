"""Guarded training inside the frameworks that people already use.

In each of them the framework keeps its loop, and each of its optimizer steps becomes a transaction
of a guard: it survives out-of-memory errors, and a step with NaN or Inf is skipped.

- ``transformers``: `HoldfastTrainer`, or `HoldfastMixin` in front of any other Trainer.
- ``lightning``: `HoldfastStrategy` and `HoldfastDDPStrategy`.
- ``speechbrain``: `HoldfastMixin` in front of ``sb.Brain``.
- ``accelerate``: `accelerate_guard`, which returns a guard of what ``prepare`` has returned.

Import the one that you use. Nothing is imported here, since a framework may not be installed.

Read in this order: ``refusals`` (which settings cannot be guarded), ``hosting`` (a guard inside a
framework's loop, and its part of the framework's checkpoints), ``saving`` (checkpoints that are
sealed and verified), then one framework. These three modules are shared, and know no framework.
"""
