"""Guarded training inside popular training frameworks.

The framework keeps its own loop, and each of its optimizer steps becomes a transaction of a guard:
it survives out-of-memory errors, and a step with NaN or Inf is skipped.

- ``transformers``: `HoldfastTrainer`, or `HoldfastMixin` for any other Trainer class.
- ``lightning``: `HoldfastStrategy` and `HoldfastDDPStrategy`.
- ``speechbrain``: `HoldfastMixin` for subclasses of ``sb.Brain``.
- ``accelerate``: `accelerate_guard`, which returns a guard for the objects that ``prepare`` has
  returned.

Import the module of your framework. Nothing is imported here, since a framework may not be
installed.

Read in this order: ``refusals`` (which settings cannot be guarded), ``hosting`` (a guard inside a
framework's loop, and its part of the framework's checkpoints), ``saving`` (checkpoints that are
sealed and verified), then one framework. These three modules are shared by all frameworks.
"""
