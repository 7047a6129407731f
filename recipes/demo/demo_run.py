"""One run of the demo over all its attempts.

Start them, follow their trace, compare it with that of another run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from holdfast.core.events.event import Event
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.reader import StepRecord, read_events, read_steps

_STANDSTILL_SECONDS = 150.0
"""Without a new line in the trace. How long all of a training may take depends on the machine."""


@dataclass(slots=True, kw_only=True)
class DemoRun:
    """A run of the training, over all its processes: where they write, and what they wrote.

    `digests` are step and digest of all state, in the order in which the steps were made;
    `accuracy` that on the test images, once the training has ended.
    """

    run_dir: Path
    trace: Path
    weights: Path | None
    output: Path
    digests: list[tuple[int, str]] = field(default_factory=list)
    accuracy: float | None = None

    def start(self, **request: Any) -> subprocess.Popen[bytes]:
        """Start an attempt; `request` says which faults it meets."""
        paths = {"run_dir": str(self.run_dir), "trace": str(self.trace)}
        if self.weights is not None:
            self.weights.mkdir(exist_ok=True)
            paths["weights"] = str(self.weights)
        command = [sys.executable, "-m", "recipes.demo.attempt", json.dumps({**paths, **request})]
        with self.output.open("ab") as output:
            return subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of the training.

        RuntimeError if it ends before, TimeoutError (killed) if it hangs.
        """
        self._follow(process, lambda: False)
        if self.accuracy is None:
            tail = self.output.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(
                f"the training ended with exit code {process.returncode}: {''.join(tail)}"
            )

    def read(self) -> None:
        """Read what the trace holds by now."""
        lines = self.trace.read_bytes().split(b"\n")[:-1] if self.trace.exists() else []
        entries = [json.loads(line) for line in lines]
        self.digests = [(entry["step"], entry["digest"]) for entry in entries if "digest" in entry]
        for entry in entries:
            self.accuracy = entry.get("accuracy", self.accuracy)

    def wait_for_step(
        self, process: subprocess.Popen[bytes], step: int, event: str | None = None
    ) -> None:
        """Wait until a step was made and, if one is named, an event was recorded.

        Errors as `finish`.
        """

        def is_reached() -> bool:
            made = bool(self.digests) and self.digests[-1][0] >= step
            return made and (event is None or bool(self.events(event)))

        if not self._follow(process, is_reached):
            goal = f"step {step}" if event is None else f"step {step} and {event}"
            raise RuntimeError(f"the training did not reach {goal}: see {self.output}")

    def _follow(self, process: subprocess.Popen[bytes], is_enough: Callable[[], bool]) -> bool:
        """Read the trace until it is enough, or the process has ended.

        Return whether it is enough.
        """
        length, since = -1, time.monotonic()
        while not is_enough():
            ended = process.poll() is not None
            now = self.trace.stat().st_size if self.trace.exists() else 0
            if now != length:
                length, since = now, time.monotonic()
                self.read()
            elif ended:
                return False
            elif time.monotonic() - since > _STANDSTILL_SECONDS:
                process.kill()
                process.wait()
                raise TimeoutError(
                    f"the training made no step for {_STANDSTILL_SECONDS:g} s: see {self.output}"
                )
            time.sleep(0.02)
        return True

    def events(self, kind: str | None = None) -> list[Event]:
        """Return what the run recorded, of one kind or all."""
        return [event for event in read_events(self._recorder) if kind in (None, event.kind)]

    def steps(self, mark: StepMark) -> list[StepRecord]:
        """Return the recorded steps with one mark."""
        return [record for record in read_steps(self._recorder) if record.mark == mark]

    @property
    def _recorder(self) -> Path:
        return self.run_dir / "recorder" / "rank0"

    def difference_of_update(self, reference: DemoRun, step: int) -> float:
        """Return the relative L2 difference of the updates that two runs made in one step from
        equal weights.
        """
        assert self.weights is not None
        assert reference.weights is not None
        before, expected, found = (
            torch.cat([tensor.double().flatten() for _, tensor in sorted(load_file(path).items())])
            for path in (
                reference.weights / f"{step - 1}.safetensors",
                reference.weights / f"{step}.safetensors",
                self.weights / f"{step}.safetensors",
            )
        )
        return float((found - expected).norm() / (expected - before).norm())

    def same_as(self, reference: DemoRun) -> bool:
        """Say whether this run had the state of its reference at every step, and came as far."""
        return (
            self.first_difference(reference) is None and self.digests[-1] == reference.digests[-1]
        )

    def same_before(self, reference: DemoRun, step: int) -> bool:
        """Say whether this run had the state of its reference at every earlier step."""
        differs = self.first_difference(reference)
        return differs is None or differs >= step

    def first_difference(self, reference: DemoRun) -> int | None:
        """Return the first step that left another state than the reference had after as many
        steps, if any did.
        """
        expected = dict(reference.digests)
        return next((step for step, digest in self.digests if expected.get(step) != digest), None)

    def extra_seconds(self, step: int) -> float:
        """Return how much longer a step took than the others, failed attempts included."""
        committed = self.steps(StepMark.COMMITTED)
        typical = statistics.median(record.seconds for record in committed)
        return max(
            0.0, sum(record.seconds for record in committed if record.global_step == step) - typical
        )

    def cost_of_restart(self) -> tuple[int, float]:
        """Return the steps that were made twice, and the time until the run was back where it
        was killed.
        """
        committed = self.steps(StepMark.COMMITTED)
        resumed = self.events("resumed")[0]
        before = [record for record in committed if record.unix_seconds < resumed.unix_seconds]
        after = [record for record in committed if record.unix_seconds >= resumed.unix_seconds]
        furthest = max(record.global_step for record in before)
        back = next(record for record in after if record.global_step >= furthest)
        return furthest - resumed.global_step, back.unix_seconds - before[-1].unix_seconds
