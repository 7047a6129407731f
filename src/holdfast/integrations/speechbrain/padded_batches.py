"""Split SpeechBrain's ``PaddedBatch`` into parts when memory is short."""

from __future__ import annotations

import copy
from typing import Any

from holdfast.loader.splitting import Split

# ``PaddedBatch`` stores the keys of its fields and its number of samples in private attributes,
# whose names Python mangles. The attributes are found by these suffixes.
_KEYS_SUFFIX = "__keys"
_LENGTH_SUFFIX = "__length"


def split_of(batch: Any) -> Split:
    """Return the ``split`` argument of `Guard.step` that suits the type of a batch."""
    return split_padded if is_padded(batch) else 0


def is_padded(batch: Any) -> bool:
    """Return whether a batch is a ``PaddedBatch``, whose fields are attributes."""
    return hasattr(batch, "at_position") and hasattr(batch, "batchsize")


def split_padded(batch: Any, size: int) -> list[Any]:
    """Split a ``PaddedBatch`` into parts of at most `size` samples.

    The parts keep the padding of the whole batch, so the relative lengths remain correct.
    """
    keys_attribute = next(name for name in vars(batch) if name.endswith(_KEYS_SUFFIX))
    length_attribute = keys_attribute.removesuffix(_KEYS_SUFFIX) + _LENGTH_SUFFIX
    parts = []
    for start in range(0, len(batch), size):
        samples = slice(start, start + size)
        part = copy.copy(batch)
        for key in vars(batch)[keys_attribute]:
            setattr(part, key, _select(batch[key], samples))
        # The last part may have fewer samples than the others.
        setattr(part, length_attribute, min(size, len(batch) - start))
        parts.append(part)
    return parts


def _select(field: Any, samples: slice) -> Any:
    """Return the given samples of a field, which is a list, a tensor or a ``PaddedData``."""
    if not hasattr(field, "lengths"):
        return field[samples]
    return type(field)(field.data[samples], field.lengths[samples])
