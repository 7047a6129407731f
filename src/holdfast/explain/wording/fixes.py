"""Choose the fix that a verdict recommends: that of the signature, or a more specific one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from holdfast.core.text import capitalized
from holdfast.explain import observations
from holdfast.explain.evidence import Evidence
from holdfast.explain.signatures import ids
from holdfast.explain.wording.judgement import Judgement

FIX_FOR_NONFINITE_FIRST_LOSS = (
    "Train a few steps in float32 without autocast: if the loss is finite then, use bfloat16, or"
    " keep the operation that overflows in float32. If it is not, check the first batch for NaN,"
    " empty targets and unscaled inputs, the loaded weights for NaN, and the model for a softmax"
    " over a row that is masked completely. A learning rate is to blame only if the loss of the"
    " very first step is finite."
)
# The fix for a save that the Guard refused because of NaN or Inf. A save that failed for another
# reason needs a different fix.
_FIX_OF_NONFINITE_STATE = (
    "Find the origin of the NaN or Inf with `holdfast events RUN --kind nonfinite_origin`, and"
    " check the loss before it. Then resume from the newest checkpoint with a lower learning rate,"
    " or without the samples that caused it."
)

FixRule: TypeAlias = Callable[[Judgement], str | None]


def choose_fix(judgement: Judgement) -> str:
    """Return the fix of the first rule that applies, or the signature's fix if none does."""
    for rule in RULES:
        fix = rule(judgement)
        if fix is not None:
            return fix
    return judgement.signature.fix


def fix_for_a_loss_that_did_not_fall(judgement: Judgement) -> str | None:
    """Return the signature's fix, even if memory grew or a Guard found something else."""
    if judgement.signature.id != ids.NOT_LEARNED:
        return None
    return judgement.signature.fix


def fix_for_a_slow_run(judgement: Judgement) -> str | None:
    """Return the fix of the finding that says why the run was slow, which contains numbers."""
    for finding in judgement.evidence.speed:
        if finding.rule == judgement.signature.id:
            return finding.fix
    return None


def fix_for_nonfinite_first_loss(judgement: Judgement) -> str | None:
    """Return the fix for a loss that was not finite from the first step on."""
    return FIX_FOR_NONFINITE_FIRST_LOSS if judgement.never_had_a_finite_loss else None


def fix_for_a_refused_save(judgement: Judgement) -> str | None:
    """Return how to find the NaN or Inf because of which a Guard refused to save."""
    unsaved = observations.unsaved_steps(judgement.evidence)
    is_not_saved = judgement.signature.id == ids.NOT_SAVED
    if not is_not_saved or unsaved is None or not unsaved.was_refused:
        return None
    return _fix_of_training_fault(judgement.evidence) or _FIX_OF_NONFINITE_STATE


def fix_for_a_leak(judgement: Judgement) -> str | None:
    """Return the fix that names the place at which memory is kept alive, if a leak was traced."""
    leak = judgement.leak
    rest = judgement.signature.fix
    if judgement.is_good_end:
        leak = observations.newest_leak(judgement.evidence)
        rest = "A longer run would run out of memory."
    place = observations.leak_place(leak) if leak is not None else ""
    if not place:
        return None
    words = f"Look first at {place}, where memory is kept alive from step to step."
    return f"{words} {rest}".strip()


def fix_for_a_training_fault(judgement: Judgement) -> str | None:
    """Return the fix for a fault that a Guard found in a run that ended well."""
    if not judgement.is_good_end:
        return None
    return _fix_of_training_fault(judgement.evidence) or None


# The most specific fix comes first.
RULES: tuple[FixRule, ...] = (
    fix_for_a_loss_that_did_not_fall,
    fix_for_a_slow_run,
    fix_for_nonfinite_first_loss,
    fix_for_a_refused_save,
    fix_for_a_leak,
    fix_for_a_training_fault,
)


def _fix_of_training_fault(evidence: Evidence) -> str:
    """Return the fix for the most important training fault that a Guard found, or ""."""
    faults = observations.training_faults(evidence)
    if not faults:
        return ""
    reference = f"`holdfast explain {faults[0].data['rule']}` explains the rule."
    fix = faults[0].data.get("fix")
    if not isinstance(fix, str) or not fix.strip():
        return reference
    words = " ".join(fix.split()).rstrip(".")
    return f"{capitalized(words)}. {reference}"
