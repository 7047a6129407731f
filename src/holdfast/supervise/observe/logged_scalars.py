"""Record the values that scripts log through trackers such as W&B, and through frameworks.

The logging functions of these packages are wrapped when the script imports them, so scripts need no
changes. Each `read_*` function takes the arguments of one logging function and extracts the values
and the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.importing import ImportWatch
from holdfast.recorder.scalars import with_recording

# The logged values, keyed by name, and the step for which they are logged. None means the current
# step.
_Logged = tuple[dict[str, Any], Any]


def read_trainer_log(trainer: Any, logs: Any, *_: Any, **__: Any) -> _Logged:
    """Read a call to ``transformers.Trainer.log``, ignoring the epoch that the trainer adds."""
    values = {name: value for name, value in logs.items() if name != "epoch"}
    return values, trainer.state.global_step


def read_lightning_log(connector: Any, metrics: Any, step: Any = None) -> _Logged:
    """Read the metrics that Lightning's trainer logs for ``self.log``.

    As in Lightning itself, a metric named "step" supplies the step if the argument is missing.
    """
    values = dict(metrics)
    if step is None:
        usual_step = connector.trainer.fit_loop.epoch_loop._batches_that_stepped
        step = values.pop("step", usual_step)
    return values, step


def read_wandb_log(_run: Any, data: Any, step: Any = None, *_: Any, **__: Any) -> _Logged:
    """Read a call to ``wandb.log`` or ``Run.log``."""
    return data, step


def read_trackio_log(_run: Any, metrics: Any, step: Any = None) -> _Logged:
    """Read a call to ``Run.log`` of trackio, which ``trackio.log`` calls."""
    return metrics, step


def read_mlflow_metric(key: Any, value: Any, step: Any = None, *_: Any, **__: Any) -> _Logged:
    """Read a call to ``mlflow.log_metric``."""
    return {key: value}, step


def read_mlflow_metrics(metrics: Any, step: Any = None, *_: Any, **__: Any) -> _Logged:
    """Read a call to ``mlflow.log_metrics``."""
    return metrics, step


def read_mlflow_client_metric(
    _client: Any,
    run_id: Any,  # noqa: ARG001
    key: Any,
    value: Any,
    timestamp: Any = None,  # noqa: ARG001
    step: Any = None,
    *_: Any,
    **__: Any,
) -> _Logged:
    """Read a call to ``MlflowClient.log_metric``; see `read_scalar` for the parameter names."""
    return {key: value}, step


def read_mlflow_batch(
    _client: Any,
    run_id: Any,  # noqa: ARG001
    metrics: Any = (),
    *_: Any,
    **__: Any,
) -> _Logged:
    """Read a call to ``MlflowClient.log_batch``, whose metrics usually share one step."""
    values = {metric.key: metric.value for metric in metrics}
    return values, next((metric.step for metric in metrics), None)


def read_accelerate_log(
    _accelerator: Any, values: Any, step: Any = None, *_: Any, **__: Any
) -> _Logged:
    """Read a call to ``Accelerator.log``."""
    return values, step


def read_scalar(
    _writer: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
) -> _Logged:
    """Read a call to ``SummaryWriter.add_scalar``.

    The parameter names must be those of the original, because arguments may be keyword arguments.
    """
    return {tag: scalar_value}, global_step


def read_scalars(
    _writer: Any, main_tag: Any, tag_scalar_dict: Any, global_step: Any = None, *_: Any, **__: Any
) -> _Logged:
    """Read a call to ``SummaryWriter.add_scalars``; see `read_scalar` for the parameter names."""
    return {main_tag: tag_scalar_dict}, global_step


_SUMMARY_WRITER = {
    "SummaryWriter.add_scalar": read_scalar,
    "SummaryWriter.add_scalars": read_scalars,
}
_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
_LIGHTNING = {"_LoggerConnector.log_metrics": read_lightning_log}
# The logging functions and methods to wrap in each module, with the functions that read their
# arguments.
_LOGGING_METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.utils.tensorboard.writer": _SUMMARY_WRITER,
    "tensorboardX.writer": _SUMMARY_WRITER,
    "wandb.sdk.wandb_run": {"Run.log": read_wandb_log},
    "trackio.run": {"Run.log": read_trackio_log},
    "mlflow.tracking.fluent": {
        "log_metric": read_mlflow_metric,
        "log_metrics": read_mlflow_metrics,
    },
    "mlflow.tracking.client": {
        "MlflowClient.log_metric": read_mlflow_client_metric,
        "MlflowClient.log_batch": read_mlflow_batch,
    },
    "transformers.trainer": {"Trainer.log": read_trainer_log},
    "accelerate.accelerator": {"Accelerator.log": read_accelerate_log},
    f"lightning.pytorch.{_CONNECTOR}": _LIGHTNING,
    f"pytorch_lightning.{_CONNECTOR}": _LIGHTNING,
}


def install(watch: ImportWatch, note_error: Callable[[Any], None]) -> None:
    """Wrap the logging functions of every listed module that the script imports from now on."""

    def wrap_methods(module: Any) -> None:
        for name, read in _LOGGING_METHODS[module.__name__].items():
            class_name, _, method_name = name.rpartition(".")
            owner = getattr(module, class_name) if class_name else module
            original = getattr(owner, method_name)
            setattr(owner, method_name, with_recording(original, read, note_error))

    for module_name in _LOGGING_METHODS:
        watch.when_imported(module_name, wrap_methods)
