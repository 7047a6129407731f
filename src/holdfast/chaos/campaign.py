"""Put the demo's training through real faults, and hold every promise against the run that it promises to equal.

Each scenario is a run of its own in processes of its own; two go on at a time. The last scenario is one run that
meets all faults. Nothing here is simulated: memory is refused by the kernel, the process gets a SIGKILL, a bit of a
file is flipped, a disk is full.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from holdfast.checkpoint.store import Store
from holdfast.core.events import Event
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.reader import StepRecord, read_events, read_steps
from holdfast.testing import flip_random_bit

_SAMPLE = {"from_step": 12}
_ROUNDING = 1e-4  # fp32 rounds a weight to 6e-8 of itself, and an update here is about 1 % of a weight
_LIFE_SECONDS = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one scenario has shown.

    Args:
        fault: What was done to the run.
        happened: What the run recorded about it.
        remedy: What holdfast did.
        promise: What that remedy promises.
        held: Whether the promise held.
        evidence: How that was found out.
        lost_steps: Steps that were made again or left out.
        seconds: What it cost in time; None if it cannot be told apart from noise.
    """

    fault: str
    happened: str
    remedy: str
    promise: str
    held: bool
    evidence: str
    lost_steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a campaign.

    Args:
        rows: One for each scenario.
        reference: Loss of each step of the plain loop.
        curve: ``(step, loss)`` of the run that met all faults, in the order in which they were made.
        marks: ``(step, what)`` of what happened to it.
        accuracy: Of the reference and of that run, on the test images.
        seed: Decided the random step and the random bit.
    """

    rows: Sequence[Row]
    reference: Sequence[float]
    curve: Sequence[tuple[int, float]]
    marks: Sequence[tuple[int, str]]
    accuracy: tuple[float, float]
    seed: int

    @property
    def held(self) -> bool:
        """Return whether every promise held."""
        return all(row.held for row in self.rows)


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run of the training and where its files lie."""

    run_dir: Path
    trace: Path
    weights: Path | None
    output: Path
    digests: list[tuple[int, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracy: float | None = None

    def start(self, **request: Any) -> subprocess.Popen[bytes]:
        paths = {"run_dir": str(self.run_dir), "trace": str(self.trace)}
        if self.weights is not None:
            self.weights.mkdir(exist_ok=True)
            paths["weights"] = str(self.weights)
        command = [sys.executable, "-m", "holdfast.chaos.life", json.dumps({**paths, **request})]
        with self.output.open("ab") as output:
            return subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        process.wait(_LIFE_SECONDS)
        self.read()
        if self.accuracy is None:
            tail = self.output.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"the training ended with exit code {process.returncode}: {''.join(tail)}")

    def read(self) -> None:
        lines = self.trace.read_bytes().split(b"\n")[:-1] if self.trace.exists() else []
        entries = [json.loads(line) for line in lines]
        self.digests = [(entry["step"], entry["digest"]) for entry in entries if "digest" in entry]
        for entry in entries:
            self.losses = entry.get("losses", self.losses)
            self.accuracy = entry.get("accuracy", self.accuracy)

    def wait_for_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        deadline = time.monotonic() + _LIFE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            self.read()
            if self.digests and self.digests[-1][0] >= step:
                return
            time.sleep(0.02)
        raise RuntimeError(f"the training did not reach step {step}: see {self.output}")

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_events(self._recorder) if event.kind == kind]

    def steps(self, mark: StepMark) -> list[StepRecord]:
        return [record for record in read_steps(self._recorder) if record.mark == mark]

    def difference_of_update(self, reference: _Run, step: int) -> float:
        """Return the relative L2 difference of the updates that two runs made in one step from equal weights."""
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

    @property
    def _recorder(self) -> Path:
        return self.run_dir / "recorder" / "rank0"


class Campaign:
    """All scenarios of the demo.

    Args:
        directory: Where runs, traces and outputs lie.
        small_disk: An empty disk of some MiB that may be filled, or None if there is none.
        seed: Decides the step of the SIGKILL and the bit that is flipped.
        say: Told when a scenario begins and ends.
    """

    def __init__(self, directory: Path, *, small_disk: Path | None, seed: int, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._small_disk = small_disk
        self._seed = seed
        self._chance = random.Random(seed)  # noqa: S311 - chance, not secrets
        self._say = say

    def run(self) -> Report:
        """Run every scenario and return what they have shown."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            plain = pool.submit(self._reference, "reference")
            without = pool.submit(self._reference, "reference-without-the-damaged-batch", sample=_SAMPLE)
            reference, skipping = plain.result(), without.result()
            scenarios: list[Callable[[], Sequence[Row]]] = [
                lambda: self._memory(reference),
                lambda: self._nan(skipping),
                lambda: self._kill(reference),
                lambda: self._flip(reference),
                lambda: self._disk(reference),
            ]
            everything = pool.submit(self._all_faults, skipping)
            rows = [row for future in [pool.submit(scenario) for scenario in scenarios] for row in future.result()]
            last, run, marks = everything.result()
        assert reference.accuracy is not None
        assert run.accuracy is not None
        return Report(
            rows=[*rows, last],
            reference=reference.losses,
            curve=[(record.global_step, record.loss) for record in run.steps(StepMark.COMMITTED)],
            marks=marks,
            accuracy=(reference.accuracy, run.accuracy),
            seed=self._seed,
        )

    def _new(self, name: str, *, on_small_disk: bool = False, keep_weights: bool = False) -> _Run:
        base = self._directory / name
        base.mkdir(parents=True)
        disk = self._small_disk if on_small_disk else None
        return _Run(
            run_dir=base / "run" if disk is None else disk / name,
            trace=base / "trace.jsonl",
            weights=base / "weights" if keep_weights else None,
            output=base / "output.txt",
        )

    def _reference(self, name: str, **request: Any) -> _Run:
        self._say(f"{name}: plain PyTorch loop")
        run = self._new(name, keep_weights=True)
        run.finish(run.start(bare=True, **request))
        return run

    def _memory(self, reference: _Run) -> list[Row]:
        self._say("memory: RLIMIT_DATA shrinks until the batch has to be split")
        run = self._new("memory", keep_weights=True)
        run.finish(run.start(memory={"from_step": 12, "until": "split"}))
        recomputed, split = run.events("recompute"), run.events("split")
        if not recomputed or not split:
            raise RuntimeError("memory never ran short: the demo's limit does not fit this machine")
        before = split[0].global_step
        exact = [pair for pair in run.digests if pair[0] <= before]
        rounding = run.difference_of_update(reference, before + 1)
        return [
            Row(
                fault="memory limit",
                happened=f"allocation failed in step {recomputed[0].global_step + 1}",
                remedy="recompute activations",
                promise="bit-exact",
                held=_equal(exact, reference.digests),
                evidence=f"weights and momenta equal the plain loop, bit for bit, at all {before} steps until then",
                lost_steps=0,
                seconds=_extra_seconds(run, recomputed[0].global_step + 1),
            ),
            Row(
                fault="tighter memory limit",
                happened=f"allocation failed in step {before + 1}",
                remedy=f"split into micro-batches of {split[-1].data['micro_batch_size']}",
                promise="equal up to rounding",
                held=rounding <= _ROUNDING and run.digests[-1][0] == reference.digests[-1][0],
                evidence=f"the update of that step differs from the plain loop's by {rounding:.0e} (relative L2)",
                lost_steps=0,
                seconds=_extra_seconds(run, before + 1),
            ),
        ]

    def _nan(self, skipping: _Run) -> list[Row]:
        self._say("sample: NaN pixels")
        run = self._new("nan")
        run.finish(run.start(sample=_SAMPLE))
        skipped = run.events("skip_step")
        return [
            Row(
                fault="NaN pixels in a sample",
                happened=f"non-finite loss in step {skipped[0].global_step + 1}" if skipped else "nothing",
                remedy="skip the step",
                promise="changes training, by this batch",
                held=len(skipped) == 1 and _same(run, skipping),
                evidence="weights and momenta equal a plain loop without this batch, bit for bit, at every step",
                lost_steps=len(skipped),
                seconds=sum(record.seconds for record in run.steps(StepMark.SKIPPED)),
            )
        ]

    def _kill(self, reference: _Run) -> list[Row]:
        step = self._chance.randrange(20, 65)
        self._say(f"SIGKILL: after step {step}")
        run = self._new("kill")
        killed_at = self._kill_one(run, step)
        run.finish(run.start())
        lost, seconds = _cost_of_restart(run)
        return [
            Row(
                fault="SIGKILL",
                happened=f"killed in step {killed_at + 1}, {self._lives(run)} lives",
                remedy="resume from the newest checkpoint",
                promise="bit-exact",
                held=_same(run, reference),
                evidence="weights and momenta equal the plain loop, bit for bit, at every step of both lives",
                lost_steps=lost,
                seconds=seconds,
            )
        ]

    def _kill_one(self, run: _Run, step: int, **request: Any) -> int:
        """Start a life, kill it at a random moment after a step, and return the last step that it recorded."""
        process = run.start(**request)
        run.wait_for_step(process, step)
        time.sleep(self._chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        run.read()
        return run.digests[-1][0]

    @staticmethod
    def _lives(run: _Run) -> int:
        return len(run.events("loop"))

    def _flip(self, reference: _Run) -> list[Row]:
        self._say("flipped bit: in the newest checkpoint")
        run = self._new("flip")
        self._kill_one(run, 45)
        newest = Store(run.run_dir / "checkpoints").entries()[0]
        file, bit = flip_random_bit(newest.path, self._chance)
        run.finish(run.start())
        lost, seconds = _cost_of_restart(run)
        found = [event.data["checkpoint"] for event in run.events("checkpoint_damaged")]
        return [
            Row(
                fault="flipped bit, then SIGKILL",
                happened=f"bit {bit} of {file.name} in {newest.path.name}",
                remedy="fall back to the checkpoint before",
                promise="bit-exact",
                held=found == [newest.path.name] and _same(run, reference),
                evidence="the damage was found, and weights and momenta equal the plain loop, bit for bit",
                lost_steps=lost,
                seconds=seconds,
            )
        ]

    def _disk(self, reference: _Run) -> list[Row]:
        disk = "a small disk" if self._small_disk else "RLIMIT_FSIZE, since no small disk may be mounted here"
        self._say(f"full disk: {disk}")
        run = self._new("disk", on_small_disk=True)
        run.finish(run.start(disk=self._disk_fault("disk", 25, 55)))
        failed = run.events("save_failed")
        seconds = sum(event.data.get("seconds", 0.0) for event in failed)
        return [
            Row(
                fault="full disk" if self._small_disk else "writes refused (RLIMIT_FSIZE)",
                happened=f"{len(failed)} saves failed in steps 26 to 55",
                remedy="train on, save again later",
                promise="bit-exact, older checkpoints intact",
                held=bool(failed) and run.events("checkpoint_saved")[-1].global_step > 55 and _same(run, reference),
                evidence="older checkpoints verified while it was full; weights equal the plain loop, bit for bit",
                lost_steps=0,
                seconds=seconds,
            )
        ]

    def _disk_fault(self, name: str, first: int, last: int) -> Mapping[str, Any]:
        filler = None if self._small_disk is None else str(self._small_disk / f"{name}-filler")
        return {"first_step": first, "last_step": last, "filler": filler}

    def _all_faults(self, skipping: _Run) -> tuple[Row, _Run, list[tuple[int, str]]]:
        self._say("all of them in one run")
        run = self._new("all", on_small_disk=True)
        memory = {"from_step": 16, "until": "recompute"}
        killed_at = self._kill_one(run, self._chance.randrange(36, 46), sample=_SAMPLE, memory=memory)
        newest = Store(run.run_dir / "checkpoints").entries()[0]
        flip_random_bit(newest.path, self._chance)
        run.finish(run.start(sample=_SAMPLE, disk=self._disk_fault("all", 55, 72)))
        lost, seconds = _cost_of_restart(run)
        skipped, failed = run.events("skip_step"), run.events("save_failed")
        marks = [(event.global_step, "NaN batch skipped") for event in skipped]
        marks += [(run.events("recompute")[0].global_step, "out of memory")]
        marks += [(killed_at, "SIGKILL, flipped bit")]
        marks += [(event.global_step, "disk full") for event in failed]
        row = Row(
            fault="all of these in one run",
            happened=f"{self._lives(run)} lives, {len(skipped)} NaN batch, {len(failed)} failed saves",
            remedy="all of the above",
            promise="changes training, by the NaN batch",
            held=bool(run.events("recompute") and failed) and len(skipped) == 1 and _same(run, skipping),
            evidence="weights and momenta equal a plain loop without that batch, bit for bit, at every step",
            lost_steps=lost + len(skipped),
            seconds=seconds,
        )
        return row, run, marks


def _same(run: _Run, reference: _Run) -> bool:
    """Say whether a run had the state of its reference at every step, and came as far."""
    return _equal(run.digests, reference.digests) and run.digests[-1] == reference.digests[-1]


def _equal(found: Sequence[tuple[int, str]], reference: Sequence[tuple[int, str]]) -> bool:
    """Say whether every step has the state that the reference had after as many steps."""
    expected = dict(reference)
    return bool(found) and all(expected.get(step) == value for step, value in found)


def _extra_seconds(run: _Run, step: int) -> float:
    """Return how much longer a step took than the others, failed attempts included."""
    committed = run.steps(StepMark.COMMITTED)
    typical = statistics.median(record.seconds for record in committed)
    return max(0.0, sum(record.seconds for record in committed if record.global_step == step) - typical)


def _cost_of_restart(run: _Run) -> tuple[int, float]:
    """Return the steps that were made twice, and the time until the run was back where it was killed."""
    committed = run.steps(StepMark.COMMITTED)
    resumed = run.events("resumed")[0]
    before = [record for record in committed if record.unix_seconds < resumed.unix_seconds]
    after = [record for record in committed if record.unix_seconds >= resumed.unix_seconds]
    furthest = max(record.global_step for record in before)
    back = next(record for record in after if record.global_step >= furthest)
    return furthest - resumed.global_step, back.unix_seconds - before[-1].unix_seconds


def main(directory: Path, small_disk: Path | None, seed: int) -> None:
    """Run the campaign and write ``report.json``; progress goes to standard output, a line each."""
    report = Campaign(directory, small_disk=small_disk, seed=seed, say=lambda text: print(text, flush=True)).run()  # noqa: T201
    (directory / "report.json").write_text(json.dumps(asdict(report)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None, int(sys.argv[3]))
