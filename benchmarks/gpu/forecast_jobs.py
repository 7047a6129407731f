"""Jobs of `forecast_models`, really trained on a CUDA device: what they need."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_map_only

from benchmarks.forecast_models import MODELS, Model, Parts, modules_of, optimizers_of, train_step
from benchmarks.results_file import without_paths
from holdfast.memory.oom import find_out_of_memory

STEPS = 3
_DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a job is to run, and what the forecast says of it.

    Args:
        model: Name of the job.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        micro_batch_size: Samples.
        allocated_bytes: Forecast of ``max_memory_allocated``.
        process_bytes: Forecast of what the process takes of the device.
        enough_bytes: What torch's allocator has on the smallest device that the job is said to fit;
            0: do not try.
    """

    model: str
    precision: str
    micro_batch_size: int
    allocated_bytes: int = 0
    process_bytes: int = 0
    enough_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run needed.

    Args:
        ended: ``"done"``, ``"out of memory"``, or the first line of another error.
        allocated_bytes: ``max_memory_allocated``.
        reserved_bytes: ``max_memory_reserved``.
        process_bytes: What is taken of the device when the run has ended, context included: right
            if nobody else uses it.
        with_enough: How it ended with no more than `Plan.enough_bytes`; "" if that was not tried.
        with_too_little: The same with 90 % of `Plan.allocated_bytes`.
    """

    ended: str
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    process_bytes: int = 0
    with_enough: str = ""
    with_too_little: str = ""


def model_named(name: str) -> Model:
    """Return a job."""
    return next(model for model in MODELS if model.name == name)


def run(plan: Plan) -> Outcome:
    """Train a job for a few steps in this process.

    Then again, from its beginning, with memory limited.
    """
    _free_everything()
    job = build(plan)
    _free_everything()  # what building left behind is not the step's
    ended = _trained(plan, job)
    torch.cuda.synchronize()
    free, all_bytes = torch.cuda.mem_get_info()
    outcome = Outcome(
        ended=ended,
        allocated_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        process_bytes=all_bytes - free,
    )
    if ended == _DONE and plan.enough_bytes:
        enough = _with_no_more_than(plan.enough_bytes, plan, job)
        outcome = replace(
            outcome,
            with_enough=enough,
            with_too_little=_with_no_more_than(int(0.9 * plan.allocated_bytes), plan, job),
        )
    del job
    _free_everything()
    return outcome


def _trained(plan: Plan, job: Parts) -> str:
    """Train, and say how that ended."""
    try:
        train(plan, job)
    except RuntimeError as error:  # also such as a grid that is too large for a kernel
        if find_out_of_memory(error) is not None:
            return "out of memory"
        return without_paths(f"{type(error).__name__}: {error}".splitlines()[0])
    return _DONE


def _with_no_more_than(bytes_: int, plan: Plan, job: Parts) -> str:
    for module in modules_of(job):
        module.zero_grad()
    for optimizer in optimizers_of(job):
        optimizer.state.clear()
    _free_everything()
    torch.cuda.set_per_process_memory_fraction(
        bytes_ / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        return _trained(plan, job)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _free_everything() -> None:
    gc.collect()
    # A process that begins has none: where they lie, a segment stays
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def build(plan: Plan) -> Parts:
    """Build a job as users do: on the host, then to the device.

    The batch is made there, where that is quick.
    """
    torch.manual_seed(0)
    job = model_named(plan.model).build(2)
    for module in modules_of(job):
        module.to("cuda")
    size = plan.micro_batch_size
    job["batch"] = tree_map_only(torch.Tensor, lambda tensor: _resized(tensor, size), job["batch"])
    return job


def _resized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return a batch of so many samples, all like the first, with memory of their own."""
    return tensor[:1].to("cuda").expand(size, *tensor.shape[1:]).contiguous()


def train(plan: Plan, job: Parts) -> None:
    """Make a few steps of a job that `build` has built."""
    scaler = torch.amp.GradScaler("cuda") if plan.precision == "fp16" else None
    for _ in range(STEPS):
        train_step(model_named(plan.model), job, job["batch"], plan.precision, scaler)
