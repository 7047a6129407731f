"""Planted faults: does one replay name the operation, the module and the samples that made a step
non-finite?

How: every case of ``provenance_cases`` is a step of a small model into which one numerical fault
was planted, with the truth beside it. The step is traced once, and the samples are searched from
the tracer's hint. A case is right in full only if operation, module and samples are all right;
"samples" means exactly the guilty ones, or none where a weight, a buffer or the code is to blame.
Every third case was held out while the tracer was written, and the hard cases were written after
it; what was changed in them since is told in ``provenance_cases``.

Beside it, on the same cases: ``torch.autograd.detect_anomaly`` (the operation is the one whose
backward it names; it knows no module and no sample) and forward hooks (the first module whose
output is not finite; they know no operation and no sample).

Cost: CPU time of the traced step over that of a plain one, measured in turns, the median of several
rounds.

To reach: >= 90 % of the cases right in all three.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from benchmarks.forks import single_threaded
from benchmarks.provenance_cases import CASES, Case
from benchmarks.provenance_models import Batch, Step
from benchmarks.results_file import Result, read_options
from holdfast.numerics.bad_samples import find_bad_samples
from holdfast.numerics.mechanisms import readable
from holdfast.numerics.provenance import Origin, trace

_SEED = 3


def parameters_of(step: Step) -> list[tuple[str, torch.Tensor]]:
    return [
        (name if key == "model" else f"{key}.{name}", parameter)
        for key, model in step.models.items()
        for name, parameter in model.named_parameters()
    ]


def run_step(step: Step, batch: Batch) -> torch.Tensor:
    """Run forward and backward as a step does, from the same random state and buffers, and
    return the loss.
    """
    torch.manual_seed(_SEED)
    parameters, buffers = (
        parameters_of(step),
        [b for model in step.models.values() for b in model.buffers()],
    )
    before = [buffer.clone() for buffer in buffers]
    for _, parameter in parameters:
        parameter.grad = None
    precision: AbstractContextManager[Any] = nullcontext()
    if step.precision is not None:
        precision = torch.autocast("cpu", step.precision)
    with precision:
        loss = step.loss(batch)
    (loss * step.scale if step.scale != 1.0 else loss).backward()
    for buffer, value in zip(buffers, before, strict=True):
        buffer.data.copy_(value)
    return loss.detach()


def is_bad(step: Step, samples: Sequence[int]) -> bool:
    chosen = list(samples) * (2 if len(samples) == 1 else 1)  # BatchNorm cannot take one sample
    loss = run_step(step, {name: tensor[chosen] for name, tensor in step.batch.items()})
    gradients = [
        parameter.grad for _, parameter in parameters_of(step) if parameter.grad is not None
    ]
    return not all(bool(torch.isfinite(tensor).all()) for tensor in (loss, *gradients))


def size_of(step: Step) -> int:
    return len(next(iter(step.batch.values())))


def trace_step(step: Step) -> Origin | None:
    return trace(
        lambda: run_step(step, step.batch),
        step.models,
        parameters_of(step),
        list(step.batch.items()),
        size_of(step),
    )


def one_step(step: Step) -> tuple[Origin | None, list[int], int]:
    """Trace a step and search its samples.

    Return the origin, the samples, and how often the step was run.
    """
    origin, calls = trace_step(step), 0

    def asked(samples: Sequence[int]) -> bool:
        nonlocal calls
        calls += 1
        return is_bad(step, samples)

    samples = find_bad_samples(asked, size_of(step), () if origin is None else origin.samples)
    return origin, samples, calls


def judge(case: Case, origin: Origin | None, samples: list[int]) -> tuple[bool, bool, bool]:
    if origin is None:
        return False, False, False
    return origin.op in case.op, origin.module in case.module, tuple(samples) == case.samples


def ask_anomaly_mode(step: Step) -> str:
    """Return the operation whose backward `detect_anomaly` names, or nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autograd.detect_anomaly():
                run_step(step, step.batch)
        except RuntimeError as error:
            words = str(error).split("'")
            return readable(words[1]) if len(words) > 1 else ""
    return ""


def ask_forward_hooks(step: Step) -> str:
    """Return the first module whose output holds NaN or Inf, innermost first, or nothing."""
    found: list[str] = []

    def watch(name: str) -> Callable[[Any, Any, Any], None]:
        def look(_module: Any, _inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
            if any(not bool(torch.isfinite(tensor).all()) for tensor in tensors):
                found.append(name)

        return look

    hooks = [
        module.register_forward_hook(
            watch(name if key == "model" and name else f"{key}.{name}".rstrip("."))
        )
        for key, model in step.models.items()
        for name, module in model.named_modules()
    ]
    run_step(step, step.batch)
    for hook in hooks:
        hook.remove()
    return found[0] if found else ""


def cost_of(step: Step, rounds: int) -> float:
    """Return the CPU time of a traced step over that of a plain one."""

    def timed(action: Callable[[], object]) -> int:
        started = time.process_time_ns()
        action()
        return time.process_time_ns() - started

    pairs = [
        (timed(lambda: trace_step(step)), timed(lambda: run_step(step, step.batch)))
        for _ in range(rounds + 1)
    ]
    return statistics.median(traced / plain for traced, plain in pairs[1:])


def build(case: Case) -> Step:
    torch.manual_seed(_SEED)
    step = case.make()
    case.spoil(step)
    if not is_bad(step, range(size_of(step))):
        raise RuntimeError(f"{case.name}: the planted fault does not show")
    return step


def main() -> None:
    single_threaded()
    options = read_options("provenance", __doc__ or "")
    rounds = 1 if options.quick else 5
    result = Result(
        options=options, parameters={"cases": len(CASES), "rounds": rounds, "seed": _SEED}
    )
    verdicts: list[tuple[bool, bool, bool]] = []
    anomaly, hooks, costs, calls = [], [], [], []
    for case in CASES:
        step = build(case)
        origin, samples, runs = one_step(step)
        verdicts.append(judge(case, origin, samples))
        anomaly.append(ask_anomaly_mode(step) in case.op)
        hooks.append(ask_forward_hooks(step) in case.module)
        costs.append(cost_of(step, rounds))
        calls.append(runs)
        if not all(verdicts[-1]):
            result.notes.append(f"{case.name}: {origin}; samples {samples}")
            print(f"  wrong: {result.notes[-1]}")
    groups: dict[str, Callable[[Case], bool]] = {
        "all cases": lambda _: True,
        "tuned on": lambda case: not case.held_out,
        "held out": lambda case: case.held_out and not case.hard,
        "hard": lambda case: case.hard,
    }
    for title, belongs in groups.items():
        chosen = [verdict for verdict, case in zip(verdicts, CASES, strict=True) if belongs(case)]
        for number, what in enumerate(("operation", "module", "samples")):
            result.add_count(
                f"{title}: {what} right", sum(verdict[number] for verdict in chosen), len(chosen)
            )
        right = sum(map(all, chosen))
        result.add_count(
            f"{title}: all three right ({100 * right / len(chosen):.1f} %, to reach: 90 %)",
            right,
            len(chosen),
        )
    result.add_count(
        "detect_anomaly: operation right (never a module or a sample)", sum(anomaly), len(CASES)
    )
    result.add_count(
        "forward hooks: module right (never an operation or a sample)", sum(hooks), len(CASES)
    )
    result.add_samples("CPU time of the traced step over a plain one", "ratio", costs, at_most=30.0)
    result.add_samples("steps run to find the samples", "steps", [float(count) for count in calls])
    result.samples["case, held out, operation, module, samples"] = [
        [case.name, case.held_out, *verdict] for case, verdict in zip(CASES, verdicts, strict=True)
    ]
    result.write()


if __name__ == "__main__":
    main()
