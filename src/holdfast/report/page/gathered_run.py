"""`GatheredRun`: everything that a run recorded, for its page. ``gathering.gather`` fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.report.run_snapshot import Lane, RunSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint on disk; size and time are None if its manifest cannot be read.

    Args:
        name: Name of its folder.
        global_step: Its step.
        status: "complete", or what is wrong with it.
        size_bytes: Size of its files.
        saved: Unix time at which it was saved.
    """

    name: str
    global_step: int
    status: str
    size_bytes: int | None = None
    saved: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStacks:
    """The stacks of a process as text.

    Args:
        name: Path of the file within the run directory.
        text: The end of the file.
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageImage:
    """One image on the page: a complete PNG file, and its size in pixels."""

    tag: str
    global_step: int
    png: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRun(RunSnapshot):
    """Everything known about a run, whether it has ended or not.

    Of frequent kinds of events, only the first and the last ones are there. Processes are sorted by
    attempt and rank.

    Args:
        settings: See ``recorder.run_files.write_settings``.
        left_out_events: How many more events there are, by kind.
        lanes: The steps of each process and guard.
        checkpoints: Newest first, damaged ones last.
        images: By tag, the newest first.
        stacks: The newest stack dumps.
        output: The end of the run's output.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    left_out_events: Mapping[str, int] = field(default_factory=dict)
    lanes: tuple[Lane, ...] = ()
    checkpoints: tuple[CheckpointSummary, ...] = ()
    images: tuple[PageImage, ...] = ()
    stacks: tuple[RecordedStacks, ...] = ()
    output: str = ""
