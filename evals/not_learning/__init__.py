"""Does `watch` say why a run does not learn? Programs with and without a planted fault, and their evaluation.

The rules may be tuned on the set `design`, a program for each kind of fault, and healthy ones; they were changed
after a first look at `held_out`. `held_out_2` is by another author, who had not seen the rules' code; nobody who
changes rules looks at it.
"""
