"""Convert the record of another tool into a `GatheredRun`, so that `holdfast compare` can show it.

A record has curves, but no times, processes, events or settings. ``explain.records`` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.explain.records.finding import RecordFiles
from holdfast.explain.records.judging import judge_loss
from holdfast.explain.records.reading import read_record
from holdfast.explain.records.record import Record
from holdfast.explain.records.verdict import judge_record
from holdfast.report.curves import LOGGED, MAX_LOGGED, Curve, StepTimes, curve_of_points
from holdfast.report.page.gathered_run import GatheredRun
from holdfast.report.run_snapshot import Lane

# The names under which tools log the learning rate. Its curve is drawn in the panel of the learning
# rates that holdfast records.
_LEARNING_RATES = ("learning_rate", "train/learning_rate", "lr")
# Not metrics, but other ways to count the steps.
_COUNTERS = ("epoch", "train/epoch", "train/global_step", "trainer/global_step", "step")


def gather_record(found: RecordFiles) -> GatheredRun:
    """Return the data of a record for a comparison.

    Raises:
        RunDirectoryError: H733 if the record cannot be read.
    """
    record = read_record(found)
    problems = [*record.missing, *record.notes]
    lane = Lane(
        label="",
        last_step=record.last_step,
        curves=_curves(record, problems),
        times=StepTimes.none(),
    )
    return GatheredRun(
        path=found.path.resolve(),
        tool=record.tool,
        verdict=judge_record(record),
        lanes=(lane,),
        problems=tuple(problems),
    )


def _curves(record: Record, problems: list[str]) -> dict[str, Curve]:
    """Return the curves of a record by the names that holdfast's own runs use.

    Args:
        record: The record.
        problems: Receives a sentence if curves are left out.
    """
    names = _names_on_page(record)
    curves = {}
    for name in list(names)[:MAX_LOGGED]:
        curve = curve_of_points(record.series[name].points())
        if curve is not None:
            # Epochs and lines do not fit on an axis of steps.
            curves[names[name]] = replace(curve, own_scale=record.unit != "step")
    if len(names) > MAX_LOGGED:
        problems.append(f"only {MAX_LOGGED} of {len(names)} metrics are shown")
    return curves


def _names_on_page(record: Record) -> dict[str, str]:
    """Return the name of the curve for each series, those that holdfast also records first."""
    judged = judge_loss(record)
    own: dict[str, str] = {}
    if judged.chosen is not None and judged.chosen.kind == "training":
        own[judged.chosen.name] = "loss"
    if judged.norm:
        own[judged.norm] = "grad_norm"
    rate = _first_of(_LEARNING_RATES, list(record.series))
    if rate is not None:
        own[rate] = "learning_rate"
    for name in record.series:
        if name.lower() not in _COUNTERS:
            own.setdefault(name, LOGGED + name)
    return own


def _first_of(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    for name in wanted:
        if name in names:
            return name
    return None
