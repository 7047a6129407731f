"""What is to be run and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.supervise.launch.restarts import Budgets
from holdfast.supervise.watch.limits import HangLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run, and how.

    Args:
        command: Its words.
        program: The file that the first word means.
        run: The run directory.
        budgets: Of restarts.
        limits: Of hangs; None: nobody watches.
        observe: Whether Python processes record themselves.
        grace_seconds: Between asking the command to end and SIGKILL.
        most_log_bytes: Size of the log of what it prints.
    """

    command: tuple[str, ...]
    program: str
    run: Path
    budgets: Budgets = field(default_factory=Budgets)
    limits: HangLimits | None = field(default_factory=HangLimits)
    observe: bool = True
    grace_seconds: float = 25.0
    most_log_bytes: int = 256 << 20
