"""The live view (`holdfast watch`): poll the recordings of runs, and draw them in a terminal.

``watching.Watched`` polls one run, and ``watching.Runs`` all runs in a directory; ``run_state``
decides whether a run has ended, and ``outlook`` how far along it is. ``view`` draws what was seen.
"""
