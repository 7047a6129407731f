"""The black box: record events and steps in files that outlive the process. No torch.

``ring`` is the file format: fixed-size records in a memory-mapped file, which survive SIGKILL.
Three modules write this format: ``black_box`` (steps and events of a guard), ``progress`` (phase
and steps of an observed process) and ``scalars`` (numbers that a script logs). ``history`` keeps a
summary of the steps that a ring has overwritten; it is the only module that needs numpy.

``reader`` reads a recording, ``following`` reads only the records added since its last call, and
``run_files`` defines the files of a run. ``start`` describes how a run was started.
"""
