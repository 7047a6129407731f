"""The black box: what happened is in files that outlive the process. No torch.

``ring`` is the file format: fixed-size records in a mapped file, which survive SIGKILL. On top of
it are ``black_box`` (steps and events of a guard), ``progress`` (the phase and the steps of an
observed process) and ``scalars`` (numbers that a script logs). ``history`` keeps a summary of the
steps that a ring has overwritten; it is the only module that needs numpy.

``reader`` reads a recording, ``following`` reads only what is new since the last look, and
``run_files`` names the files of a run. ``start`` describes what a run was started with.
"""
