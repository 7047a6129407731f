"""Which steps are sampled, which of them are examined closely, and when a run is judged."""

from __future__ import annotations

from dataclasses import dataclass

# Steps after which a run is judged as a whole for the first time.
FIRST_WINDOW_STEPS = 400
# With a known length of the run it is judged as a whole this often, but not before these steps.
WINDOWS_PER_RUN = 5
FEWEST_STEPS_FOR_A_WINDOW = 200
# Sampled rounds after which contracts are judged: these, and every so many.
JUDGED_ROUNDS = (1, 3, 8, 10)
JUDGED_EVERY_ROUNDS = 20
# Multiplicative hashing, Knuth, The Art of Computer Programming, volume 3, section 6.4.
HASH_MULTIPLIER = 2_654_435_761
HASH_RANGE = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many steps are looked at.

    Args:
        first_rounds: All of these, counted in rounds of all optimizers.
        one_in: Then one in so many, until the first window ends.
        later_one_in: After that, one in so many.
    """

    first_rounds: int
    one_in: int
    later_one_in: int


# Losses, their targets and gradients.
SAMPLED = Schedule(first_rounds=8, one_in=12, later_one_in=80)
# Also layers, weights, inputs and the arguments of losses.
EXAMINED = Schedule(first_rounds=6, one_in=40, later_one_in=160)


def is_in_schedule(step: int, optimizers: int, schedule: Schedule) -> bool:
    """Return whether a step is looked at: all of the first rounds, then some at no fixed distance.

    What is examined is also sampled.

    Args:
        step: Number of the step, of all optimizers together.
        optimizers: How many there are; their steps are one round.
        schedule: `SAMPLED` or `EXAMINED`.
    """
    round_number = step // max(1, optimizers)
    if round_number < schedule.first_rounds:
        return True
    one_in = schedule.one_in if round_number < FIRST_WINDOW_STEPS else schedule.later_one_in
    # Two rounds in a row, so that what a step leads to is seen too.
    pair = round_number // 2
    # A hash instead of every tenth step: it cannot fall into step with epochs, it draws no random
    # number, and what is chosen once in 40 steps is also chosen once in 12.
    return pair * HASH_MULTIPLIER % HASH_RANGE < HASH_RANGE // one_in


def is_end_of_window(steps: int, total_steps: int | None) -> bool:
    """Return whether a run is to be judged as a whole after a step.

    Without a known length that is after 400, 800, 1600, ... steps.
    """
    if total_steps is not None:
        between = max(1, total_steps // WINDOWS_PER_RUN)
        return steps >= FEWEST_STEPS_FOR_A_WINDOW and steps % between == 0
    windows, rest = divmod(steps, FIRST_WINDOW_STEPS)
    return rest == 0 and windows.bit_count() == 1


def is_judged_after(sampled_steps: int, optimizers: int) -> bool:
    """Return whether contracts are to be judged after so many sampled steps."""
    rounds = sampled_steps / max(1, optimizers)
    return rounds in JUDGED_ROUNDS or rounds % JUDGED_EVERY_ROUNDS == 0
