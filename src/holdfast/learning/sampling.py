"""Decide which steps are sampled, which are examined in detail, and when rules are applied."""

from __future__ import annotations

from dataclasses import dataclass

# Window rules are first applied after this many steps.
FIRST_WINDOW_STEPS = 400
# In a run of known length, window rules are applied this many times, but never before the minimum
# number of steps.
WINDOWS_PER_RUN = 5
MIN_STEPS_FOR_A_WINDOW = 200
# Contract rules are applied after these numbers of sampled rounds, and then at this interval. In a
# round, every optimizer steps once.
JUDGED_ROUNDS = (1, 3, 8, 10)
JUDGED_EVERY_ROUNDS = 20
# Constants for multiplicative hashing (Knuth, The Art of Computer Programming, volume 3, section
# 6.4).
HASH_MULTIPLIER = 2_654_435_761
HASH_RANGE = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDensity:
    """Determines how often steps are selected. In a round, every optimizer steps once.

    Args:
        first_rounds: Number of rounds at the start of the run, all of which are selected.
        one_in: After the first rounds, about one in `one_in` rounds is selected, until the first
            window ends.
        later_one_in: After the first window, about one in `later_one_in` rounds is selected.
    """

    first_rounds: int
    one_in: int
    later_one_in: int


# In sampled steps, losses, targets and gradients are recorded.
SAMPLED = SamplingDensity(first_rounds=8, one_in=12, later_one_in=80)
# In examined steps, layers, weights, inputs and the arguments of losses are also recorded.
EXAMINED = SamplingDensity(first_rounds=6, one_in=40, later_one_in=160)


def is_selected(step: int, optimizers: int, density: SamplingDensity) -> bool:
    """Return whether a step is selected at a given density.

    All of the first rounds are selected, followed by an irregular subset of the later ones. Every
    step that is selected by `EXAMINED` is also selected by `SAMPLED`.

    Args:
        step: Number of the step, counting the steps of all optimizers.
        optimizers: Number of optimizers.
        density: `SAMPLED` or `EXAMINED`.
    """
    round_number = step // max(1, optimizers)
    if round_number < density.first_rounds:
        return True
    one_in = density.one_in if round_number < FIRST_WINDOW_STEPS else density.later_one_in
    # Select rounds in pairs, so that the effect of the first one is visible in the second.
    pair = round_number // 2
    # Unlike selecting every n-th step, selecting by a hash cannot align with epochs. It draws no
    # random numbers, and a pair that is selected at one in 40 is also selected at one in 12.
    return pair * HASH_MULTIPLIER % HASH_RANGE < HASH_RANGE // one_in


def is_end_of_window(steps: int, total_steps: int | None) -> bool:
    """Return whether window rules should be applied after this number of steps.

    In a run of unknown length, window rules are applied after 400, 800, 1600, ... steps.
    """
    if total_steps is not None:
        between = max(1, total_steps // WINDOWS_PER_RUN)
        return steps >= MIN_STEPS_FOR_A_WINDOW and steps % between == 0
    windows, rest = divmod(steps, FIRST_WINDOW_STEPS)
    # A number with a single 1 bit is a power of two.
    return rest == 0 and windows.bit_count() == 1


def is_judged_after(sampled_steps: int, optimizers: int) -> bool:
    """Return whether contract rules should be applied after this number of sampled steps."""
    rounds = sampled_steps / max(1, optimizers)
    return rounds in JUDGED_ROUNDS or rounds % JUDGED_EVERY_ROUNDS == 0
