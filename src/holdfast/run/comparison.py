"""Whether a change is better: A and B trained from one snapshot, on the same batches, for several seeds.

Nothing here touches the run that is compared: each arm trains freshly built objects in a directory of its own. Only
`adopt` writes, and only when it is asked to.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast.checkpoint.store import Store
from holdfast.core.errors import (
    CheckpointError,
    DivergenceError,
    HoldfastError,
    NonFiniteError,
    OutOfMemoryError,
    PolicyError,
)
from holdfast.core.policy import Policy
from holdfast.data.random_state import seed_cpu
from holdfast.run.changes import POLICY_FIELDS, apply_options, changed_policy, options_of, policy_changes
from holdfast.run.guard import Guard

Setup = Mapping[str, Any]
"""Keyword arguments of `Guard`, and ``loss_fn`` or ``step``, and maybe ``evaluate``: what a factory returns."""

_GUARD_KEYS = ("model", "optimizer", "loader", "scheduler", "state", "policy", "split")
_OWN_KEYS = ("loss_fn", "step", "evaluate")
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""One-sided 95 % points of Student's t for 1 to 9 degrees of freedom."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """What one arm did.

    Args:
        losses: Of each step, on the batch before it was trained on. NaN where a step had no finite loss.
        score: What is compared, lower is better; infinity if the arm did not get to the end.
        judged_by: ``"evaluate"``, or ``"loss"``: of the last quarter of the batches.
        skipped_steps: Batches that are not in its weights.
        error: Why it ended early, or None.
    """

    losses: tuple[float, ...]
    score: float
    judged_by: Literal["evaluate", "loss"]
    skipped_steps: int
    error: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A and B over all seeds.

    Args:
        pairs: A and B for each seed, in order; both of a pair met the same batches and random numbers.
        smallest_gain: Share of A's score that is worth a change.
    """

    pairs: tuple[tuple[Arm, Arm], ...]
    smallest_gain: float

    @property
    def gains(self) -> tuple[float, ...]:
        """Return by how much B's score lies below A's, for each seed."""
        return tuple(_gain(a.score, b.score) for a, b in self.pairs)

    @property
    def noise(self) -> float:
        """Return what the mean gain must exceed to be no chance: half a one-sided 95 % interval of paired gains."""
        gains = self.gains
        if not all(map(math.isfinite, gains)):
            return 0.0 if min(gains) == math.inf else math.inf
        return _T_95[len(gains) - 2] * statistics.stdev(gains) / math.sqrt(len(gains))

    @property
    def is_better(self) -> bool:
        """Return whether B is better in every seed, beyond noise, and by enough to matter."""
        gains, base = self.gains, statistics.fmean(abs(a.score) for a, _ in self.pairs)
        if min(gains) == math.inf:
            return True  # A breaks down with every seed, and B with none
        mean = statistics.fmean(gains)
        return min(gains) > 0 and mean > self.noise and mean > self.smallest_gain * base


def _gain(a: float, b: float) -> float:
    return 0.0 if a == b == math.inf else a - b


def compare(
    factory: Callable[[], Setup],
    changes_a: Mapping[str, Any],
    changes_b: Mapping[str, Any],
    *,
    run_dir: Path | None = None,
    steps: int = 100,
    seeds: int = 3,
    smallest_gain: float = 0.01,
    on_arm: Callable[[str, int, Arm], object] = lambda *_: None,
) -> Comparison:
    """Train A and B from one snapshot on the same batches, for several seeds.

    The first seed goes on as the run would have; each other one starts at the beginning of another epoch, with other
    random numbers. The score is ``evaluate(model)`` after the last step if the factory gives one, else the mean loss
    of the last quarter of the batches, each seen before it is trained on.

    Args:
        factory: Builds all objects anew at each call; called with the same random numbers for both arms.
        changes_a: Options of the optimizers and fields of the policy by name, on top of what the factory gives.
        changes_b: The same for B. A text ``"*0.1"`` multiplies.
        run_dir: Run whose newest good checkpoint is the snapshot, which is only read; None: fresh objects.
        steps: Of each arm.
        seeds: 3 to 10.
        smallest_gain: Share of A's mean score below which a gain is not worth a change.
        on_arm: Told about each arm when it is done: its name, the number of the seed, what it did.

    Raises:
        PolicyError: H102 for numbers out of range, H701 for a directory without a checkpoint, H703 if the factory
            returns something else, H704 for an unknown change.
    """
    if not 3 <= seeds <= len(_T_95) + 1 or steps < 8:
        raise PolicyError(
            f"seeds={seeds}, steps={steps}",
            limit=f"it takes 3 to {len(_T_95) + 1} seeds and at least 8 steps to tell a gain from noise",
            fix="pass seeds=3 and steps=100.",
            rule="H102",
        )
    pairs = []
    with tempfile.TemporaryDirectory(prefix="holdfast-trial-") as room:
        snapshot = None if run_dir is None else _copied(run_dir, Path(room, "snapshot"))
        for changes in (changes_a, changes_b):
            _train(factory, changes, Path(room, "check"), snapshot, 0, 0)  # a misspelt change, before any work
            shutil.rmtree(Path(room, "check"), ignore_errors=True)
        for number in range(seeds):
            arms = []
            for name, changes in (("A", changes_a), ("B", changes_b)):
                arms.append(_train(factory, changes, Path(room, f"{name}{number}"), snapshot, number, steps))
                on_arm(name, number, arms[-1])
                shutil.rmtree(Path(room, f"{name}{number}"), ignore_errors=True)
            pairs.append(_paired(*arms))
    return Comparison(tuple(pairs), smallest_gain)


def adopt(
    factory: Callable[[], Setup], changes: Mapping[str, Any], run_dir: Path, evidence: Mapping[str, Any]
) -> Path | None:
    """Write a checkpoint of a run's newest state with changed optimizer options, so that the run goes on with them.

    Args:
        factory: As in `compare`.
        changes: Those for optimizers; fields of the policy belong to the program, which passes them itself.
        run_dir: Of the run, which must not be running.
        evidence: What the trial showed, for the events.

    Returns:
        The checkpoint; None if no option of an optimizer is among the changes.

    Raises:
        As `compare`, and what `Guard` raises.
    """
    if len(policy_changes(changes)) == len(changes):
        return None
    setup = _built(factory)
    with Guard(run_dir, **_arguments(setup, {})) as guard:  # which saves nothing if only some could be changed
        options = options_of(guard._parts, changes)
        apply_options(guard._parts, options)
        return guard._session.adopt(", ".join(f"{name}={value}" for name, value in options.items()), evidence)


def _copied(run_dir: Path, to: Path) -> Path:
    for entry in Store(run_dir / "checkpoints").entries():
        try:
            entry.verify()
        except CheckpointError:
            continue  # as a guard would, but without a trace: the run is only read
        break
    else:
        raise PolicyError(
            f"{run_dir} holds no checkpoint that verifies",
            limit="a trial starts both arms from one",
            fix="pass the directory that was given to Guard, or none to start from fresh objects.",
            rule="H701",
        )
    shutil.copytree(entry.path, to / "checkpoints" / entry.path.name)
    return to


def _train(
    factory: Callable[[], Setup],
    changes: Mapping[str, Any],
    room: Path,
    snapshot: Path | None,
    number: int,
    steps: int,
) -> Arm:
    if snapshot is not None:
        shutil.copytree(snapshot, room)
    seed_cpu(number)
    torch.manual_seed(number)
    setup = _built(factory)
    guard = Guard(room, **_arguments(setup, changes))
    losses: list[float] = []
    try:
        skipped = guard.statistics().skipped_steps
        apply_options(guard._parts, options_of(guard._parts, changes))
        if number:
            guard._session.go_elsewhere(number)
        error = _loop(guard, setup, steps, losses)
        skipped = guard.statistics().skipped_steps - skipped
        if error is not None or "evaluate" not in setup:
            return Arm(tuple(losses), math.inf if error else _tail(losses, losses), "loss", skipped, error)
        score = _evaluated(guard, setup)
        return Arm(tuple(losses), score if math.isfinite(score) else math.inf, "evaluate", skipped, None)
    finally:
        guard.close()


def _loop(guard: Guard, setup: Setup, steps: int, losses: list[float]) -> str | None:
    make = setup.get("step") or (lambda guard, batch: guard.step(batch, setup["loss_fn"]))
    try:
        for batch in guard.batches(max_steps=guard.global_step + steps) if steps else ():
            made = make(guard, batch)
            losses.append(float(getattr(made, "loss", made)))
            if len(losses) >= steps:  # committed or not: both arms meet the same batches
                break
    except (NonFiniteError, DivergenceError, OutOfMemoryError) as error:
        return str(error)
    except HoldfastError:
        raise
    except Exception as error:
        raise _failed("a training step", error) from error
    return None


def _evaluated(guard: Guard, setup: Setup) -> float:
    try:
        with guard.evaluate():
            return float(setup["evaluate"](setup["model"]))
    except Exception as error:
        raise _failed("evaluate", error) from error


def _arguments(setup: Setup, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a guard: those of the factory, with the changes of the policy above them."""
    objects = {key: value for key, value in setup.items() if key in _GUARD_KEYS}
    fields = {key: value for key, value in setup.items() if key not in (*_GUARD_KEYS, *_OWN_KEYS)}
    return {**objects, "policy": changed_policy(Policy.of(objects.get("policy"), **fields), changes)}


def _tail(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean loss of the last quarter, of those batches on which the other arm's is finite too."""
    pairs = list(zip(losses, others, strict=True))[-max(5, len(losses) // 4) :]
    tail = [loss for loss, other in pairs if math.isfinite(loss) and math.isfinite(other)]
    return statistics.fmean(tail) if tail else math.inf


def _paired(a: Arm, b: Arm) -> tuple[Arm, Arm]:
    """Let both scores be about the same batches."""
    if "evaluate" in (a.judged_by, b.judged_by) or math.inf in (a.score, b.score):
        return a, b
    scores = _tail(a.losses, b.losses), _tail(b.losses, a.losses)
    return dataclasses.replace(a, score=scores[0]), dataclasses.replace(b, score=scores[1])


def _built(factory: Callable[[], Setup]) -> Setup:
    try:
        setup = factory()
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed("the factory", error) from error
    known = [*_GUARD_KEYS, *_OWN_KEYS, *POLICY_FIELDS, "preset"]
    if not isinstance(setup, Mapping) or not {"model", "optimizer", "loader"} <= set(setup):
        found = f"a {type(setup).__name__}" if not isinstance(setup, Mapping) else f"only {', '.join(setup)}"
        raise _bad_setup(f"the factory returned {found}")
    unknown = [key for key in setup if key not in known]
    if unknown:
        raise _bad_setup(f"the factory returned {unknown[0]!r}, which is not known")
    if not ({"loss_fn", "step"} & set(setup)):
        raise _bad_setup("the factory returned neither loss_fn nor step")
    return setup


def _bad_setup(what: str) -> PolicyError:
    return PolicyError(
        what,
        limit="a trial builds everything anew for each arm, from what the factory returns",
        fix=f"return a dict of keyword arguments of Guard ({', '.join(_GUARD_KEYS)}, or fields of the policy), "
        "loss_fn or step(guard, batch), and maybe evaluate(model), of which lower is better.",
        rule="H703",
    )


def _failed(what: str, error: BaseException) -> PolicyError:
    return PolicyError(
        f"{what} raised {_where(error)}",
        limit="each arm trains as your own program does",
        fix="try it in a plain loop first; a schedule that ends needs fewer steps.",
        rule="H703",
    )


def _where(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
