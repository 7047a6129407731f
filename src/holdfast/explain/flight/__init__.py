"""Read the dumps of torch's flight recorder, and find the collective that a rank did not join.

With ``TORCH_NCCL_DUMP_ON_TIMEOUT=1``, each rank writes its newest collectives to a file when one
of them times out. Read in this order:

1. ``plain_pickle``: reads a pickle of plain values, without the module ``pickle``.
2. ``dumps``: finds the files and reads them.
3. ``comparison``: compares the ranks. It reads no files.
4. ``judging``: makes a `FlightFinding` from the result, or a verdict of its own. ``sentences``
   describes the result.
"""
