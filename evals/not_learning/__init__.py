"""Does `watch` say why a run does not learn? Programs with and without a planted fault, and their
evaluation.

The rules may be tuned on the set `design`, a program for each kind of fault, and healthy ones.
`held_out_2` is by another author, who had not seen the rules' code; nobody who changes rules looks
at it. The set before it, after whose first look rules were changed, is gone.
"""
