"""Memory with recomputed blocks by editing the list of events, against traces in which they really are recomputed.

How: each job of `forecast_models` with blocks that could be recomputed is traced once on the fake accelerator. For
several choices of blocks (all, the first, the last, every second, and some drawn at random) the events are edited as
the planner does it, and the job is traced again with these blocks checkpointed. Compared are the peaks of live bytes
and of what the simulated allocator reserves over three steps.

A job whose author recomputes its layers already is left out: there is nothing to choose.

To reach: an error of at most 0.5 % of live bytes on transformers, and never more than 0.5 % too little elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from benchmarks.forecast_models import Model, find_models
from benchmarks.results_file import Result, read_options, without_paths
from holdfast.core.errors import HoldfastError
from holdfast.forecast.allocator.replay import replay
from holdfast.forecast.job.tracing import trace_job
from holdfast.forecast.trace.events import Trace, live_peak, played
from holdfast.forecast.trace.recomputation import with_recompute

_MOST_PERCENT = 0.5
_STEPS = 3
_DRAWN = 2  # choices at random for each model
_LEAST_BLOCKS = 2
_RECOMPUTED_ALREADY = "encoder_recomputed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one choice; errors are positive if the edited events say too much."""

    model: str
    family: str
    blocks: int = 0
    recomputed: tuple[str, ...] = ()
    traced_mib: float = 0.0
    error_percent: float = 0.0
    reserved_error_percent: float = 0.0
    failed: str = ""


def choices_of(model: Model, blocks: tuple[str, ...], drawn: int) -> list[tuple[str, ...]]:
    """Return which blocks to recompute, each choice once."""
    chance = random.Random(model.name)
    found = [blocks, blocks[:1], blocks[-1:], blocks[::2]]
    found += [
        tuple(sorted(chance.sample(blocks, chance.randint(1, len(blocks))), key=blocks.index)) for _ in range(drawn)
    ]
    return list(dict.fromkeys(found))


def rows_of(model: Model, *, quick: bool) -> list[Row]:
    """Edit and trace a model; nothing if it has no blocks to choose from."""
    trace: Trace | None = None
    rows: list[Row] = []
    choices: list[tuple[str, ...]] = [()]
    for choice in choices:  # the first is none: its trace says which there are
        named = {"model": model.name, "family": model.family, "recomputed": choice}
        try:
            traced = trace_job(model.request(sizes=(model.micro_batch_size,), recompute=choice)).traces[0]
        except HoldfastError as error:
            failed = without_paths(f"{type(error).__name__}: {error}".splitlines()[0])
            rows.append(Row(**named, failed=failed))
            continue
        if trace is None:
            trace = traced
            found = choices_of(model, trace.blocks, _DRAWN) if len(trace.blocks) >= _LEAST_BLOCKS else []
            choices += found[:1] if quick else found
            continue
        edited = with_recompute(trace, frozenset(choice))
        rows.append(
            Row(
                **named,
                blocks=len(trace.blocks),
                traced_mib=round(live_peak(traced) / 2**20, 2),
                error_percent=round(100 * (live_peak(edited) / live_peak(traced) - 1), 4),
                reserved_error_percent=round(100 * (_reserved(edited) / _reserved(traced) - 1), 4),
            )
        )
    return rows


def _reserved(trace: Trace) -> int:
    return replay(*played(trace, _STEPS)).peak_reserved_bytes


def main() -> None:
    """Run all models and write the result."""
    options = read_options("forecast_recompute", __doc__ or "")
    models, notes = find_models(quick=options.quick)
    models = [model for model in models if model.name != _RECOMPUTED_ALREADY]
    result = Result(options=options, parameters={"models": len(models), "drawn": _DRAWN})
    result.notes += notes
    rows: list[Row] = []
    for model in models:
        found = rows_of(model, quick=options.quick)
        rows += found
        print("\n".join(f"  {asdict(row)}" for row in found), flush=True)
    answered = [row for row in rows if not row.failed]
    transformers = [row for row in answered if row.family == "transformer"]
    others = [row for row in answered if row.family != "transformer"]
    asked = sum(row.family == "transformer" for row in rows)
    exact = sum(abs(row.error_percent) <= _MOST_PERCENT for row in transformers)
    under = sum(row.error_percent < -_MOST_PERCENT for row in others)
    result.add_count(f"transformers: live peak within {_MOST_PERCENT} % of the trace", exact, asked, expected=asked)
    result.add_count(f"others: live peak more than {_MOST_PERCENT} % too low", under, len(others), expected=0)
    result.add_count("answered", len(answered), len(rows), expected=len(rows))
    for name, group in (("transformers", transformers), ("others", others)):
        live, reserved = ([getattr(row, f"{what}error_percent") for row in group] for what in ("", "reserved_"))
        result.add_samples(f"{name}: signed error of the live peak", "%", live)
        result.add_samples(f"{name}: signed error of the reserved peak", "%", reserved)
    result.samples["plans"] = [asdict(row) for row in rows]
    result.write()


if __name__ == "__main__":
    main()
