"""Record what scripts log through common clients and frameworks, without a second call.

The logging functions are wrapped when the script imports their module. For each one, a function
here extracts the values and the step from its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.importing import ImportWatch
from holdfast.recorder.scalars import with_recording

# Values by name, and the step that they belong to; None means the current step.
_Logged = tuple[dict[str, Any], Any]


def read_trainer_log(trainer: Any, logs: Any, *_: Any, **__: Any) -> _Logged:
    """Return what ``transformers.Trainer.log`` logs, without the epoch that it always adds."""
    values = {name: value for name, value in logs.items() if name != "epoch"}
    return values, trainer.state.global_step


def read_lightning_log(connector: Any, metrics: Any, step: Any = None) -> _Logged:
    """Return what Lightning's trainer logs for ``self.log``.

    As in Lightning itself, a metric called "step" is the step if none is given.
    """
    values = dict(metrics)
    if step is None:
        usual_step = connector.trainer.fit_loop.epoch_loop._batches_that_stepped
        step = values.pop("step", usual_step)
    return values, step


def read_wandb_log(_run: Any, data: Any, step: Any = None, *_: Any, **__: Any) -> _Logged:
    """Return what ``wandb.log`` and ``Run.log`` log."""
    return data, step


def read_accelerate_log(
    _accelerator: Any, values: Any, step: Any = None, *_: Any, **__: Any
) -> _Logged:
    """Return what ``Accelerator.log`` logs."""
    return values, step


def read_scalar(
    _writer: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
) -> _Logged:
    """Return what ``SummaryWriter.add_scalar`` logs; the parameter names are the same."""
    return {tag: scalar_value}, global_step


def read_scalars(
    _writer: Any, main_tag: Any, tag_scalar_dict: Any, global_step: Any = None, *_: Any, **__: Any
) -> _Logged:
    """Return what ``SummaryWriter.add_scalars`` logs; the parameter names are the same."""
    return {main_tag: tag_scalar_dict}, global_step


_SUMMARY_WRITER = {
    "SummaryWriter.add_scalar": read_scalar,
    "SummaryWriter.add_scalars": read_scalars,
}
_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
_LIGHTNING = {"_LoggerConnector.log_metrics": read_lightning_log}
# For each module, its logging methods, each with the function that reads its arguments.
_LOGGING_METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.utils.tensorboard.writer": _SUMMARY_WRITER,
    "tensorboardX.writer": _SUMMARY_WRITER,
    "wandb.sdk.wandb_run": {"Run.log": read_wandb_log},
    "transformers.trainer": {"Trainer.log": read_trainer_log},
    "accelerate.accelerator": {"Accelerator.log": read_accelerate_log},
    f"lightning.pytorch.{_CONNECTOR}": _LIGHTNING,
    f"pytorch_lightning.{_CONNECTOR}": _LIGHTNING,
}


def install(watch: ImportWatch, note_error: Callable[[Any], None]) -> None:
    """Record what the script logs, through modules that it imports from now on."""

    def wrap_methods(module: Any) -> None:
        for name, read in _LOGGING_METHODS[module.__name__].items():
            class_name, method_name = name.split(".")
            owner = getattr(module, class_name)
            original = getattr(owner, method_name)
            setattr(owner, method_name, with_recording(original, read, note_error))

    for module_name in _LOGGING_METHODS:
        watch.when_imported(module_name, wrap_methods)
