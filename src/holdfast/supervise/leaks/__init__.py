"""Memory that grows without end: noticed from outside, explained from inside.

Two halves work together, and neither imports torch:

- The supervisor follows the samples of the trainers (``trends``) with a slope test (``growth``).
When
  memory leaks, it requests a trace from the process.
- The process then looks at all its objects over a few steps (``tracer``): what grows each time
  (``census``), who holds it (``references``), and which line of the script makes it grow
  (``source_lines``). ``findings`` combines these into events; ``introspection`` reads objects
  without calling their code. The tracer is given torch as the script has imported it.

Read in this order: ``growth``, ``trends``, ``tracer``, ``census``, ``findings``, and then the
others.

What is elsewhere: the texts and remedies of leaks are signatures, which are data of ``explain``
(``explain/signatures/leaks.yaml``). Memory that a step needs, as opposed to keeps, is the business
of ``holdfast.memory``.
"""
