"""Which settings of a Hugging Face Trainer a guarded step cannot keep its promises with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.integrations.frameworks import excluded, load

_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_STEPS_IN_BACKWARD = ("lomo", "layerwise")


def precision_of(accelerator: Any) -> str:
    """Return the precision that an ``accelerate.Accelerator`` computes in, as the policy spells it.

    Asked for fp16 on a CPU it computes in fp32, without a word.

    Raises:
        PolicyError: H111, for another than fp32, bf16 and fp16.
    """
    found = str(accelerator.mixed_precision)
    if found not in _PRECISIONS:
        raise excluded(
            f"mixed_precision={found!r}",
            "a guarded step knows fp32, bf16 and fp16",
            "use one of these.",
        )
    return _PRECISIONS[found] if accelerator.native_amp else "fp32"


def check_one_process(accelerator: Any) -> None:
    """Refuse what spreads one step over several processes or engines.

    Raises:
        PolicyError: H108 for several processes, H111 for an engine that owns the optimizer.
    """
    if accelerator.num_processes > 1:
        raise PolicyError(
            f"num_processes={accelerator.num_processes}",
            limit="this version guards one process; ranks that retry or skip by themselves would diverge",
            fix="start one process, for instance with CUDA_VISIBLE_DEVICES=0 and without torchrun; "
            "`holdfast run` watches any number.",
            rule="H108",
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO":
        raise excluded(
            f"distributed_type={kind}",
            "such an engine runs backward and the optimizer itself, so that a step cannot be taken back",
            "train without it, or under `holdfast run` instead.",
        )


def check_supported(trainer: Any) -> None:
    """Refuse a Trainer that cannot be guarded.

    Raises:
        PolicyError: H108 or H111, naming the setting.
    """
    check_one_process(trainer.accelerator)
    precision_of(trainer.accelerator)
    for what, why, fix in _found(trainer):
        raise excluded(what, why, fix)


def _found(trainer: Any) -> Iterator[tuple[str, str, str]]:
    args = trainer.args
    if args.n_gpu > 1:
        yield (
            f"n_gpu={args.n_gpu}",
            "the Trainer would spread each batch by DataParallel, whose copies a step cannot take back",
            "set CUDA_VISIBLE_DEVICES to one device.",
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True",
            "it starts the loop again with a smaller batch; a guarded step keeps the batch and survives inside it",
            "leave it out.",
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in _STEPS_IN_BACKWARD):
        yield f"optim={optimizer}", "it moves weights during backward, which cannot be taken back", "use another one."
    if getattr(args, "enable_jit_checkpoint", False):
        yield (
            "enable_jit_checkpoint=True",
            "it saves in the middle of a step; SIGTERM is honoured by holdfast at the end of one",
            "leave it out.",
        )
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        yield "a parallelism_config", "it spreads a step over devices", "leave it out."


def late_callbacks(trainer: Any) -> list[str]:
    """Return the callbacks that might change gradients where a guarded step is made already."""
    plain = load("transformers").TrainerCallback.on_pre_optimizer_step
    callbacks = trainer.callback_handler.callbacks
    return [type(each).__name__ for each in callbacks if type(each).on_pre_optimizer_step is not plain]
