"""MLflow, by its client (``mlflow-skinny`` suffices).

Does not: log models or artifacts.
"""

from __future__ import annotations

from typing import Any

from holdfast.core.text import sanitise
from holdfast.report.metrics.points import Happened, Point

_EXPERIMENT = "holdfast"
_MOST_IN_A_BATCH = 1000  # limit of MLflow's log_batch


class MlflowRun:
    """Log to one run of the experiment "holdfast".

    Args:
        uri: Of the tracking server, or a path.
        name: Of the run.

    Raises:
        ImportError: without mlflow.
    """

    def __init__(self, uri: str, name: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self.name = f"MLflow at {uri}"
        self._metric: Any = Metric
        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(_EXPERIMENT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(_EXPERIMENT)
        self._run: str = self._client.create_run(number, run_name=sanitise(name, most=200)).info.run_id
        self._counts: dict[str, int] = {}

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Log metrics in batches; events are counted by kind."""
        metrics = [
            self._metric(f"{_key(point.process)}/{name}", value, round(point.unix_seconds * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for happened in events:
            key = f"events/{_key(happened.event.kind)}"
            self._counts[key] = self._counts.get(key, 0) + 1
            moment = round(happened.event.unix_seconds * 1000)
            metrics.append(self._metric(key, float(self._counts[key]), moment, happened.event.global_step))
        for start in range(0, len(metrics), _MOST_IN_A_BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_IN_A_BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


def _key(text: str) -> str:
    """Return a text with the characters that MLflow allows in a name."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-. ") else "_" for c in sanitise(text, most=100))
