"""Refuse Trainer settings that cannot be guarded."""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.integrations.refusals import check_accelerator, raise_first, unsupported

# An optimizer whose name contains one of these words updates weights during the backward pass.
_STEPS_IN_BACKWARD = ("lomo", "layerwise")
_LEAVE_OUT = "remove it."


def check_trainer(trainer: Any) -> None:
    """Refuse a Trainer whose steps cannot be guarded.

    Raises:
        PolicyError: H111 for the first unsupported setting.
    """
    check_accelerator(trainer.accelerator)
    rules = (
        _data_parallel,
        _smaller_batches_after_out_of_memory,
        _optimizer_that_steps_in_backward,
        _saves_within_a_step,
        _parallelism_within_a_step,
    )
    raise_first(rules, trainer)


def _data_parallel(trainer: Any) -> PolicyError | None:
    if trainer.args.n_gpu <= 1:
        return None
    return unsupported(
        f"n_gpu={trainer.args.n_gpu}",
        reason="DataParallel copies the model to each device, and the copies cannot be rolled back",
        fix="set CUDA_VISIBLE_DEVICES to one device, or start one process per device.",
    )


def _smaller_batches_after_out_of_memory(trainer: Any) -> PolicyError | None:
    if not trainer.args.auto_find_batch_size:
        return None
    return unsupported(
        "auto_find_batch_size=True",
        reason=(
            "after an out-of-memory error it restarts the loop with a smaller batch, while the"
            " guard splits the batch"
        ),
        fix=_LEAVE_OUT,
    )


def _optimizer_that_steps_in_backward(trainer: Any) -> PolicyError | None:
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if not any(word in optimizer for word in _STEPS_IN_BACKWARD):
        return None
    return unsupported(
        f"optim={optimizer}",
        reason="it updates weights during the backward pass, which cannot be undone",
        fix="use another optimizer.",
    )


def _saves_within_a_step(trainer: Any) -> PolicyError | None:
    if not getattr(trainer.args, "enable_jit_checkpoint", False):
        return None
    return unsupported(
        "enable_jit_checkpoint=True", reason="it saves in the middle of a step", fix=_LEAVE_OUT
    )


def _parallelism_within_a_step(trainer: Any) -> PolicyError | None:
    if getattr(trainer.accelerator, "parallelism_config", None) is None:
        return None
    return unsupported(
        "a parallelism_config", reason="it distributes a step over devices", fix=_LEAVE_OUT
    )
