"""Worker processes: how they are started, watched and replaced.

How a lost worker is replaced: `recovery` (the loop that notices a loss and starts the next pool)
and `remedies` (the table of what changes before that).

Read in this order:

1. `report` and `fetch`: how a worker makes one batch, and what it reports.
2. `map_source`: which batches remain, and which sample a worker was reading.
3. `pool`: one set of workers behind torch's loader.
4. `watch` and `board`: how dead, stopped and stuck workers are found.
5. `recovery` and `remedies`: how they are replaced.
6. `processes`, `child_signals` and `ending`: processes and signals.
"""
