"""Which findings explain others, so that one mistake is reported once.

A symptom that another finding explains is reported last, as a note: a run that learns nothing looks
the same whatever the reason. Among symptoms the earlier one explains the later: first the loss,
then its gradient, then the weights, then the lack of progress.
"""

from __future__ import annotations

from collections.abc import Mapping

# The optimizer does not receive the gradient of the loss, or it maximises the loss.
WRONG_GRADIENT = frozenset({"H811", "H817", "H831", "H840", "H859"})
# The loss receives arguments that it does not accept.
WRONG_ARGUMENTS = frozenset({"H836", "H837", "H838", "H839", "H855"})
# Weights receive no usable gradient.
NOTHING_LEARNS = frozenset({"H808", "H809", "H810", "H812", "H813", "H814", "H822"})

CAUSES_OF_NONFINITE = WRONG_GRADIENT | {"H806", "H825", "H839", "H848"}
CAUSES_OF_LOST_GRADIENT = WRONG_GRADIENT | WRONG_ARGUMENTS | {"H822", "H843", "H856"}
CAUSES_OF_NO_PROGRESS = (
    WRONG_GRADIENT
    | WRONG_ARGUMENTS
    | NOTHING_LEARNS
    | {"H801", "H802", "H806", "H819", "H820", "H825", "H841", "H842", "H843", "H848", "H854"}
)

# For each rule, the rules whose findings explain it.
EXPLAINED_BY: Mapping[str, frozenset[str]] = {
    "H801": CAUSES_OF_NONFINITE,
    "H802": CAUSES_OF_NONFINITE | {"H801"},
    "H804": CAUSES_OF_NONFINITE | {"H801", "H802"},
    "H808": frozenset({"H809", "H810", "H812"}),
    "H812": frozenset({"H809"}),
    "H813": frozenset({"H809", "H810"}),
    "H814": frozenset({"H813"}),
    "H815": CAUSES_OF_LOST_GRADIENT | {"H825"},
    "H819": frozenset({"H820", "H854"}),
    "H824": CAUSES_OF_NO_PROGRESS,
    "H825": WRONG_GRADIENT | {"H839", "H843", "H855", "H856"},
    "H826": CAUSES_OF_NO_PROGRESS | {"H804", "H824", "H856", "H858"},
    "H828": CAUSES_OF_NO_PROGRESS | {"H804", "H815", "H824", "H826", "H856", "H858"},
    "H839": frozenset({"H842"}),
    "H848": CAUSES_OF_LOST_GRADIENT | {"H815"},
}
