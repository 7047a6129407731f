"""What scripts log by the usual clients and frameworks, read where they log it, so that it needs no second call.

Does not: record (see ``recorder.scalars``), nor import any of them: each is wrapped when the script imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from holdfast.core.importing import ImportWatch
from holdfast.recorder.scalars import Logged, recorded_too


def _scalar(_writer: Any, tag: str, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any) -> Logged:
    return {tag: scalar_value}, global_step, None


def _scalars(
    _writer: Any, main_tag: str, tag_scalar_dict: Mapping[str, Any], global_step: Any = None, *_: Any, **__: Any
) -> Logged:
    return {main_tag: tag_scalar_dict}, global_step, None


def _of_run(_run: Any, data: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> Logged:
    return data, step, None


def of_accelerator(_accelerator: Any, values: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> Logged:
    """Return what ``Accelerator.log`` logs."""
    return values, step, None


def of_trainer(trainer: Any, logs: Mapping[str, Any], *_: Any, **__: Any) -> Logged:
    """Return what ``transformers.Trainer.log`` logs; it adds the epoch to each."""
    epoch = trainer.state.epoch
    values = {name: value for name, value in logs.items() if name != "epoch"}
    return values, trainer.state.global_step, None if epoch is None else int(epoch)


def of_lightning(connector: Any, metrics: Mapping[str, Any], step: Any = None) -> Logged:
    """Return what Lightning's trainer logs of ``self.log``; one that is called "step" is the step, as there."""
    trainer, values = connector.trainer, dict(metrics)
    if step is None:
        step = values.pop("step", trainer.fit_loop.epoch_loop._batches_that_stepped)
    return values, step, trainer.current_epoch


_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
_WRITER = "SummaryWriter", {"add_scalar": _scalar, "add_scalars": _scalars}
_LIGHTNING = "_LoggerConnector", {"log_metrics": of_lightning}
# By module: the class and its methods. `wandb.log` is the method of the run.
_WHERE: dict[str, tuple[str, dict[str, Callable[..., Logged]]]] = {
    "torch.utils.tensorboard.writer": _WRITER,
    "tensorboardX.writer": _WRITER,
    "wandb.sdk.wandb_run": ("Run", {"log": _of_run}),
    "transformers.trainer": ("Trainer", {"log": of_trainer}),
    "accelerate.accelerator": ("Accelerator", {"log": of_accelerator}),
    f"lightning.pytorch.{_CONNECTOR}": _LIGHTNING,
    f"pytorch_lightning.{_CONNECTOR}": _LIGHTNING,
}


def install(watch: ImportWatch, failed: Callable[[BaseException], None]) -> None:
    """Record what is logged from now on; errors of ours are given to `failed`."""
    for name, (owner, methods) in _WHERE.items():
        watch.when_imported(name, partial(_wrap, owner, methods, failed))


def _wrap(
    owner: str, methods: Mapping[str, Callable[..., Logged]], failed: Callable[[BaseException], None], module: Any
) -> None:
    found = getattr(module, owner)
    for name, read in methods.items():
        setattr(found, name, recorded_too(getattr(found, name), read, failed))
