"""The live view (`holdfast watch`): poll the recordings of runs and draw them in a terminal.

``watching.Watched`` polls one run, and ``watching.Runs`` polls all runs in a directory.
``recent_records`` stores the newest records. ``step_numbers`` and ``outlook`` compute the speed and
the progress of a run, and ``run_state`` decides whether the run has ended. ``view`` draws the
snapshots, using the tables from ``tables``. For a run that has ended, it also shows the verdict.
"""
