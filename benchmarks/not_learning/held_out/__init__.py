"""Programs that no threshold was tuned on, written without a look at the rules or at the design set.

`healthy` and `faulty` each list `PROGRAMS`; `verify` shows that the first learn and that the second do worse than the
same program with its fault mended. Whoever tunes a rule never opens this folder.
"""
