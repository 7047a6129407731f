"""What scripts log by the usual clients and frameworks, read where they log it, so that it needs
no second call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.importing import ImportWatch
from holdfast.recorder.scalars import recorded_too


def of_trainer(trainer: Any, logs: Any, *_: Any, **__: Any) -> Any:
    """Return what ``transformers.Trainer.log`` logs, but the epoch, which it adds to each."""
    return {
        name: value for name, value in logs.items() if name != "epoch"
    }, trainer.state.global_step


def of_lightning(connector: Any, metrics: Any, step: Any = None) -> Any:
    """Return what Lightning's trainer logs of ``self.log``.

    One that is called "step" is the step, as there.
    """
    values, usual = dict(metrics), connector.trainer.fit_loop.epoch_loop._batches_that_stepped
    return values, values.pop("step", usual) if step is None else step


_WRITER: dict[str, Callable[..., Any]] = {
    "SummaryWriter.add_scalar": lambda _, tag, scalar_value, global_step=None, *__, **___: (
        {tag: scalar_value},
        global_step,
    ),
    "SummaryWriter.add_scalars": (
        lambda _, main_tag, tag_scalar_dict, global_step=None, *__, **___: (
            {main_tag: tag_scalar_dict},
            global_step,
        )
    ),
}
_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
_WHERE: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.utils.tensorboard.writer": _WRITER,
    "tensorboardX.writer": _WRITER,
    # Also `wandb.log`
    "wandb.sdk.wandb_run": {"Run.log": lambda _, data, step=None, *__, **___: (data, step)},
    "transformers.trainer": {"Trainer.log": of_trainer},
    "accelerate.accelerator": {
        "Accelerator.log": lambda _, values, step=None, *__, **___: (values, step)
    },
    f"lightning.pytorch.{_CONNECTOR}": {"_LoggerConnector.log_metrics": of_lightning},
    f"pytorch_lightning.{_CONNECTOR}": {"_LoggerConnector.log_metrics": of_lightning},
}


def install(watch: ImportWatch, failed: Callable[[Any], None]) -> None:
    """Record what is logged from now on, by modules that the script imports.

    Errors of ours go to `failed`.
    """

    def wrap(module: Any) -> None:
        for name, read in _WHERE[module.__name__].items():
            owner, method = name.split(".")
            found = getattr(module, owner)
            setattr(found, method, recorded_too(getattr(found, method), read, failed))

    for name in _WHERE:
        watch.when_imported(name, wrap)
