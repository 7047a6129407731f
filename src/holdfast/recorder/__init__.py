"""The black box: record events and steps in files that outlive the process, without using torch.

``ring`` implements the file format: fixed-size records in a memory-mapped file, which survive
SIGKILL. Three modules write this format: ``black_box`` (a Guard's steps and events), ``progress``
(an observed process's phase and steps) and ``scalars`` (numbers that a script logs). ``history``
keeps a summary of the steps that were overwritten in a ring; it is the only module that needs
numpy.

``reader`` reads a whole recording, ``following`` reads only the records added since its last call,
and ``run_files`` defines the files of a run. ``start`` describes how a run was started.
"""
