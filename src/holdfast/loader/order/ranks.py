"""Find this process's rank, and divide the positions of a step among ranks.

The functions of this module do not communicate with other ranks.
"""

from __future__ import annotations

from torch import distributed


def ranks_now(otherwise: tuple[int, int]) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks.

    Args:
        otherwise: The result if ``torch.distributed`` is not initialized.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return otherwise


def rank_positions(
    first: int, length: int, batch_size: int, rank: int, world_size: int, *, drop_last: bool = False
) -> range | None:
    """Return a rank's positions in a step, or None if the epoch has no such step.

    A step takes ``batch_size * world_size`` positions. If fewer positions are left for the last
    step, they are divided among all ranks as evenly as possible. A rank without a batch would take
    no step, and the other ranks would wait for it forever. If fewer positions are left than there
    are ranks, several ranks get the same position.

    Args:
        first: Position at which the step begins.
        length: Number of positions in the epoch.
        batch_size: Number of positions per rank.
        rank: The rank.
        world_size: Number of ranks.
        drop_last: Whether to drop an incomplete last step.
    """
    remaining = min(length - first, batch_size * world_size)
    if remaining <= 0 or (drop_last and remaining < batch_size * world_size):
        return None
    if remaining < world_size:
        position = first + rank % remaining
        return range(position, position + 1)
    start = first + remaining * rank // world_size
    stop = first + remaining * (rank + 1) // world_size
    return range(start, stop)


def steps_left(
    first: int, length: int, batch_size: int, world_size: int, *, drop_last: bool = False
) -> int:
    """Return how many steps are left in the epoch, starting from a position.

    See `rank_positions` for the arguments.
    """
    remaining = max(0, length - first)
    step = batch_size * world_size
    if drop_last:
        return remaining // step
    # The quotient is rounded up to include an incomplete last step.
    return -(-remaining // step)
