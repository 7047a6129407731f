"""Start, watch and replace worker processes.

Two modules replace lost workers: `recovery` contains the loop that detects a loss and starts the
next pool, and `remedies` contains the table that determines what to change before that.

Read the modules in this order:

1. `report` and `fetch`: make a batch in a worker, and report problems.
2. `map_source`: keeps track of the remaining batches and of the samples that workers are reading.
3. `pool`: runs one set of workers through torch's loader.
4. `watch` and `board`: detect dead, stopped and stuck workers.
5. `recovery` and `remedies`: replace lost workers.
6. `processes`, `child_signals` and `ending`: start and kill processes, and handle signals.
"""
