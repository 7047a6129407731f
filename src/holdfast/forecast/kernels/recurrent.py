"""`nn.LSTM`, `nn.GRU` and `nn.RNN` on the fake device as cuDNN runs them, and torch's fused GRU cell.

The sequence of allocations follows aten/src/ATen/native/cudnn/RNN.cpp and, under autocast, cudnn/AutocastRNN.cpp: it
casts to fp16 whatever the autocast type is, into one flat copy of the weights that lives until the backward pass. The
gradients of the weights are views of one buffer. Where cuDNN would not be taken (switched off, or bf16 before compute
capability 8), torch's own steps run instead, as on the device.

Does not: compute anything, know the sizes of the reserve and the workspace (`recurrent_sizes`), or do packing and
padding (`sequences`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.forecast.kernels.attention_choice import Hardware
from holdfast.forecast.kernels.recurrent_sizes import (
    RecurrentSize,
    reserve_bytes,
    reserve_upper_bytes,
    workspace_bytes,
    workspace_upper_bytes,
)

# "Each state is slightly over 2MB" (get_dropout_state in RNN.cpp); one for each device, kept for good.
_DROPOUT_STATE_BYTES = 2 * 2**20 + 2**18

Uncertain = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How the arguments of one call are laid out.

    Args:
        size: The sizes.
        batch_first: Whether the input is ``(batch, time, features)``.
        packed: Whether the input is the data of a packed sequence.
        training: Whether a reserve is kept.
    """

    size: RecurrentSize
    batch_first: bool
    packed: bool
    training: bool


class _FlatHalf(torch.autograd.Function):
    """fp16 copies of all weights as views of one buffer (copy_weights_to_flat_buf_views)."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        return _views(_flat(weights, torch.float16), weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return tuple(None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs)


class _Layers(torch.autograd.Function):
    """One call of cuDNN: allocates what it allocates, in its order."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: _Layout,
        data: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = layout.size
        x = _time_major(data, layout).contiguous()  # a copy where the batch comes first
        width = (size.projection or size.hidden) * size.directions
        y = data.new_empty((*x.shape[:-1], width))
        last = hidden.new_empty((size.layers * size.directions, size.batch, size.projection or size.hidden))
        last_cell = hidden.new_empty((0,)) if cell is None else torch.empty_like(cell)
        workspace = data.new_empty((workspace_bytes(size),), dtype=torch.uint8)
        reserve = data.new_empty((reserve_bytes(size) if layout.training else 0,), dtype=torch.uint8)
        del workspace, x
        ctx.layout = layout
        ctx.save_for_backward(data, hidden, cell, y, reserve, *weights)
        ctx.set_materialize_grads(False)
        return (y.transpose(0, 1) if layout.batch_first else y), last, last_cell

    @staticmethod
    def backward(
        ctx: Any,
        grad_y: torch.Tensor | None,
        grad_last: torch.Tensor | None,
        grad_cell: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        layout: _Layout = ctx.layout
        if not layout.training:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        data, hidden, cell, y, _reserve, *weights = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(y)
        elif layout.batch_first:
            grad_y = grad_y.transpose(0, 1)
        grad_last = torch.zeros_like(hidden) if grad_last is None else grad_last
        grad_cell = torch.zeros_like(cell) if grad_cell is None and cell is not None else grad_cell
        del grad_last, grad_cell
        grad_data, grad_hidden, grad_first_cell = _backward_of_input(layout, data, hidden, cell, grad_y)
        grad_weights: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[4:]):
            grad_weights = _backward_of_weights(layout, data, weights)
        wanted = (grad_data, grad_hidden, grad_first_cell)
        needed = zip(wanted, ctx.needs_input_grad[1:4], strict=True)
        return (None, *(gradient if need else None for gradient, need in needed), *grad_weights)


class _FusedGruCell(torch.autograd.Function):
    """torch's own fused cell, which has no meta kernel: aten/src/ATen/native/cuda/RNN.cu, derivatives.yaml."""

    @staticmethod
    def forward(
        ctx: Any,
        input_gates: torch.Tensor,
        hidden_gates: torch.Tensor,
        hidden: torch.Tensor,
        input_bias: torch.Tensor | None,
        _hidden_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        workspace = hidden.new_empty((hidden.shape[0], hidden.shape[1] * 5))
        ctx.save_for_backward(input_gates, hidden_gates, hidden, workspace)
        ctx.biases = input_bias is not None
        ctx.mark_non_differentiable(workspace)
        return torch.empty_like(hidden), workspace

    @staticmethod
    def backward(
        ctx: Any, _gradient: torch.Tensor, _workspace_gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        input_gates, hidden_gates, hidden, _workspace = ctx.saved_tensors
        grad_input, grad_hidden_gates = torch.empty_like(input_gates), torch.empty_like(hidden_gates)
        grad_hidden = torch.empty_like(hidden)
        biases = (grad_input.sum(0), grad_hidden_gates.sum(0)) if ctx.biases else (None, None)
        return grad_input, grad_hidden_gates, grad_hidden, *biases


class RecurrentLayers:
    """The fused recurrent layers of one fake device.

    Args:
        hardware: The device to stand in for.
        uncertain: Called with a name and the bytes by which a size may be larger than was taken.
    """

    def __init__(self, hardware: Hardware, uncertain: Uncertain) -> None:
        self._hardware = hardware
        self._uncertain = uncertain
        self._dropout_state: torch.Tensor | None = None

    def run(
        self,
        mode: str,
        data: torch.Tensor,
        states: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        *,
        layers: int,
        dropout: float,
        training: bool,
        bidirectional: bool,
        batch_first: bool = False,
        packed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the layers.

        Returns:
            Output, last hidden state, and last cell state (empty unless it is an LSTM).
        """
        hidden, cell = states[0], states[1] if len(states) > 1 else None
        device = data.device.type
        if torch.is_autocast_enabled(device) and data.dtype is not torch.float64:
            data, hidden = data.to(torch.float16), hidden.to(torch.float16)
            cell = None if cell is None else cell.to(torch.float16)
            if weights[0].dtype is not torch.float16:
                weights = _FlatHalf.apply(*weights)  # type: ignore[no-untyped-call]
        width = (hidden if cell is None else cell).shape[-1]
        size = RecurrentSize(
            mode=mode,
            hidden=width,
            projection=hidden.shape[-1] if hidden.shape[-1] != width else 0,
            layers=layers,
            directions=2 if bidirectional else 1,
            batch=hidden.shape[1],
            rows=data.shape[0] if packed else data.shape[0] * data.shape[1],
            weights=sum(weight.numel() for weight in weights),
            biases=sum(weight.numel() for weight in weights if weight.dim() == 1),
            element_bytes=data.element_size(),
            dropout=dropout if training else 0.0,
        )
        self._keep_dropout_state(size, data)
        self._say_uncertain(size, training=training)
        layout = _Layout(size=size, batch_first=batch_first and not packed, packed=packed, training=training)
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Layers.apply(  # type: ignore[no-untyped-call]
            layout, data, hidden, cell, *weights
        )
        return out

    def takes(self, data: torch.Tensor) -> bool:
        """Say whether torch would hand this input to cuDNN (use_cudnn in RNN.cpp)."""
        if not torch.backends.cudnn.enabled or data.numel() == 0:
            return False
        if data.dtype is torch.bfloat16:
            return self._hardware.capability >= (8, 0)  # supportsBFloat16RNNWithCuDNN
        return data.dtype in (torch.float16, torch.float32, torch.float64)

    def _keep_dropout_state(self, size: RecurrentSize, data: torch.Tensor) -> None:
        if size.dropout and self._dropout_state is None:
            self._dropout_state = torch.empty(_DROPOUT_STATE_BYTES, dtype=torch.uint8, device=data.device)

    def _say_uncertain(self, size: RecurrentSize, *, training: bool) -> None:
        more = workspace_upper_bytes(size) - workspace_bytes(size)
        if training:
            more += reserve_upper_bytes(size) - reserve_bytes(size)
        self._uncertain(f"cuDNN {size.mode}", more)


def install_recurrent(library: torch.library.Library, hardware: Hardware, uncertain: Uncertain) -> RecurrentLayers:
    """Have the recurrent layers on the fake device run as cuDNN runs them.

    Args:
        library: Of namespace ``aten``, kind ``IMPL``, dispatch key ``AutogradPrivateUse1``. It must be kept alive.
        hardware: The device to stand in for.
        uncertain: Called with a name and the bytes by which a size may be larger than was taken.

    Returns:
        The layers. They must be kept alive too.
    """
    runner = RecurrentLayers(hardware, uncertain)
    kernels: dict[str, Callable[..., Any]] = {"_thnn_fused_gru_cell": _gru_cell}
    for operator in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        kernels[f"{operator}.input"] = _dense(runner, operator)
        kernels[f"{operator}.data"] = _packed(runner, operator)
    for operator, kernel in kernels.items():
        library.impl(operator, kernel)  # type: ignore[no-untyped-call]
    return runner


def _dense(runner: RecurrentLayers, operator: str) -> Callable[..., Any]:
    native = getattr(torch.ops.aten, operator).input
    mode = operator.partition("_")[0]

    def layers(
        data: torch.Tensor,
        states: Any,
        weights: list[torch.Tensor],
        has_biases: bool,  # noqa: FBT001
        *rest: Any,
    ) -> Any:
        if not runner.takes(data):
            return native.decompose(data, states, weights, has_biases, *rest)
        count, dropout, training, bidirectional, batch_first = rest
        out = runner.run(
            mode, data, _states(states), weights, layers=count, dropout=dropout, training=training,
            bidirectional=bidirectional, batch_first=batch_first,
        )  # fmt: skip
        return out if mode == "lstm" else out[:2]

    return layers


def _packed(runner: RecurrentLayers, operator: str) -> Callable[..., Any]:
    native = getattr(torch.ops.aten, operator).data
    mode = operator.partition("_")[0]

    def layers(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        states: Any,
        weights: list[torch.Tensor],
        has_biases: bool,  # noqa: FBT001
        *rest: Any,
    ) -> Any:
        if not runner.takes(data):
            return native.decompose(data, batch_sizes, states, weights, has_biases, *rest)
        count, dropout, training, bidirectional = rest
        out = runner.run(
            mode, data, _states(states), weights, layers=count, dropout=dropout, training=training,
            bidirectional=bidirectional, packed=True,
        )  # fmt: skip
        return out if mode == "lstm" else out[:2]

    return layers


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out: tuple[torch.Tensor, torch.Tensor] = _FusedGruCell.apply(  # type: ignore[no-untyped-call]
        input_gates, hidden_gates, hidden, input_bias, hidden_bias
    )
    return out


def _states(states: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return (states,) if isinstance(states, torch.Tensor) else states


def _time_major(data: torch.Tensor, layout: _Layout) -> torch.Tensor:
    return data.transpose(0, 1) if layout.batch_first else data


def _backward_of_input(
    layout: _Layout, data: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None, grad_y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """_cudnn_rnn_backward_input: copies of input and gradient if they are not contiguous, gradients, workspace."""
    x = _time_major(data, layout).contiguous()
    dy = grad_y.contiguous()
    dx = torch.empty_like(x)
    dhx = torch.empty_like(hidden)
    dcx = None if cell is None else torch.empty_like(cell)
    workspace = data.new_empty((workspace_bytes(layout.size),), dtype=torch.uint8)
    del workspace, x, dy
    return (dx.transpose(0, 1) if layout.batch_first else dx), dhx, dcx


def _backward_of_weights(
    layout: _Layout, data: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """_cudnn_rnn_backward_weight: all gradients are views of one buffer."""
    x = _time_major(data, layout).contiguous()
    flat = _flat(weights, weights[0].dtype)
    workspace = data.new_empty((workspace_bytes(layout.size),), dtype=torch.uint8)
    del workspace, x
    return _views(flat, weights)


def _flat(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)


def _views(flat: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    parts = flat.split([weight.numel() for weight in weights])  # type: ignore[no-untyped-call]
    return tuple(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True))
