"""Guarded training inside popular training frameworks.

The framework keeps its own loop, and a guard runs each of the framework's optimizer steps as a
transaction: the step survives out-of-memory errors, and is skipped if it yields NaN or Inf.

- ``transformers``: `HoldfastTrainer`, or `HoldfastMixin` for any other Trainer class.
- ``lightning``: `HoldfastStrategy` and `HoldfastDDPStrategy`.
- ``speechbrain``: `HoldfastMixin` for subclasses of ``sb.Brain``.
- ``accelerate``: `accelerate_guard`, which returns a guard for objects prepared by an
  ``Accelerator``.

Import your framework's module directly. This package imports none of them, since the frameworks
are optional dependencies.

Start reading with the three modules that all frameworks share: ``refusals`` (settings that cannot
be guarded), ``hosting`` (opening a guard inside a framework's loop, and the state it adds to the
framework's checkpoints) and ``saving`` (sealing and verifying checkpoints). Then read one
framework.
"""
