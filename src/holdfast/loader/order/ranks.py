"""Find this process's rank, and divide the positions of a step among ranks.

Nothing here communicates with another rank.
"""

from __future__ import annotations

from torch import distributed


def ranks_now(otherwise: tuple[int, int]) -> tuple[int, int]:
    """Return this rank and the number of ranks.

    Args:
        otherwise: What to return if ``torch.distributed`` is not initialized.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return otherwise


def rank_positions(
    first: int, length: int, batch_size: int, rank: int, world_size: int, *, drop_last: bool = False
) -> range | None:
    """Return which positions of a step belong to a rank, or None after the end of the epoch.

    A step takes ``batch_size * world_size`` positions. The positions of a shorter last step are
    divided among all ranks, in parts whose sizes differ by at most 1: a rank without a batch would
    make no step, and the others would wait for it. If fewer positions are left than there are
    ranks, some are therefore used twice.

    Args:
        first: Position at which the step begins.
        length: Positions in the epoch.
        batch_size: Positions for one rank.
        rank: The rank.
        world_size: Number of ranks.
        drop_last: Whether an incomplete step is dropped.
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
    """Return how many steps `rank_positions` gives every rank from a position to the epoch's end.

    The arguments are those of `rank_positions`.
    """
    remaining = max(0, length - first)
    step = batch_size * world_size
    if drop_last:
        return remaining // step
    return -(-remaining // step)
