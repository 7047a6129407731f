"""`TimeUse`: what was recorded about how the training loops of an attempt spent their time."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.recorder.progress import LoopTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The loop times of one rank, or of the only training process."""

    rank: int
    loop: LoopTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that the other ranks waited for.

    Attributes:
        rank: The number of the rank.
        where: Where the rank was slow, in words.
        seconds: The rank's own time per step.
        others_seconds: The median of the other ranks' own time per step.
        share: The share of the loop's time for which the other ranks waited.
    """

    rank: int
    where: str
    seconds: float
    others_seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the trainers and loader workers used; see the event `ResourcesUsed`."""

    cpus: float
    cpus_wanted: float
    workers: float
    worker_busy: float | None = None
    seconds: float = 0.0
    bytes_read: int = 0
    waits_seen: int = 0
    waits_running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSamples:
    """Stack samples of a training loop; see the event `StacksSampled`."""

    samples: int
    in_python: int
    place: str = ""
    at_place: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """What was recorded about the speed of an attempt.

    Attributes:
        ranks: The loop times of each rank on this host, sorted by rank.
        resources: None if they were not recorded, for example in a run of a few seconds.
        stacks: None if no stacks were sampled, which is usual if a loop mostly computes.
        slow_rank: The rank that a Guard found slow, or None.
    """

    ranks: tuple[RankTimes, ...] = ()
    resources: Resources | None = None
    stacks: StackSamples | None = None
    slow_rank: SlowRank | None = None

    @property
    def first(self) -> LoopTimes | None:
        """Return the loop times of the lowest rank, or None if no loop was recorded."""
        return self.ranks[0].loop if self.ranks else None

    def share_of(self, part: str) -> float:
        """Return the share of time that every rank spent on a part of the loop, from 0 to 1.

        If ranks differ, the smallest share counts: what only some ranks do makes these ranks slow.

        Args:
            part: The name of a field of `LoopTimes`, such as ``"wait_seconds"``.
        """
        shares = [getattr(rank.loop, part) / rank.loop.seconds for rank in self.ranks]
        return min(max(min(shares, default=0.0), 0.0), 1.0)
