"""Weights & Biases, by its client; ``WANDB_MODE=offline`` and its other variables mean what they mean there.

Does not: upload what the command prints, code, the state of git, packages, or measurements and facts of the machine,
as far as the client has settings for that; it adds the host's name, its own version and Python's.
"""

from __future__ import annotations

from typing import Any

from holdfast.report.metrics.points import Happened, Point

# All are there since wandb 0.19; those with x_ are not part of its public face.
_ONLY_NUMBERS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandbRun:
    """Log to one run of a project.

    Args:
        project: Its name.
        name: Of the run.

    Raises:
        ImportError: without wandb.
    """

    def __init__(self, project: str, name: str) -> None:
        import wandb

        self.name = f"Weights & Biases project {project}"
        settings = wandb.Settings(**_ONLY_NUMBERS)
        self._run: Any = wandb.init(project=project, name=name, job_type="holdfast", settings=settings)
        # Its own step may not go back, which a rollback or a restart does; so steps are a value of their own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Log each step; events are counted by kind."""
        for point in points:
            values = {f"{point.process}/{name}": value for name, value in point.values.items()}
            self._run.log({**values, "step": point.step, "attempt": point.attempt})
        for happened in events:
            key = f"events/{happened.event.kind}"
            self._run.summary[key] = self._run.summary.get(key, 0) + 1

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
