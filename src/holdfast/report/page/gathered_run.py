"""`GatheredRun`: the recordings of a run, prepared by ``gathering.gather`` for the run's page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.report.run_snapshot import Lane, RunSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A checkpoint on disk. Size and time are None if its manifest cannot be read.

    Args:
        name: Name of the checkpoint's directory.
        global_step: Optimizer step of the checkpoint.
        status: "complete", or a description of the damage.
        size_bytes: Total size of the files.
        saved: Unix time at which the checkpoint was saved.
    """

    name: str
    global_step: int
    status: str
    size_bytes: int | None = None
    saved: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStacks:
    """The end of a file to which the stacks of a process were dumped.

    Args:
        name: Path of the file, relative to the run directory.
        text: The last part of the file's contents.
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageImage:
    """An image to show on the page: a complete PNG file, and its size in pixels."""

    tag: str
    global_step: int
    png: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRun(RunSnapshot):
    """All data that a run's page shows. The run may still be active.

    Of frequent kinds of events, only the first and the last ones are included. Processes are sorted
    by attempt and rank.

    Args:
        settings: See ``recorder.run_files.write_settings``.
        left_out_events: Number of events that are not included, keyed by kind.
        lanes: The steps and curves of each process and guard.
        checkpoints: Checkpoints, newest first, with damaged ones last.
        images: Images sorted by tag, newest first within a tag.
        stacks: The newest stack dumps.
        output: The last part of the run's output.
        tool: The tool that recorded the run, such as "TensorBoard"; empty if holdfast did.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    left_out_events: Mapping[str, int] = field(default_factory=dict)
    lanes: tuple[Lane, ...] = ()
    checkpoints: tuple[CheckpointSummary, ...] = ()
    images: tuple[PageImage, ...] = ()
    stacks: tuple[RecordedStacks, ...] = ()
    output: str = ""
    tool: str = ""
