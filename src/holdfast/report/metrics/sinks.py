"""Open sinks from what a user typed, such as ``--tensorboard DIR`` or ``--jsonl FILE``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.core.errors import PolicyError
from holdfast.core.text import sanitise
from holdfast.report.metrics.clients import JsonLines, TensorBoard, WandbRun
from holdfast.report.metrics.copying import Sink

# From a target and a run directory to a sink.
_OPENERS: dict[str, Callable[[str, Path], Sink]] = {
    "tensorboard": lambda target, _run: TensorBoard(Path(target)),
    "jsonl": lambda target, _run: JsonLines(target),
    "wandb": lambda target, run: WandbRun(target, run.name),
}
_EXTRAS = {"tensorboard": "metrics", "wandb": "wandb"}


def open_sinks(targets: Mapping[str, str], run: Path) -> list[Sink]:
    """Open a sink for each target.

    Args:
        targets: Targets by kind, such as ``{"tensorboard": "tb", "jsonl": "-"}``.
        run: The run directory.

    Raises:
        PolicyError: H742 if a client is not installed, H743 if a target cannot be used.
    """
    return [_open(kind, target, run) for kind, target in targets.items()]


def _open(kind: str, target: str, run: Path) -> Sink:
    try:
        return _OPENERS[kind](target, run)
    except ImportError as error:
        raise PolicyError(
            f"the client for {kind} is not installed ({error.name})",
            limit="metrics are written through the client of each tool",
            fix=f'install the extra: pip install "torch-holdfast[{_EXTRAS[kind]}]".',
            rule="H742",
        ) from error
    except Exception as error:  # clients raise what they like
        raise PolicyError(
            f"metrics target {kind}={target!r} cannot be opened "
            f"({type(error).__name__}: {sanitise(error, most=300)})",
            limit="it must be writable",
            fix="choose another target, or correct this one.",
            rule="H743",
        ) from error
