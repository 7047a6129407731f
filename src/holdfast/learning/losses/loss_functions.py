"""The torch loss functions that the diagnosis knows, grouped by the kind of their arguments."""

from __future__ import annotations

# Losses that expect unbounded scores and apply a softmax or a sigmoid to them.
SCORE_LOSSES = ("cross_entropy", "binary_cross_entropy_with_logits")
REGRESSION_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
# Losses whose targets are class labels.
CLASS_LOSSES = ("cross_entropy", "nll_loss")
# Losses whose targets are probabilities, usually 0 or 1.
BINARY_LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
# Losses that compare their first two arguments, a prediction and a target.
TARGET_LOSSES = (*SCORE_LOSSES, *REGRESSION_LOSSES, "nll_loss", "binary_cross_entropy", "kl_div")
# Losses whose targets are 1 and -1, each with the position of the target argument.
SIGNED_TARGET_LOSSES = {
    "cosine_embedding_loss": 2,
    "margin_ranking_loss": 2,
    "hinge_embedding_loss": 1,
    "soft_margin_loss": 1,
}
