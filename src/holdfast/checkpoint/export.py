"""Export the weights of a checkpoint to a single safetensors file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

from holdfast.checkpoint.codec import SAVED_AS
from holdfast.checkpoint.loading import read_components, read_state
from holdfast.checkpoint.read_errors import reading
from holdfast.checkpoint.store import Entry
from holdfast.checkpoint.tensor_files import write_tensors
from holdfast.core.errors import CheckpointError


def export(entry: Entry, path: Path, *, averaged: bool = False) -> None:
    """Write the weights of a checkpoint to a safetensors file, merging the shares of all ranks.

    Tensors have the same names as in the model's ``state_dict``. If there are several models, the
    name of each tensor is prefixed with the name of its model.

    Args:
        entry: The checkpoint.
        path: The file to write. An existing file is replaced.
        averaged: Whether to write the averaged weights (``Guard(averaged=...)``) instead of the
            model's own weights.

    Raises:
        CheckpointError: H310 if the checkpoint does not contain these weights, or the safetensors
            format cannot store them.
        OSError: The file cannot be written.
    """
    if averaged:
        # `AveragedModel` stores the averaged weights under this prefix. Its counter of averaged
        # models does not have the prefix and is not exported.
        tensors = _weights_of(entry, kind="state.averaged", inside="module.")
    else:
        tensors = _weights_of(entry, kind="model")
    if not tensors:
        raise _no_weights(entry, averaged=averaged)
    for name, tensor in tensors.items():
        if tensor.dtype not in SAVED_AS or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{name} is a tensor of {tensor.dtype}, which cannot be exported",
                limit="a safetensors file can only store dense tensors of real numbers",
                fix="load the checkpoint with a Guard instead.",
                rule="H310",
            )
    _check_replaceable(path)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write_tensors(temporary, tensors)
        temporary.replace(path)
    except OSError as error:
        # The error names the requested path, because users do not know about the temporary file.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _no_weights(entry: Entry, *, averaged: bool) -> CheckpointError:
    if averaged:
        return CheckpointError(
            f"{entry.path.name} contains no averaged weights",
            limit="averaged weights are saved only if Guard has averaged=",
            fix="pass averaged= to Guard, or export the model's weights with --export.",
            rule="H310",
        )
    return CheckpointError(
        f"{entry.path.name} contains no weights",
        limit="only tensors in a model's state_dict are exported",
        fix="pass the model to Guard, so that its weights are saved.",
        rule="H310",
    )


def _weights_of(entry: Entry, kind: str, inside: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of all components of one kind.

    Args:
        entry: The checkpoint.
        kind: Prefix of the component names: ``"model"`` selects ``"model"`` and ``"model.<name>"``.
        inside: Only tensors whose names start with this prefix are returned. The prefix is removed.
    """
    components = [name for name in read_state(entry) if f"{name}.".startswith(f"{kind}.")]
    tensors: dict[str, torch.Tensor] = {}
    for component, tree in read_components(entry, components).items():
        # With several models, the model's name distinguishes tensors of the same name.
        prefix = ""
        if len(components) > 1:
            prefix = f"{component.removeprefix(f'{kind}.')}."
        with reading(entry.path):
            items = list(tree.items())
        for name, value in items:
            if isinstance(value, torch.Tensor) and name.startswith(inside):
                tensors[prefix + name.removeprefix(inside)] = value
    return tensors


def _check_replaceable(path: Path) -> None:
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise OSError(
            errno.EEXIST,
            "the path is a link, a device or a folder, which holdfast does not replace",
            str(path),
        )
