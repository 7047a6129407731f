"""Weights of the well-known public implementation (NVIDIA/tacotron2, torch.hub).

Same shapes, other names.

Its LSTMs were trained with dropout of 0.1 on their outputs, so train on with ``zoneout=0,
recurrent_dropout=0.1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_RENAMED = (
    (r"\.linear_layer\.", "."),
    (r"\.conv\.(weight|bias)$", r".\1"),
    (r"^embedding\.", "encoder.embedding."),
    (r"\.convolutions\.(\d+)\.0\.", r".blocks.\1.convolution."),
    (r"\.convolutions\.(\d+)\.1\.", r".blocks.\1.norm."),
    (r"^decoder\.(attention_rnn|decoder_rnn)\.", r"decoder.recurrence.\1."),
    (r"^decoder\.attention_layer\.", "decoder.recurrence.attention."),
    (r"attention\.query_layer\.", "attention.query."),
    (r"attention\.memory_layer\.", "attention.keys."),
    (r"attention\.v\.", "attention.energy."),
    (r"location_layer\.location_conv\.", "location_filters."),
    (r"location_layer\.location_dense\.", "location."),
    (r"^decoder\.linear_projection\.", "decoder.projection."),
    (r"^decoder\.gate_layer\.", "decoder.gate."),
)


def named_as_here(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the public implementation's weights under the names of `recipes.tacotron2.model`."""
    renamed = {}
    for name, value in state.items():
        for pattern, new in _RENAMED:
            name = re.sub(pattern, new, name)
        renamed[name] = value
    return renamed


def read_public_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a published file, ``{"state_dict": …}`` or the state itself.

    No code in it is run.

    Raises:
        ValueError: It holds no weights, or code.
        OSError: It cannot be read.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a file of something else makes the unpickler do anything
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path} holds no weights that can be read, or more than weights: {why}"
        ) from error
    state = found.get("state_dict", found) if isinstance(found, dict) else None
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no weights by name.")
    return named_as_here({name.removeprefix("module."): value for name, value in state.items()})
