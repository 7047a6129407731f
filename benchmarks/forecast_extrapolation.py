"""Memory at any micro-batch from traces at 2 and 4 samples, against traces at 8, 32 and 128.

How: each job of `forecast_models` is traced at all five sizes on the fake accelerator, in fp32 and
under bf16 autocast. An affine function for each allocation is fitted to the two smallest and
evaluated at the others; its peak is compared with the one of the trace, in live bytes and in what
the simulated allocator reserves over three steps. Beside it: the straight line through the two
smallest *peaks*, as batch-size finders and calculators extrapolate.

To reach: an error of at most 0.1 % in live bytes, and never more than 0.5 % too little.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from benchmarks.forecast_models import Model, find_models
from benchmarks.results_file import Result, read_options, without_paths
from holdfast.core.errors import HoldfastError
from holdfast.forecast.allocator.replay import replay
from holdfast.forecast.job.tracing import trace_job
from holdfast.forecast.trace.events import Trace, live_peak, repeat_steps
from holdfast.forecast.trace.extrapolation import extrapolate

_FITTED = (2, 4)
_CHECKED = (8, 32, 128)
_PRECISIONS = ("fp32", "bf16")
_MOST_PERCENT, _MOST_UNDER_PERCENT = 0.1, 0.5
_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one model at one size; errors are positive if a forecast says too much."""

    model: str
    precision: str
    micro_batch_size: int = 0
    traced_mib: float = 0.0
    error_percent: float = 0.0
    reserved_error_percent: float = 0.0
    secant_error_percent: float = 0.0
    failed: str = ""


def rows_of(model: Model, precision: str) -> list[Row]:
    """Trace a model at all sizes and compare."""
    request = model.request(precision=precision, sizes=(*_FITTED, *_CHECKED))
    try:
        traces = dict(zip(request.sizes, trace_job(request).traces, strict=True))
        scaled = extrapolate([traces[size] for size in _FITTED])
    except HoldfastError as error:
        return [_failed(model, precision, error)]
    low, high = (live_peak(traces[size]) for size in _FITTED)
    rows = []
    for size in _CHECKED:
        secant = low + (high - low) / (_FITTED[1] - _FITTED[0]) * (size - _FITTED[0])
        rows.append(_row(model, scaled.at(size), traces[size], secant))
    return rows


def _failed(model: Model, precision: str, error: HoldfastError) -> Row:
    failed = without_paths(f"{type(error).__name__}: {error}".splitlines()[0])
    return Row(model=model.name, precision=precision, failed=failed)


def _row(model: Model, fitted: Trace, traced: Trace, secant: float) -> Row:
    live = live_peak(traced)
    return Row(
        model=model.name,
        precision=traced.precision,
        micro_batch_size=traced.micro_batch_size,
        traced_mib=round(live / 2**20, 2),
        error_percent=round(100 * (live_peak(fitted) / live - 1), 4),
        reserved_error_percent=round(100 * (_reserved(fitted) / _reserved(traced) - 1), 4),
        secant_error_percent=round(100 * (secant / live - 1), 4),
    )


def _reserved(trace: Trace) -> int:
    return replay(*repeat_steps(trace, _STEPS)).peak_reserved_bytes


def main() -> None:
    """Run all models and write the result."""
    options = read_options("forecast_extrapolation", __doc__ or "")
    models, notes = find_models(quick=options.quick)
    precisions = _PRECISIONS[:1] if options.quick else _PRECISIONS
    result = Result(
        options=options,
        parameters={
            "models": len(models),
            "fitted": _FITTED,
            "checked": _CHECKED,
            "precisions": precisions,
        },
    )
    result.notes += notes
    rows: list[Row] = []
    for model in models:
        for precision in precisions:
            found = rows_of(model, precision)
            rows += found
            print("\n".join(f"  {asdict(row)}" for row in found), flush=True)
    _add(result, rows, len(models) * len(precisions) * len(_CHECKED))
    result.samples["cases"] = [asdict(row) for row in rows]
    result.write()


def _add(result: Result, rows: list[Row], cases: int) -> None:
    answered = [row for row in rows if not row.failed]
    exact = sum(abs(row.error_percent) <= _MOST_PERCENT for row in answered)
    under = sum(row.error_percent < -_MOST_UNDER_PERCENT for row in answered)
    result.add_count(
        f"live peak within {_MOST_PERCENT} % of the trace", exact, cases, expected=cases
    )
    result.add_count(
        f"live peak more than {_MOST_UNDER_PERCENT} % too low", under, len(answered), expected=0
    )
    result.add_samples(
        "signed error of the live peak", "%", [row.error_percent for row in answered]
    )
    result.add_samples(
        "signed error of the reserved peak", "%", [row.reserved_error_percent for row in answered]
    )
    secants = [row.secant_error_percent for row in answered]
    result.add_samples("line through the peaks: signed error", "%", secants)
    low = sum(error < -_MOST_UNDER_PERCENT for error in secants)
    result.add_count(
        f"line through the peaks: more than {_MOST_UNDER_PERCENT} % too low", low, len(answered)
    )


if __name__ == "__main__":
    main()
