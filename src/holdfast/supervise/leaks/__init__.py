"""Find memory leaks: detect growing memory from outside the process, find its cause inside.

The package has two parts, neither of which imports torch:

- In the supervisor, ``trends`` applies a slope test (``growth``) to the memory readings of each
  trainer. If a trainer leaks memory, ``trends`` requests a trace from it.
- In the trainer, ``tracer`` scans all objects over a few steps. ``census`` finds the objects that
  grow in every scan, ``references`` and ``holder_links`` find the name that holds them, and
  ``source_lines`` finds the line of the script that makes them grow. ``findings`` combines these
  results into leaks to report. ``introspection`` reads objects without calling their code.

Read in this order: ``growth``, ``trends``, ``tracer``, ``census``, ``findings``, then the others.

The descriptions and remedies of leaks are signatures in ``explain/signatures/leaks.yaml``.
``holdfast.memory`` deals with memory that a step needs only temporarily.
"""
