"""Jobs of `forecast_models`, really trained on a CUDA device: what they need."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map_only

from benchmarks.forecast_models import MODELS, Model, Parts, modules_of, train_step
from benchmarks.results_file import without_paths

STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a job is to run, and what the forecast says of it.

    Args:
        model: Name of the job.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        micro_batch_size: Samples.
        allocated_bytes: Forecast of ``max_memory_allocated``.
        process_bytes: Forecast of what the process takes of the device.
    """

    model: str
    precision: str
    micro_batch_size: int
    allocated_bytes: int = 0
    process_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run needed.

    Args:
        ended: ``"done"``, ``"out of memory"``, or the first line of another error.
        allocated_bytes: ``max_memory_allocated``.
        reserved_bytes: ``max_memory_reserved``.
        process_bytes: What is taken of the device when the run has ended, context included: right if nobody else
            uses it.
    """

    ended: str
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    process_bytes: int = 0


def model_named(name: str) -> Model:
    """Return a job."""
    return next(model for model in MODELS if model.name == name)


def run(plan: Plan) -> Outcome:
    """Train a job for a few steps in this process."""
    _free_everything()
    try:
        job = build(plan)
        _free_everything()  # what building left behind is not the step's
        train(plan, job)
        ended = "done"
    except torch.OutOfMemoryError:
        ended = "out of memory"
    except RuntimeError as error:  # such as a grid that is too large for a kernel
        ended = without_paths(f"{type(error).__name__}: {error}".splitlines()[0])
    torch.cuda.synchronize()
    free, all_bytes = torch.cuda.mem_get_info()
    outcome = Outcome(
        ended=ended,
        allocated_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        process_bytes=all_bytes - free,
    )
    job = None
    _free_everything()
    return outcome


def _free_everything() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def build(plan: Plan) -> Parts:
    """Build a job as users do: on the host, then to the device; the batch is made there, where that is quick."""
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
