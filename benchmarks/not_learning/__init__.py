"""Does `watch` say why a run does not learn? Programs with and without a planted fault, and their evaluation.

`design` holds the programs that the rules may be tuned on, `held_out` those that their author never opens.
"""
