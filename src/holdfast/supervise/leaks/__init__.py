"""Find memory leaks: notice them from outside the process, explain them from inside.

There are two halves, neither of which imports torch:

- The supervisor follows the samples of the trainers (``trends``) with a slope test (``growth``).
  When memory leaks, it requests a trace from the process.
- The process then examines all its objects over a few steps (``tracer``): what grows every time
  (``census``), what holds it (``references`` and ``holder_links``), and which line of the script
  makes it grow (``source_lines``). ``findings`` combines these into leaks to report;
  ``introspection`` reads objects without calling their code.

Read in this order: ``growth``, ``trends``, ``tracer``, ``census``, ``findings``, and then the
others.

Not here: the texts and remedies of leaks are signatures in ``explain/signatures/leaks.yaml``.
Memory that a step needs only temporarily is the subject of ``holdfast.memory``.
"""
