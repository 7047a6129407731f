"""Choose the series of a record that is the training loss, by its name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.explain.logs.printed_values import names_an_evaluation

# Names that can only mean the training loss, the most usual first.
_PLAIN_NAMES = (
    "loss",
    "train/loss",
    "train_loss",
    "train_loss_step",
    "train_loss_epoch",
    "loss/train",
    "training_loss",
    "train/train_loss",
)
_PLAIN_NORM_NAMES = ("grad_norm", "train/grad_norm", "gradient_norm", "train/gradient_norm")
_LOSS = re.compile(r"loss|(?:^|[/_. -])err[dg]?(?:$|[/_. -])", re.IGNORECASE)
_LOSS_OF_TRAINING = re.compile(r"(?:^|[^a-z])train(?:ing)?(?![a-z])", re.IGNORECASE)
_TOTAL = re.compile(r"(?:^|[^a-z])(?:total|overall|sum)(?![a-z])", re.IGNORECASE)
# The losses of a generator and a discriminator work against each other.
_ADVERSARIAL = re.compile(
    r"(?:^|[/_. -])(?:g|gen|generator|d|disc|discriminator|critic|adv|adversarial|gan)[/_. -]?"
    r"loss|loss(?:es)?[/_. -](?:g|gen|generator|d|disc|discriminator|critic|adv|adversarial|gan)"
    r"(?:$|[/_. -])|(?:^|[/_. -])err[dg](?:$|[/_. -])",
    re.IGNORECASE,
)
# Metrics of a policy that is trained by reward. DPO, whose loss should fall, logs `rewards/chosen`.
_BY_REWARD = re.compile(
    r"(?:^|[/_. -])(?:reward|mean_reward|ep_rew_mean|ep_return|episodic_return|episode_reward"
    r"|episode_return|score_reward|(?:policy|actor|pg|policy_gradient|value|entropy)_loss)"
    r"(?:$|[/_. -])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLoss:
    """The series that is judged.

    Attributes:
        name: The name under which it was logged.
        kind: "training", or "evaluation" if the record has no other loss.
        others: The other losses that could have been meant.
    """

    name: str
    kind: Literal["training", "evaluation"]
    others: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Return whether the name can only mean the training loss."""
        return self.name.lower() in _PLAIN_NAMES


def choose_loss(names: Sequence[str]) -> ChosenLoss | None:
    """Return the series that is the training loss, or None if no name contains "loss".

    Args:
        names: The names of all series that have values.
    """
    for plain in _PLAIN_NAMES:
        for name in names:
            if name.lower() == plain:
                return ChosenLoss(name=name, kind="training")
    losses = [name for name in names if _LOSS.search(name)]
    of_training = [name for name in losses if not names_an_evaluation(name)]
    candidates = of_training or losses
    if not candidates:
        return None
    # If several are left, the sum of all losses is meant rather than one of its parts.
    ordered = sorted(
        candidates,
        key=lambda name: (
            _TOTAL.search(name) is None,
            _LOSS_OF_TRAINING.search(name) is None,
            len(name),
            name,
        ),
    )
    return ChosenLoss(
        name=ordered[0],
        kind="training" if of_training else "evaluation",
        others=tuple(ordered[1:]),
    )


def choose_norm(names: Collection[str]) -> str | None:
    """Return the series that is the norm of all gradients before clipping, or None."""
    for plain in _PLAIN_NORM_NAMES:
        for name in names:
            if name.lower() == plain:
                return name
    return None


def why_loss_is_no_measure(names: Collection[str]) -> str:
    """Return why the loss does not measure progress, as a clause, or "" if it may do so."""
    adversarial = [name for name in names if _ADVERSARIAL.search(name)]
    if adversarial:
        return f"the losses of a GAN work against each other ({adversarial[0]!r} was logged)"
    rewards = [name for name in names if _BY_REWARD.search(name)]
    if rewards:
        return (
            "the loss of a policy that is trained by reward does not measure its progress"
            f" ({rewards[0]!r} was logged)"
        )
    return ""
