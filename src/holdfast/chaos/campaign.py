"""Put the demo's training through real faults, and hold every promise against the run that it promises to equal.

Each scenario is a run of its own in processes of its own; two go on at a time. The last scenario is one run that
meets all faults. Nothing here is simulated: memory is refused by the kernel, the process gets a SIGKILL, a bit of a
file is flipped, a disk is full.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.chaos.lives import Lives
from holdfast.checkpoint.store import Store
from holdfast.recorder.black_box import StepMark
from holdfast.testing import flip_random_bit

_SAMPLE = {"from_step": 12}
_WORKER_FAULTS = 3
_ROUNDING = 1e-4  # fp32 rounds a weight to 6e-8 of itself, and an update here is about 1 % of a weight


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
        seconds: What it cost in time, noise included.
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
        accuracy: Of the reference and of that run, on the test images; None if it did not come to its end.
        seed: Decided the random step and the random bit.
    """

    rows: Sequence[Row]
    reference: Sequence[float]
    curve: Sequence[tuple[int, float]]
    marks: Sequence[tuple[int, str]]
    accuracy: tuple[float | None, float | None]
    seed: int

    @property
    def held(self) -> bool:
        """Return whether every promise held."""
        return all(row.held for row in self.rows)


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
        self._say = say

    def run(self) -> Report:
        """Run every scenario and return what they have shown."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            plain = pool.submit(self._reference, "reference")
            without = pool.submit(self._reference, "reference-without-the-damaged-batch", sample=_SAMPLE)
            reference, skipping = plain.result(), without.result()
            last = self._new("all", on_small_disk=True)
            marks: list[tuple[int, str]] = []
            scenarios: dict[str, Callable[[], Sequence[Row]]] = {
                "all faults in one run": lambda: self._all_faults(last, skipping, marks),
                "memory limit": lambda: self._memory(reference),
                "NaN pixels in a sample": lambda: self._nan(skipping),
                "SIGKILL": lambda: self._kill(reference),
                "flipped bit": lambda: self._flip(reference),
                "full disk": lambda: self._disk(reference),
                "killed and stuck workers": lambda: self._workers(reference),
            }
            found = [pool.submit(_carried_out, fault, scenario) for fault, scenario in scenarios.items()]
            everything, *rows = [future.result() for future in found]
        return Report(
            rows=[row for each in (*rows, everything) for row in each],
            reference=reference.losses,
            curve=[(each.global_step, each.loss) for each in last.steps(StepMark.COMMITTED) if each.loss is not None],
            marks=marks,
            accuracy=(reference.accuracy, last.accuracy),
            seed=self._seed,
        )

    def _chance(self, scenario: str) -> random.Random:
        return random.Random(f"{self._seed} {scenario}")  # noqa: S311 - chance, not secrets

    def _new(self, name: str, *, on_small_disk: bool = False, keep_weights: bool = False) -> Lives:
        base = self._directory / name
        base.mkdir(parents=True)
        disk = self._small_disk if on_small_disk else None
        return Lives(
            run_dir=base / "run" if disk is None else disk / name,
            trace=base / "trace.jsonl",
            weights=base / "weights" if keep_weights else None,
            output=base / "output.txt",
        )

    def _reference(self, name: str, **request: Any) -> Lives:
        self._say(f"{name}: plain PyTorch loop")
        run = self._new(name, keep_weights=True)
        run.finish(run.start(bare=True, **request))
        return run

    def _memory(self, reference: Lives) -> list[Row]:
        self._say("memory: RLIMIT_DATA shrinks until the batch has to be split")
        run = self._new("memory", keep_weights=True)
        run.finish(run.start(memory={"from_step": 12, "until": "split"}))
        recomputed, split = run.events("recompute"), run.events("split")
        if not recomputed or not split:
            raise RuntimeError("memory never ran short: the demo's limit does not fit this machine")
        before, differs = split[0].global_step, run.first_difference(reference)
        rounding = run.difference_of_update(reference, before + 1)
        return [
            _row(
                run,
                reference,
                fault="memory limit",
                happened=f"allocation failed in step {recomputed[0].global_step + 1}",
                remedy="recompute activations",
                promise="bit-exact",
                held=differs is None or differs > before,
                evidence=f"bit-identical to the plain loop for {before} steps",
                lost_steps=0,
                seconds=run.extra_seconds(recomputed[0].global_step + 1),
            ),
            _row(
                run,
                reference,
                fault="tighter memory limit",
                happened=f"allocation failed in step {before + 1}",
                remedy=f"split into micro-batches of {split[-1].data['micro_batch_size']}",
                promise="equal up to rounding",
                held=rounding <= _ROUNDING and run.digests[-1][0] == reference.digests[-1][0],
                evidence=f"its update differs from the plain loop's by {rounding:.0e} (relative L2)",
                lost_steps=0,
                seconds=run.extra_seconds(before + 1),
            ),
        ]

    def _nan(self, skipping: Lives) -> list[Row]:
        self._say("sample: NaN pixels")
        run = self._new("nan")
        run.finish(run.start(sample=_SAMPLE))
        skipped = run.events("skip_step")
        return [
            _row(
                run,
                skipping,
                fault="NaN pixels in a sample",
                happened=f"non-finite loss in step {skipped[0].global_step + 1}" if skipped else "nothing",
                remedy="skip the step",
                promise="changes training, by this batch",
                held=len(skipped) == 1 and run.same_as(skipping),
                evidence="bit-identical to a plain loop without this batch",
                lost_steps=len(skipped),
                seconds=sum(record.seconds for record in run.steps(StepMark.SKIPPED)),
            )
        ]

    def _kill(self, reference: Lives) -> list[Row]:
        chance = self._chance("kill")
        step = chance.randrange(20, 50)
        self._say(f"SIGKILL: after step {step}")
        run = self._new("kill")
        killed_at = self._kill_one(run, step, chance)
        run.finish(run.start())
        lost, seconds = run.cost_of_restart()
        return [
            _row(
                run,
                reference,
                fault="SIGKILL",
                happened=f"killed in step {killed_at + 1}, {self._lives(run)} lives",
                remedy="resume from the newest checkpoint",
                promise="bit-exact",
                held=run.same_as(reference),
                evidence="bit-identical to the plain loop in both lives",
                lost_steps=lost,
                seconds=seconds,
            )
        ]

    def _kill_one(self, run: Lives, step: int, chance: random.Random, **request: Any) -> int:
        """Start a life, kill it at a random moment after a step, and return the last step that it recorded."""
        process = run.start(**request)
        run.wait_for_step(process, step)
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        run.read()
        return run.digests[-1][0]

    @staticmethod
    def _lives(run: Lives) -> int:
        return len(run.events("loop"))

    def _flip(self, reference: Lives) -> list[Row]:
        self._say("flipped bit: in the newest checkpoint")
        run = self._new("flip")
        chance = self._chance("flip")
        self._kill_one(run, 35, chance)
        newest = Store(run.run_dir / "checkpoints").entries()[0]
        file, bit = flip_random_bit(newest.path, chance)
        run.finish(run.start())
        lost, seconds = run.cost_of_restart()
        found = [event.data["checkpoint"] for event in run.events("checkpoint_damaged")]
        return [
            _row(
                run,
                reference,
                fault="flipped bit, then SIGKILL",
                happened=f"bit {bit} of {file.name} in {newest.path.name}",
                remedy="fall back to the checkpoint before",
                promise="bit-exact",
                held=found == [newest.path.name] and run.same_as(reference),
                evidence="damage found; bit-identical to the plain loop",
                lost_steps=lost,
                seconds=seconds,
            )
        ]

    def _disk(self, reference: Lives) -> list[Row]:
        disk = "a small disk" if self._small_disk else "RLIMIT_FSIZE, since no small disk may be mounted here"
        self._say(f"full disk: {disk}")
        run = self._new("disk", on_small_disk=True)
        run.finish(run.start(disk=self._disk_fault("disk", 25, 45)))
        failed = run.events("save_failed")
        seconds = sum(event.data.get("seconds", 0.0) for event in failed)
        return [
            _row(
                run,
                reference,
                fault="full disk" if self._small_disk else "writes refused (RLIMIT_FSIZE)",
                happened=f"{len(failed)} saves failed in steps 26 to 45",
                remedy="train on, save again later",
                promise="bit-exact, older checkpoints intact",
                held=bool(failed) and run.events("checkpoint_saved")[-1].global_step > 45 and run.same_as(reference),
                evidence="old checkpoints verified meanwhile; bit-identical to the plain loop",
                lost_steps=0,
                seconds=seconds,
            )
        ]

    def _workers(self, reference: Lives) -> list[Row]:
        self._say("workers: one is killed, one hangs, one raises what cannot be pickled")
        run = self._new("workers")
        marks = self._directory / "workers" / "marks"
        run.finish(run.start(workers=str(marks)))
        healed = run.events("loader_healed")  # one, if both workers were lost at the same batch
        struck = len(list(marks.iterdir()))
        return [
            _row(
                run,
                reference,
                fault="killed and stuck workers",
                happened="; ".join(str(event.data["cause"]) for event in healed),
                remedy="new workers go on where the last batch was handed out",
                promise="bit-exact",
                held=struck == _WORKER_FAULTS and len(healed) > 0 and run.same_as(reference),
                evidence="bit-identical to the plain loop, which loads without workers",
                lost_steps=0,
                seconds=sum(float(event.data["seconds"]) for event in healed),
            )
        ]

    def _disk_fault(self, name: str, first: int, last: int) -> Mapping[str, Any]:
        filler = None if self._small_disk is None else str(self._small_disk / f"{name}-filler")
        return {"first_step": first, "last_step": last, "filler": filler}

    def _all_faults(self, run: Lives, skipping: Lives, marks: list[tuple[int, str]]) -> list[Row]:
        self._say("all of them in one run")
        chance = self._chance("all")
        memory = {"from_step": 14, "until": "recompute"}
        killed_at = self._kill_one(run, chance.randrange(32, 42), chance, sample=_SAMPLE, memory=memory)
        newest = Store(run.run_dir / "checkpoints").entries()[0]
        flip_random_bit(newest.path, chance)
        run.finish(run.start(sample=_SAMPLE, disk=self._disk_fault("all", 45, 57)))
        lost, seconds = run.cost_of_restart()
        skipped, failed = run.events("skip_step"), run.events("save_failed")
        marks += [(event.global_step, "NaN batch skipped") for event in skipped]
        marks += [(run.events("recompute")[0].global_step, "out of memory")]
        marks += [(killed_at, "SIGKILL, flipped bit")]
        marks += [(event.global_step, "disk full") for event in failed]
        row = _row(
            run,
            skipping,
            fault="all of these in one run",
            happened=f"{self._lives(run)} lives, {len(skipped)} NaN batch, {len(failed)} failed saves",
            remedy="all of the above",
            promise="changes training, by the NaN batch",
            held=bool(run.events("recompute") and failed) and len(skipped) == 1 and run.same_as(skipping),
            evidence="bit-identical to a plain loop without this batch",
            lost_steps=lost + len(skipped),
            seconds=seconds,
        )
        return [row]


def _row(run: Lives, reference: Lives, *, held: bool, evidence: str, **facts: Any) -> Row:
    """Return the row of a scenario; one that has not held says what was found, and then what was checked."""
    told = evidence if held else f"{run.compared_with(reference)}; checked: {evidence}"
    return Row(held=held, evidence=told, **facts)


def _carried_out(fault: str, scenario: Callable[[], Sequence[Row]]) -> Sequence[Row]:
    """Return the rows of a scenario; one that could not be carried out has shown nothing, so it has not held."""
    started = time.monotonic()
    try:
        return scenario()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer, and the others still count
        return [
            Row(
                fault=fault,
                happened="the scenario could not be carried out",
                remedy="none",
                promise="none",
                held=False,
                evidence=f"{type(error).__name__}: {error}"[:300],
                lost_steps=0,
                seconds=time.monotonic() - started,
            )
        ]


def say(text: str) -> None:
    """Print a line, in one piece: two scenarios go on at a time, and the other would write between it and its end."""
    print(f"{text}\n", end="", flush=True)  # noqa: T201


def main(directory: Path, small_disk: Path | None, seed: int) -> None:
    """Run the campaign and write ``report.json``; progress goes to standard output, a line each."""
    report = Campaign(directory, small_disk=small_disk, seed=seed, say=say).run()
    (directory / "report.json").write_text(json.dumps(asdict(report)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None, int(sys.argv[3]))
