"""Does `watch` say why a run does not learn? Programs with and without a planted fault, and their
evaluation.

The rules may be tuned on the set `design`, a program for each kind of fault, and healthy ones.
`held_out_2` and `held_out_3` are by other authors, who had not seen the rules' code. By their
results fourteen rules were removed, two are only reported on request, and H824, H825 and H848 were
narrowed; so they are no longer unseen, and what the remaining rules are worth has to be measured on
new programs.

`unseen_1` was written after that, by an author who had seen neither the rules nor the other sets.

`unseen_2` was written without the rules too. The ids of its faulty programs were added afterwards,
from the descriptions of the rules, and as the other sets do it, without a run under the watch. Then
it was run once, and no rule was changed because of it.
"""
