"""The spike detector.

How often it disturbs a healthy run, and how many damaged states it lets pass as good.

How: healthy trainings with rough losses (`spikes_runs`) are recorded, then judged. In copies of
them faults are planted at random steps . A fault counts as damage if a later state, looked at every
100 steps, has lost a quarter of what the training had gained, and stands beyond all states of the
undisturbed twin; it is missed if the first such state would be called good: no hard step since the
fault, and nothing suspected until 50 steps after it (a rollback from a divergence returns to no
state that is younger). Three detectors in use elsewhere are said to notice if they flag any step
since the fault, be it by chance. Programs that the thresholds were chosen on and programs held out
are reported apart.

To reach: <= 0.1 hard steps in 1,000 healthy ones, divergence included; >= 95 % of damages noticed;
<= 5 us a step.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks import spikes_runs as runs
from benchmarks.forks import single_threaded
from benchmarks.results_file import Result, read_options
from benchmarks.spikes_detectors import OTHERS, SYNTHETIC, Ours, Row, log_normal, synthetic
from benchmarks.spikes_runs import FAULTS, Fault
from holdfast.numerics.spikes import GOOD_AFTER, Level, SpikeDetector

Make = Callable[[int], runs.Training]
_EVERY = 100
_FAULTS_NEAR = (700, 1100)
_AFTER = 400  # steps from the hundred in which the fault lies
_GAIN_LOST = 0.25


# --- training


@dataclass(slots=True, kw_only=True)
class Recording:
    """What a training did."""

    rows: list[Row]  # player, loss and gradient norm of each step
    states: dict[int, float]  # loss on held-out batches before each step that is a multiple of 100


def build(make: Make, seed: int) -> tuple[runs.Training, dict[str, float]]:
    """Return a training, and the learning rates of its players."""
    torch.manual_seed(seed)
    training = make(seed)
    return training, {
        name: each.param_groups[0]["lr"] for name, (each, _) in training.players.items()
    }


def evaluate(training: runs.Training, step: int) -> float:
    """Return the mean loss of the first player on 40 batches of this stage, without the best and
    worst tenth.
    """
    loss_fn = next(iter(training.players.values()))[1]
    with torch.no_grad():
        losses = [
            float(loss_fn(training.batch((500 + number) * 1_000_000 + step)))
            for number in range(40)
        ]
    return statistics.fmean(
        sorted(loss if math.isfinite(loss) else math.inf for loss in losses)[4:36]
    )


def train(
    training: runs.Training,
    rates: dict[str, float],
    first: int,
    last: int,
    fault: Fault | None = None,
    struck_at: int = 0,
) -> Recording:
    """Make the steps from `first` to before `last` in a plain loop."""
    found = Recording(rows=[], states={})
    for step in range(first, last):
        if step % _EVERY == 0:
            found.states[step] = evaluate(training, step)
        batch = prepare(training, rates, step, fault, struck_at)
        for name, (optimizer, loss_fn) in training.players.items():
            optimizer.zero_grad()
            loss = loss_fn(batch)
            loss.backward()
            moved = [
                p.grad
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            norm = float(torch.nn.utils.get_total_norm(moved))
            optimizer.step()
            found.rows.append((name, loss.item(), norm))
    if last % _EVERY == 0:
        found.states[last] = evaluate(training, last)
    return found


def prepare(
    training: runs.Training, rates: dict[str, float], step: int, fault: Fault | None, struck_at: int
) -> Any:
    """Set the learning rates of a step, let the fault strike, and return the batch."""
    since = step - struck_at if fault is not None and step >= struck_at else None
    for name, (optimizer, _) in training.players.items():
        factor = 1.0 if since is None or fault is None else fault.lr_factor(since)
        for group in optimizer.param_groups:
            group["lr"] = rates[name] * training.lr_factor(step) * factor
    batch = training.batch(step)
    if since is None or fault is None:
        return batch
    fault.strike(training, since)
    return training.spoil(batch) if since < fault.spoils_batches else batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A healthy training up to a fault, and what followed."""

    program: str
    fault: str
    before: list[Row]
    after: list[Row]
    damaged_after: int | None  # steps from the fault to the first damaged state


def record(make: Make, seed: int, steps: int, *, plant: bool) -> tuple[Recording, list[Planted]]:
    """Train a healthy run, and copies of it with each fault at two random steps."""
    training, rates = build(make, seed)
    chance = random.Random(f"{make.__name__} {seed}")
    struck = [near + chance.randrange(_EVERY) for near in _FAULTS_NEAR] if plant else []
    whole = Recording(rows=[], states={})
    saved = {}
    for first, last in zip([0, *struck], [*struck, steps], strict=True):
        part = train(training, rates, first, last)
        whole.rows += part.rows
        whole.states |= part.states
        optimizers = {
            name: copy.deepcopy(each.state_dict()) for name, (each, _) in training.players.items()
        }
        saved[last] = copy.deepcopy(training.model.state_dict()), optimizers
    planted = []
    for step in struck:
        for fault in FAULTS:
            spoiled, _ = build(make, seed)
            spoiled.model.load_state_dict(saved[step][0])
            for name, (optimizer, _) in spoiled.players.items():
                optimizer.load_state_dict(copy.deepcopy(saved[step][1][name]))
            after = train(spoiled, rates, step, step // _EVERY * _EVERY + _AFTER, fault, step)
            damaged = first_damaged(whole.states, after.states, step)
            planted.append(
                Planted(
                    program=make.__name__,
                    fault=fault.name,
                    before=whole.rows[:step],
                    after=after.rows,
                    damaged_after=None if damaged is None else damaged - step,
                )
            )
    return whole, planted


def damage_limit(twin: dict[int, float], struck_at: int) -> float:
    """Return the evaluation loss above which a state is damaged."""
    around = [
        loss for step, loss in twin.items() if struck_at - _EVERY <= step <= struck_at + _AFTER
    ]
    return max(2 * max(around) - min(around), min(around) + _GAIN_LOST * (twin[0] - min(around)))


def first_damaged(twin: dict[int, float], after: dict[int, float], struck_at: int) -> int | None:
    limit = damage_limit(twin, struck_at)
    return next(
        (step for step, loss in after.items() if step > struck_at and not loss < limit), None
    )


# --- what is noticed


def notices(detector: Any, planted: Planted, *, later: int = 0) -> bool:
    """Say whether a detector refuses the first damaged state, which it may call good so many
    steps later.
    """
    assert planted.damaged_after is not None
    for row in planted.before:
        detector.flags(*row)
    for number, row in enumerate(planted.after):
        if detector.flags(*row):
            return True
        if number + 1 >= planted.damaged_after and detector.suspects():
            return True
        if number + 1 >= planted.damaged_after + later:
            return False
    return False


# --- under a guard


def train_guarded(
    make: Make, seed: int, steps: int, fault: Fault, struck_at: int, action: str
) -> float:
    """Return the evaluation loss at the end of a training with a fault under a guard.

    Inf if it was given up.

    The fault strikes once, by the number of the batch: a rollback does not bring it back.
    """
    training, rates = build(make, seed)
    optimizer, loss_fn = next(iter(training.players.values()))
    with tempfile.TemporaryDirectory() as folder:
        guard = holdfast.Guard(
            Path(folder),
            model=training.model,
            optimizer=optimizer,
            loader=[torch.tensor([number]) for number in range(steps)],
            micro_batch_size=None,
            save_interval_steps=_EVERY,
            spike_action=action,
            cpu_malloc_threshold_bytes=None,
        )
        try:
            for number in guard.batches(max_epochs=1):
                batch = prepare(training, rates, int(number), fault, struck_at)
                guard.step(batch, loss_fn)
        except holdfast.HoldfastError:
            return math.inf
    return evaluate(training, steps)


# --- the report


def report_healthy(result: Result, which: str, recordings: dict[str, Recording]) -> None:
    hard = refused = states = total = 0
    others = dict.fromkeys(OTHERS, 0)
    for name, recording in recordings.items():
        ours = Ours()
        flagged = [
            step
            for step, row in enumerate(recording.rows)
            if (ours.flags(*row), ours.suspects())[0]
        ]
        hard += len(flagged)
        total += len(recording.rows)
        again = Ours()
        for step, row in enumerate(recording.rows, start=1):
            again.flags(*row)
            if step % _EVERY == 0:
                states += 1
                refused += again.suspects()
        result.samples[f"{which}: hard steps of healthy {name}"] = flagged
        for other, make in OTHERS.items():
            detector = make()
            others[other] += sum(detector.flags(*row) for row in recording.rows)
    what = (
        f"{which}: hard or diverged in 1,000 healthy steps ({total} steps, {len(recordings)} runs)"
    )
    result.add_samples(what, "steps", [1000 * hard / total], at_most=0.1)
    for other, count in others.items():
        result.add_samples(
            f"{which}: flagged by {other} in 1,000 healthy steps", "steps", [1000 * count / total]
        )
    result.add_count(f"{which}: healthy states that would not be called good", refused, states)


def report_planted(result: Result, which: str, planted: Sequence[Planted]) -> None:
    damaged = [each for each in planted if each.damaged_after is not None]
    result.add_count(f"{which}: planted faults that did damage", len(damaged), len(planted))
    missed = [each for each in damaged if not notices(Ours(), each)]
    share = 100 * len(missed) / len(damaged)
    result.add_samples(
        f"{which}: damages not noticed when the state is saved ({len(damaged)} damages)",
        "%",
        [share],
    )
    result.samples[f"{which}: missed"] = [
        f"{each.program}: {each.fault}, {each.damaged_after}" for each in missed
    ]
    late = [each for each in damaged if not notices(Ours(), each, later=GOOD_AFTER)]
    what = (
        f"{which}: damages missed when the state is called good, {GOOD_AFTER} steps later"
        f" ({len(damaged)} damages)"
    )
    result.add_samples(what, "%", [100 * len(late) / len(damaged)], at_most=5.0)
    result.samples[f"{which}: not noticed until called good"] = [
        f"{each.program}: {each.fault}" for each in late
    ]
    for other, make in OTHERS.items():
        result.add_count(
            f"{which}: damages with a flag of {other}",
            sum(notices(make(), e) for e in damaged),
            len(damaged),
        )


def report_guarded(result: Result, programs: Sequence[Make], steps: int) -> None:
    damaged = unharmed = 0
    for make in programs:
        training, rates = build(make, 2)
        twin = train(training, rates, 0, steps).states
        for fault in FAULTS:
            struck_at = random.Random(f"{make.__name__} {fault.name}").randrange(
                steps - 400, steps - 250
            )
            around = [loss for step, loss in twin.items() if step >= struck_at - _EVERY]
            limit = max(
                2 * max(around) - min(around), min(around) + _GAIN_LOST * (twin[0] - min(around))
            )
            if train_guarded(make, 2, steps, fault, struck_at, "off") < limit:
                continue
            damaged += 1
            unharmed += train_guarded(make, 2, steps, fault, struck_at, "roll_back") < limit
    result.add_count(
        "guarded runs that end unharmed, of those that a fault damages without", unharmed, damaged
    )


def report_cost(result: Result, blocks: int) -> None:
    rows = synthetic("cost", log_normal, 100_000)
    found = []
    for _ in range(blocks):
        detector = SpikeDetector(objective="minimize")
        started = time.process_time_ns()
        for name, loss, norm in rows:
            if detector.judge(name, loss, norm) is not Level.HARD:
                detector.accepted(name, loss, norm)
            detector.is_calm()
        found.append((time.process_time_ns() - started) / len(rows) / 1000)
    result.add_samples(
        "CPU time of one step: judge, accepted and is_calm", "us", found, at_most=5.0
    )


def main() -> None:
    single_threaded()
    options = read_options("spikes", __doc__ or "")
    steps, length = (1500, 10_000) if options.quick else (4000, 100_000)
    sets = {"design": (runs.DESIGN, 0), "held out": (runs.HELD_OUT, 1)}
    parameters = {
        "steps": steps,
        "synthetic_steps": length,
        "gain_lost": _GAIN_LOST,
        "states_every": _EVERY,
    }
    result = Result(
        options=options,
        parameters=parameters | {"seeds": {name: seed for name, (_, seed) in sets.items()}},
    )
    report_cost(result, 2 if options.quick else 7)
    for which, (programs, seed) in sets.items():
        recordings, planted = {}, []
        for make in programs[:2] if options.quick else programs:
            recordings[make.__name__], more = record(make, seed, steps, plant=True)
            planted += more
        report_healthy(result, which, recordings)
        report_planted(result, which, planted)
    players = record(runs.gan, 1, steps, plant=False)[0].rows
    adversarial = Ours("adversarial")
    flagged = sum(adversarial.flags(*row) for row in players)
    result.add_count("GAN: hard or diverged healthy steps", flagged, len(players), expected=0)
    for draw in SYNTHETIC:
        ours = Ours()
        count = sum(ours.flags(*row) for row in synthetic(draw.__name__, draw, length))
        name = draw.__name__.replace("_", " ")
        result.add_samples(
            f"synthetic, {name}: hard in 1,000 steps", "steps", [1000 * count / length], at_most=0.1
        )
    guarded = (
        (runs.label_noise,)
        if options.quick
        else (runs.label_noise, runs.heavy_regression, runs.skip_grams)
    )
    report_guarded(result, guarded, 1000)
    result.write()


if __name__ == "__main__":
    main()
