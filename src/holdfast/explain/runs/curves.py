"""How the losses of a run ended: whether they were not finite any more.

Does not: judge (see ``runtime_causes``), or fit trends (see ``supervise.watch.trends``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from holdfast.core.errors import HoldfastError
from holdfast.explain.evidence import Lost
from holdfast.recorder.progress import read_samples
from holdfast.recorder.reader import read_steps
from holdfast.recorder.run_files import SAMPLES_FILE, ProcessInfo

Point = tuple[int, float]
"""Step, or line of a log, and value."""
Between = tuple[float, float]
Curves = tuple[list[Point], list[Point]]
_FEWEST = 2
"""Lost losses at the end that count where there were good ones: a single one may be a batch that was left out."""
_FEWEST_NORMS = 3
"""The same for norms of gradients, of which a loss scale that is being found makes some infinite at first."""


def lost_of_run(
    folders: Iterable[tuple[Path, ProcessInfo]], guards: Iterable[Path], between: Between
) -> tuple[Lost | None, bool]:
    """Return how the training of a run was lost, or None, and whether anybody has read a loss of it.

    Of the processes with the same rank the newest counts: others are of an earlier start of a launcher, or of a
    training that came before.

    Args:
        folders: Of processes that train.
        guards: Folders of the recordings of guards.
        between: Unix times between which marks of guards count: their rings hold all attempts.
    """
    newest: dict[int | None, Path] = {}
    for folder, info in sorted(folders, key=lambda pair: pair[1].started):
        newest[info.rank] = folder
    curves = [_of_samples(folder / SAMPLES_FILE) for folder in newest.values()]
    curves += [_of_marks(folder, between) for folder in guards]
    found = [lost for losses, norms in curves if (lost := find_lost(losses, norms)) is not None]
    return min(found, key=lambda lost: lost.since, default=None), any(losses for losses, _ in curves)


def _of_samples(path: Path) -> Curves:
    try:
        samples = read_samples(path) if path.exists() else []
    except (HoldfastError, OSError, ValueError):
        return [], []  # damaged: then it says nothing
    return _curves((each.step, each.loss, each.grad_norm) for each in samples)


def _of_marks(folder: Path, between: Between) -> Curves:
    try:
        marks = [mark for mark in read_steps(folder) if between[0] <= mark.unix_seconds < between[1]]
    except (HoldfastError, OSError, ValueError):
        return [], []
    return _curves((each.global_step, each.loss, each.grad_norm) for each in marks)


def _curves(steps: Iterable[tuple[int, float | None, float | None]]) -> Curves:
    known = list(steps)
    losses = [(step, loss) for step, loss, _ in known if loss is not None]
    return losses, [(step, norm) for step, _, norm in known if norm is not None]


def find_lost(losses: Sequence[Point], norms: Sequence[Point] = (), *, log: str = "") -> Lost | None:
    """Return how a training was lost, to its end; None: it was not, or nobody knows.

    Args:
        losses: Those that were read, oldest first.
        norms: Norms of gradients, in the same way.
        log: Name of the log whose lines they are from; empty for steps.
    """
    found = _not_finite(losses, "loss", _FEWEST) or _not_finite(norms, "gradients", _FEWEST_NORMS)
    return replace(found, log=log) if found is not None else None


def _not_finite(points: Sequence[Point], what: Literal["loss", "gradients"], fewest: int) -> Lost | None:
    count = next((at for at, (_, value) in enumerate(reversed(points)) if math.isfinite(value)), len(points))
    always = 0 < count == len(points)
    if count < fewest and not (always and what == "loss"):
        return None
    return Lost(what=what, since=points[-count][0], always=always)
