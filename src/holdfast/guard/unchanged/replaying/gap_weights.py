"""Save the weights with which the script evaluates its models between two loops.

When a script is resumed, its code between two finished loops runs again. If this code uses the
models outside of a ``for`` statement over a loader, it needs the weights that they had at that
point of the run, because the script may decide by the result whether to continue training. These
weights are saved in the run directory, in one file per gap between two loops:

``weights/<number of finished loops>.safetensors``
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from holdfast.checkpoint.tensor_files import SUFFIX, read_tensors, write_tensors


class GapWeights:
    """Saves the weights at the first use of a model between two loops.

    Args:
        run_dir: The run directory of the guard.
        on_failure: Called with the error if the weights cannot be saved.
    """

    def __init__(self, run_dir: Path, on_failure: Callable[[BaseException], None]) -> None:
        self._folder = run_dir / "weights"
        self._on_failure = on_failure
        self._process = os.getpid()
        self._remove_hook: Callable[[], None] | None = None

    def watch(self, number: int, models: Mapping[str, nn.Module]) -> None:
        """Save the weights at the next use of a model, because a loop that trains has ended.

        Args:
            number: The number of finished loops.
            models: The models by name.
        """
        self.stop()
        parts = {id(part) for model in models.values() for part in model.modules()}

        def save_once(module: nn.Module, _inputs: Any) -> None:
            # The hook is called for every module, and image transforms are modules too. Forked
            # loader workers inherit it.
            if id(module) in parts and os.getpid() == self._process:
                self.stop()
                self.save(number, models)

        self._remove_hook = register_module_forward_pre_hook(save_once).remove

    def stop(self) -> None:
        """No longer wait for a use of a model, because the gap has ended."""
        if self._remove_hook is not None:
            self._remove_hook()
            self._remove_hook = None

    def save(self, number: int, models: Mapping[str, nn.Module]) -> None:
        """Save the current weights. If that fails, `on_failure` is called.

        Args:
            number: The number of finished loops.
            models: The models by name.
        """
        draft = self._folder / f".tmp-{number}{SUFFIX}"
        try:
            self._folder.mkdir(exist_ok=True)
            draft.unlink(missing_ok=True)
            write_tensors(draft, _tensors_of(models))
            draft.replace(self._path(number))
        except (OSError, RuntimeError) as error:
            self._on_failure(error)

    def load(self, number: int, models: Mapping[str, nn.Module]) -> None:
        """Load the weights that were saved after this number of loops, if there are any."""
        path = self._path(number)
        if path.exists():
            read_tensors([path], _tensors_of(models), lambda _name, _shape: None)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}{SUFFIX}"


def _tensors_of(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the models by name."""
    return {
        f"{name}/{key}": value.detach()
        for name, model in models.items()
        for key, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
