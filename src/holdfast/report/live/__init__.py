"""The live view (`holdfast watch`): poll the recordings of runs and draw them in a terminal.

``watching.Watched`` polls one run, and ``watching.Runs`` polls all runs in a directory.
``recent_records`` stores the newest records. ``step_numbers`` and ``outlook`` compute the speed and
the progress of a run, and ``run_state`` decides whether it has ended. ``view`` draws the result
with ``tables``. For a run that has ended, it also shows the verdict.
"""
