"""The live view (`holdfast watch`): poll the recordings of runs, and draw them in a terminal.

``watching.Watched`` polls one run, and ``watching.Runs`` all runs in a directory.
``recent_records`` keeps what was read; ``step_numbers`` and ``outlook`` say how fast a run is and
how far along, and ``run_state`` decides whether it has ended. ``view`` draws the result with
``tables``; for a run that has ended, that includes the verdict.
"""
