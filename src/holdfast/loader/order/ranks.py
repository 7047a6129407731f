"""Which rank this is, and which positions of a step belong to which rank.

Nothing here talks to another rank.
"""

from __future__ import annotations

from torch import distributed


def ranks_now(otherwise: tuple[int, int]) -> tuple[int, int]:
    """Return this rank and the number of ranks as ``torch.distributed`` says, where it is used."""
    known = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if known else otherwise


def rank_positions(
    first: int, count: int, batch_size: int, rank: int, world_size: int, *, drop_last: bool = False
) -> range | None:
    """Return which positions of the step that begins at `first`, any of `count`, belong to a rank.

    None at the end.

    The step takes ``batch_size * world_size`` positions. Those of a shorter last step are divided
    among all ranks, with sizes that differ by at most 1, since a rank that made no step would leave
    the others waiting for it: where fewer are left than ranks, some are taken twice. With
    `drop_last` a step that is not full is left out.
    """
    left = min(count - first, batch_size * world_size)
    if left <= 0 or (drop_last and left < batch_size * world_size):
        return None
    if left < world_size:
        place = first + rank % left
        return range(place, place + 1)
    return range(first + left * rank // world_size, first + left * (rank + 1) // world_size)


def steps_left(
    first: int, count: int, batch_size: int, world_size: int, *, drop_last: bool = False
) -> int:
    """Return how many steps `rank_positions` gives every rank from a position to the end of the
    epoch.
    """
    left, size = max(0, count - first), batch_size * world_size
    return left // size if drop_last else -(-left // size)
