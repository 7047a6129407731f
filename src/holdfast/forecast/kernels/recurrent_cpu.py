"""oneDNN's LSTM on the fake CPU: its workspace, of which torch's fake kernel says 0 bytes, and its scratch.

The sizes follow set_conf and set_workspace_sizes in oneDNN (src/cpu/rnn/rnn_utils.hpp and .cpp) and agree to the
byte with fourteen shapes measured on torch 2.13.0+cpu. torch takes oneDNN for LSTMs without projections only; other
recurrent layers are composites that need nothing here.

Does not: know cuDNN (``recurrent_sizes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.forecast.kernels.fake_kernels import FakeKernel
from holdfast.forecast.kernels.scratch_cuda import Arguments, Need

aten = torch.ops.aten
_PAGE = 4096
_GATES = 4
_FIXED_BYTES = 4664  # of the scratchpad; the remainder of all measured ones


def _leading(size: int, element_bytes: int) -> int:
    """get_good_ld: a multiple of 64 bytes that is not one of 256 elements."""
    step = 64 // element_bytes
    rounded = -(-size // step) * step
    return rounded + step if rounded % 256 == 0 else rounded


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def workspace_bytes(*, steps: int, batch: int, features: int, hidden: int, element_bytes: int) -> int:
    """What one layer in one direction keeps for its backward pass."""
    wide = _leading(max(features, hidden), element_bytes)
    single_wide = _leading(max(features, hidden), 4)
    states = 2 * (steps + 1) * batch
    parts = (
        steps * batch * _leading(_GATES * hidden, element_bytes) * element_bytes,
        steps * batch * _leading(hidden, element_bytes) * element_bytes,
        states * wide * element_bytes,
        states * hidden * element_bytes,
        states * single_wide * 4,
        states * single_wide * 4,
        states * hidden * 4,
    )
    return sum(_pages(part) for part in parts)


def _sizes(given: Arguments) -> tuple[int, int, int, int, int]:
    data = given["input"]
    steps, batch = (
        data.shape[0],
        data.shape[1],
    )  # time comes first whatever batch_first says: it was transposed before
    return steps, batch, data.shape[2], given["hidden_size"], data.element_size()


def forward(given: Arguments, _out: Any) -> Need:
    """`aten.mkldnn_rnn_layer`: the sum of the biases, the weights laid out anew, and a scratchpad."""
    steps, batch, features, hidden, element = _sizes(given)
    gates = _leading(_GATES * hidden, element)
    size = _GATES * hidden * element + (features + hidden) * gates * element + _scratchpad(steps, batch, hidden)
    return Need(size, size)


def backward(given: Arguments, _out: Any) -> Need:
    """`aten.mkldnn_rnn_layer_backward`: the same for the gradients, and the weights if their rows need filling up."""
    steps, batch, features, hidden, element = _sizes(given)
    gates = _leading(_GATES * hidden, 4)
    size = _GATES * hidden * element + (features + hidden) * gates * 4 + _scratchpad(steps, batch, hidden)
    for width in (features, hidden):
        filled = _leading(width, element)
        if filled != width:
            size += _GATES * hidden * filled * element
    gradient = given["grad_output"]
    if gradient is None or not gradient.is_contiguous():
        size += steps * batch * hidden * element  # one half of a bidirectional output, or zeros
    return Need(size, size)


def _scratchpad(steps: int, batch: int, hidden: int) -> int:
    """The gates of all steps, and two states of a cell."""
    gates = steps * batch * _leading(_GATES * hidden, 4) * 4
    return _pages(gates) + 2 * _pages(batch * _leading(hidden, 4) * 4) + _FIXED_BYTES


def _kept(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """As torch's fake kernel, with a workspace."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    data, hidden, cell = given["input"], given["hx_"], given["cx_"]
    steps, batch, features, width, element = _sizes(given)
    size = workspace_bytes(steps=steps, batch=batch, features=features, hidden=width, element_bytes=element)
    with mode:
        out = data.new_empty((steps, batch, width))
        workspace = data.new_empty((size,), dtype=torch.uint8)
        return out, hidden.new_empty(hidden.shape), cell.new_empty(cell.shape), workspace


FAKE_KERNELS: Mapping[Any, FakeKernel] = {aten.mkldnn_rnn_layer.default: _kept}
