"""Refuse Lightning settings that a guard does not support, in general or on several ranks."""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.integrations.refusals import load, raise_first, unsupported

load("lightning.pytorch")
from lightning.pytorch.callbacks import OnExceptionCheckpoint  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402


def check_module(module: Any) -> None:
    """Refuse a ``LightningModule`` whose steps cannot be guarded.

    Raises:
        PolicyError: H111 for the first unsupported setting.
    """
    raise_first((_takes_dataloader_iter, _runs_backward_itself), module)


def _takes_dataloader_iter(module: Any) -> PolicyError | None:
    if not is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return None
    return unsupported(
        "training_step takes dataloader_iter",
        reason="a step can be repeated only if the guard has its batch",
        fix="take batch instead.",
    )


def _runs_backward_itself(module: Any) -> PolicyError | None:
    if not module.automatic_optimization or not is_overridden("backward", module):
        return None
    return unsupported(
        "LightningModule.backward is overridden",
        reason="the guard runs backward itself, possibly several times",
        fix=(
            "remove the method, or use manual optimization with"
            " self.trainer.strategy.guarded_step(...)."
        ),
    )


def check_ranks(module: Any) -> None:
    """Refuse settings that are not supported on several ranks.

    Args:
        module: The ``LightningModule``, under a ``DDPStrategy``.

    Raises:
        PolicyError: H111 for the first unsupported setting.
    """
    rules = (_optimizes_manually, _accumulates, _averages_models, _saves_on_exceptions)
    raise_first(rules, module)


def _unsupported_on_ranks(setting: str, module: Any, *, reason: str) -> PolicyError:
    return unsupported(
        f"{setting} with {module.trainer.world_size} ranks",
        reason=reason,
        fix="remove it, or train on one device.",
    )


def _optimizes_manually(module: Any) -> PolicyError | None:
    if module.automatic_optimization:
        return None
    return _unsupported_on_ranks(
        "manual optimization", module, reason="each rank would choose its steps on its own"
    )


def _accumulates(module: Any) -> PolicyError | None:
    trainer = module.trainer
    batches_per_step = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:
        # Only a ``GradientAccumulationScheduler`` has this attribute.
        batches_per_step.extend(getattr(callback, "scheduling", {}).values())
    most = max(batches_per_step)
    if most <= 1:
        return None
    reason = (
        "ranks communicate only at the last batch of a step. Use larger batches instead, which are"
        " split if memory runs out"
    )
    return _unsupported_on_ranks(f"accumulate_grad_batches={most}", module, reason=reason)


def _averages_models(module: Any) -> PolicyError | None:
    if module.trainer.strategy._model_averager is None:
        return None
    return _unsupported_on_ranks(
        "model_averaging_period",
        module,
        reason="the weights differ between ranks until they are averaged",
    )


def _saves_on_exceptions(module: Any) -> PolicyError | None:
    for callback in module.trainer.callbacks:
        if isinstance(callback, OnExceptionCheckpoint) or getattr(
            callback, "save_on_exception", False
        ):
            return _unsupported_on_ranks(
                "a checkpoint on exceptions",
                module,
                reason="a failing rank would wait in the save for the other ranks",
            )
    return None
