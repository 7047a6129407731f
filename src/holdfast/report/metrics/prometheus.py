"""Prometheus, by its own client: a text file for the node exporter, or an endpoint to scrape.

Does not: push, keep history; a gauge shows the newest step.
"""

from __future__ import annotations

import contextlib
from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.core.text import sanitise
from holdfast.report.metrics.copying import Happened, Point

_GAUGES = {
    "loss": ("holdfast_loss", "Loss of the newest step."),
    "grad_norm": ("holdfast_grad_norm", "Global gradient norm of the newest step, before clipping."),
    "learning_rate": ("holdfast_learning_rate", "Learning rate of the first parameter group."),
    "step_seconds": ("holdfast_step_seconds", "Duration of the newest step."),
    "wait_share": ("holdfast_wait_ratio", "Share of the newest step that went into waiting for data."),
    "host_memory_bytes": ("holdfast_host_memory_bytes", "Resident memory of the process."),
    "device_allocated_bytes": ("holdfast_device_allocated_bytes", "Device memory held by tensors."),
    "device_reserved_bytes": ("holdfast_device_reserved_bytes", "Device memory held by the allocator."),
    "device_peak_bytes": ("holdfast_device_peak_bytes", "Most device memory held by tensors so far."),
    "step": ("holdfast_step", "Optimizer steps."),
    "attempt": ("holdfast_attempt", "Number of the attempt, from 0."),
    "time": ("holdfast_last_step_timestamp_seconds", "When the newest step ended."),
}
_MOST_KINDS = 200  # of events: a label with endless values would fill the server


class Prometheus:
    """Gauges of the newest step for each process, and counters of events; the run's name is a label.

    A text file is replaced as a whole each time; the node exporter wants a name that ends in ``.prom``.

    Args:
        target: A file, or ``:PORT`` (this machine only) or ``HOST:PORT`` to serve; port 0 takes a free one.
        run: Name of the run.

    Raises:
        PolicyError: H743 for a port that is none.
        ImportError: without prometheus-client.
        OSError: if the file cannot be written or the port is taken.
    """

    def __init__(self, target: str, run: str) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        self._registry = CollectorRegistry()
        self._run = sanitise(run, most=200)
        self._gauges = {
            key: Gauge(name, text, ["run", "process"], registry=self._registry)
            for key, (name, text) in _GAUGES.items()
        }
        self._events = Counter("holdfast_events", "Events.", ["run", "event"], registry=self._registry)
        self._kinds: set[str] = set()
        self._target, endpoint = target, endpoint_of(target)
        self._server: Any = None
        self.port = 0
        """Of the endpoint."""
        if endpoint is None:
            self.name = f"Prometheus text file {target}"
            self._replace_file()
        else:
            self._server, self._thread = start_http_server(endpoint[1], addr=endpoint[0], registry=self._registry)
            self.port = self._server.server_address[1]
            self.name = f"Prometheus endpoint {endpoint[0]}:{self.port}"

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Set the gauges, and replace the file."""
        newest = {point.process: point for point in points}
        for process, point in newest.items():
            facts = {"step": point.step, "attempt": point.attempt, "time": point.unix_seconds}
            for key, value in {**point.values, **facts}.items():
                self._gauges[key].labels(self._run, process).set(value)
        for happened in events:
            kind = sanitise(happened.event.kind, most=60)
            if len(self._kinds) < _MOST_KINDS:
                self._kinds.add(kind)
            self._events.labels(self._run, kind if kind in self._kinds else "other").inc()
        if self._server is None:
            self._replace_file()

    def _replace_file(self) -> None:
        from prometheus_client import write_to_textfile

        write_to_textfile(self._target, self._registry)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown()
                self._server.server_close()
            self._thread.join(timeout=5)


def endpoint_of(target: str) -> tuple[str, int] | None:
    """Return the host and port that a target names, None if it is a file.

    Raises:
        PolicyError: H743 for a port that is none.
    """
    host, colon, port = target.rpartition(":")
    if not colon or "/" in target:
        return None
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise PolicyError(
            f"prometheus={target!r}",
            limit="after a colon comes a port from 0 to 65535",
            fix="write prometheus=:9100 for this machine, prometheus=0.0.0.0:9100 for all, or the path of a file.",
            rule="H743",
        )
    return host.strip("[]") or "127.0.0.1", int(port)
