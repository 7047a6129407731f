"""Read a run directory into facts. Nothing here chooses a cause.

Entry point: `attempts.collect_attempt`, for one attempt of a supervised run; ``explain.collecting``
handles the others.

``recordings`` opens a directory and reads its event rings, even damaged ones. What they say is read
by ``supervision`` (why the attempt was started and how it ended), ``observed`` (its processes),
``guard_records`` (remedies, and how Guards ended), ``statements`` (exceptions), ``recorded_steps``
(losses and waiting times) and ``output_sections`` (what it printed). ``divergence`` and
``learning`` judge the losses.
"""
