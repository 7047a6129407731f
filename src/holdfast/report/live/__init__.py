"""The live view (`holdfast watch`): poll the recordings of runs, and draw them in a terminal.

``watching.Watched`` polls one run, and ``watching.Runs`` all runs in a directory. What was read is
kept in ``recent_records``; ``step_numbers`` and ``outlook`` say how fast and how far a run is, and
``run_state`` decides whether it has ended. ``view`` draws what was seen, with ``tables``.
"""
