"""Write the weights of a checkpoint to one plain safetensors file."""

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

    Names are those of the model's parameters. If there are several models, each name is prefixed
    with the model's name.

    Args:
        entry: The checkpoint.
        path: The file, which is replaced if it exists.
        averaged: Whether to write the weights of ``Guard(averaged=...)`` instead.

    Raises:
        CheckpointError: H310 if the checkpoint has no such weights, or the format cannot hold them.
        OSError: The file cannot be written.
    """
    if averaged:
        # AveragedModel keeps the averaged module under this name, beside a counter.
        tensors = _weights_of(entry, kind="state.averaged", inside="module.")
    else:
        tensors = _weights_of(entry, kind="model")
    if not tensors:
        raise _no_weights(entry, averaged=averaged)
    for name, tensor in tensors.items():
        if tensor.dtype not in SAVED_AS or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{name} is a tensor of {tensor.dtype}",
                limit="a safetensors file holds dense tensors of real numbers",
                fix="read it with a Guard instead.",
                rule="H310",
            )
    _check_replaceable(path)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write_tensors(temporary, tensors)
        temporary.replace(path)
    except OSError as error:
        # The error must not name the temporary file, which the user does not know.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _no_weights(entry: Entry, *, averaged: bool) -> CheckpointError:
    if averaged:
        return CheckpointError(
            f"{entry.path.name} holds no averaged weights",
            limit="only a run that keeps an average has them",
            fix="pass averaged= to Guard, or use --export.",
            rule="H310",
        )
    return CheckpointError(
        f"{entry.path.name} holds no weights",
        limit="only tensors in the state_dict of a model are exported",
        fix="pass the model that has them to Guard.",
        rule="H310",
    )


def _weights_of(entry: Entry, kind: str, inside: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of all components of a kind.

    Args:
        entry: The checkpoint.
        kind: ``"model"`` for the components ``"model"`` and ``"model.<name>"``, and so on.
        inside: A prefix: only tensors whose names begin with it are returned, without the prefix.
    """
    components = [name for name in read_state(entry) if f"{name}.".startswith(f"{kind}.")]
    tensors: dict[str, torch.Tensor] = {}
    for component, tree in read_components(entry, components).items():
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
            "the path is a link, a device or a folder, which is not replaced",
            str(path),
        )
