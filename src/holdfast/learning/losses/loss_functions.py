"""The torch loss functions that the diagnosis knows, grouped by the arguments they take."""

from __future__ import annotations

# These apply a softmax or a sigmoid themselves, and take unbounded scores.
SCORE_LOSSES = ("cross_entropy", "binary_cross_entropy_with_logits")
REGRESSION_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
# The targets of these are class labels.
CLASS_LOSSES = ("cross_entropy", "nll_loss")
# The targets of these are probabilities, mostly 0 or 1.
BINARY_LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
# These compare a prediction with a target, their first two arguments.
TARGET_LOSSES = (*SCORE_LOSSES, *REGRESSION_LOSSES, "nll_loss", "binary_cross_entropy", "kl_div")
# The targets of these are 1 and -1. Maps the name to the position of the target among the
# arguments.
SIGNED_TARGET_LOSSES = {
    "cosine_embedding_loss": 2,
    "margin_ranking_loss": 2,
    "hinge_embedding_loss": 1,
    "soft_margin_loss": 1,
}
