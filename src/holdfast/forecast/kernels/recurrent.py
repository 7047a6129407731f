"""`nn.LSTM`, `nn.GRU` and `nn.RNN` on the fake device as cuDNN runs them, and torch's fused GRU
cell.

The sequence of allocations follows aten/src/ATen/native/cudnn/RNN.cpp and, under autocast,
cudnn/AutocastRNN.cpp: it casts to fp16 whatever the autocast type is, into one flat copy of the
weights that is kept until the backward pass. The gradients of the weights are views of one buffer.
Where cuDNN is switched off, torch's own steps run instead.

cuDNN publishes neither what it keeps for the backward pass (the reserve) nor what it needs while it
runs (the workspace), and torch's meta kernel says 0 bytes. Both are formulas for what 117 layers
asked for on an H100 (torch 2.11, cuDNN 9.19; sizes, types, layers, directions and dropout varied;
its tests hold some of them):

- Reserve: for each row (a time step of a sequence) and unit 4 gates and the cell of each layer of
  an LSTM, 6 values of a GRU, the output of a plain one; the outputs of all layers but the last; a
  bit for each of those that is dropped out; 256 bytes. Exact in all cases, and in those of pytorch
  issue 2895 (Tesla P100, 2017), but for the last two.
- Workspace: 8 MiB for each layer and direction, the weights, and values for each row and unit that
  no longer depend
  on the number of layers: many more where torch takes the algorithm for small hidden sizes
      (``get_algo`` in RNN.cpp).
  Within 4 % of an LSTM's, at most 9 % too much for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# "Each state is slightly over 2MB" (get_dropout_state in RNN.cpp); one for each device, kept for
# good.
_DROPOUT_STATE_BYTES = 2 * 2**20 + 2**18
# Values kept for each row, unit and layer; see above. A plain RNN only needs its output.
_KEPT = {"lstm": 5, "gru": 6, "rnn": 1}
# Values of the workspace for each row and unit: of the standard algorithm, and that for small
# hidden sizes.
_WORKED_ON = {"lstm": (5.0, 21.0), "gru": (4.5, 19.5), "rnn": (3.75, 14.5)}
_WORKED_ON_BACKWARDS = 9.0  # more, where sequences are read in both directions
_FOR_WIDE_INPUT = 2.5  # more for each feature of the input beyond the units
_STATES = 8  # for each sequence, unit, layer and direction
_LAYER_BYTES = 8 * 2**20
# Hidden size: forward, backward
_LARGEST_SMALL = {"lstm": (192, 128), "gru": (192, 128), "rnn": (384, 256)}
_OTHER_VERSIONS = 0.1  # of the workspace: what another cuDNN or GPU may ask for beyond

Uncertain = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSize:
    """The sizes of a fused recurrent layer, in elements.

    `weights` with biases, `biases` of those alone.

    `mode` is ``"lstm"``, ``"gru"`` or ``"rnn"``; `projection` 0 if there is none; `features` of the
    input; `rows` the time steps of all sequences together; `dropout` the probability between the
    layers; `may_be_small` whether type and layout allow the algorithm for small hidden sizes.
    """

    mode: str
    features: int
    hidden: int
    projection: int
    layers: int
    directions: int
    batch: int
    rows: int
    weights: int
    biases: int
    element_bytes: int
    dropout: float
    may_be_small: bool = True

    @property
    def reserve_bytes(self) -> int:
        """Bytes that cuDNN keeps from the forward to the backward pass."""
        unit = self.rows * self.directions * self.element_bytes
        before_projection = self.hidden if self.projection else 0
        between = (self.layers - 1) * (self.projection or self.hidden)
        kept = unit * (self.layers * (_KEPT[self.mode] * self.hidden + before_projection) + between)
        dropped = (
            self.rows * self.directions**2 * self.hidden * (self.layers - 1) // 8
            if self.dropout
            else 0
        )
        return kept + dropped + 256

    def workspace_bytes(self, *, backward: bool = False) -> int:
        """Bytes that a pass of the layers needs while it runs."""
        small = (
            self.may_be_small
            and not self.projection
            and self.hidden <= _LARGEST_SMALL[self.mode][backward]
        )
        each = _WORKED_ON[self.mode][small] + _WORKED_ON_BACKWARDS * (self.directions - 1)
        if self.dropout and self.directions == 1:
            each += 1
        wide = (
            0.0
            if small and self.mode == "lstm"
            else _FOR_WIDE_INPUT * max(0, self.features - self.hidden)
        )
        values = int(self.rows * (each * self.hidden + self.features + wide))
        values += _STATES * self.layers * self.directions * self.batch * self.hidden
        fixed = _LAYER_BYTES * self.layers * self.directions
        return fixed + (self.weights - self.biases + values) * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How one call is laid out: `batch_first` input is ``(batch, time, features)``.

    `training` keeps a reserve.
    """

    size: RecurrentSize
    batch_first: bool
    training: bool

    def time_major(self, data: torch.Tensor) -> torch.Tensor:
        return data.transpose(0, 1) if self.batch_first else data


class _FlatHalf(torch.autograd.Function):
    """fp16 copies of all weights as views of one buffer (copy_weights_to_flat_buf_views)."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        return _flat_views(weights, torch.float16)

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
        x = layout.time_major(data).contiguous()  # a copy where the batch comes first
        width = (size.projection or size.hidden) * size.directions
        y = data.new_empty((*x.shape[:-1], width))
        last = hidden.new_empty(
            (size.layers * size.directions, size.batch, size.projection or size.hidden)
        )
        last_cell = hidden.new_empty((0,)) if cell is None else torch.empty_like(cell)
        workspace = _bytes_like(data, size.workspace_bytes())
        reserve = _bytes_like(data, size.reserve_bytes if layout.training else 0)
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
        grad_y = torch.zeros_like(y) if grad_y is None else layout.time_major(grad_y)
        grad_last = torch.zeros_like(hidden) if grad_last is None else grad_last
        grad_cell = torch.zeros_like(cell) if grad_cell is None and cell is not None else grad_cell
        del grad_last, grad_cell
        wanted = _backward_of_input(layout, data, hidden, cell, grad_y)
        grad_weights: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        # _cudnn_rnn_backward_weight: all gradients are views of one buffer
        if any(ctx.needs_input_grad[4:]):
            x = layout.time_major(data).contiguous()
            grad_weights = _flat_views(weights, weights[0].dtype)
            workspace = _bytes_like(data, layout.size.workspace_bytes(backward=True))
            del workspace, x
        needed = zip(wanted, ctx.needs_input_grad[1:4], strict=True)
        return (None, *(gradient if need else None for gradient, need in needed), *grad_weights)


def _backward_of_input(
    layout: _Layout,
    data: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    grad_y: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """_cudnn_rnn_backward_input.

    Copies of input and gradient if they are not contiguous, gradients, workspace.
    """
    x = layout.time_major(data).contiguous()
    dy = grad_y.contiguous()
    dx = torch.empty_like(x)
    dhx = torch.empty_like(hidden)
    dcx = None if cell is None else torch.empty_like(cell)
    workspace = _bytes_like(data, layout.size.workspace_bytes(backward=True))
    del workspace, x, dy
    return layout.time_major(dx), dhx, dcx


def _flat_views(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    sizes = [weight.numel() for weight in weights]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=weights[0].device)
    parts = flat.split(sizes)  # type: ignore[no-untyped-call]
    return tuple(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True))


def _bytes_like(data: torch.Tensor, count: int) -> torch.Tensor:
    return data.new_empty((count,), dtype=torch.uint8)


class _FusedGruCell(torch.autograd.Function):
    """torch's own fused cell, which has no meta kernel.

    Aten/src/ATen/native/cuda/RNN.cu, derivatives.yaml.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_gates: torch.Tensor,
        hidden_gates: torch.Tensor,
        hidden: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        _hidden_bias: torch.Tensor | None = None,
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
        grad_input, grad_hidden_gates = (
            torch.empty_like(input_gates),
            torch.empty_like(hidden_gates),
        )
        grad_hidden = torch.empty_like(hidden)
        biases = (grad_input.sum(0), grad_hidden_gates.sum(0)) if ctx.biases else (None, None)
        return grad_input, grad_hidden_gates, grad_hidden, *biases


class _RecurrentLayers:
    """The fused recurrent layers of one fake device."""

    def __init__(self, uncertain: Uncertain) -> None:
        self._uncertain = uncertain
        self._dropout_state: torch.Tensor | None = None

    def kernel(self, operator: str, *, packed: bool) -> Callable[..., Any]:
        """Return the stand-in for ``aten.lstm`` or the like.

        Of a packed sequence the batch sizes come second.
        """
        overloads = getattr(torch.ops.aten, operator)
        native = overloads.data if packed else overloads.input
        mode = operator.partition("_")[0]

        def layers(*given: Any) -> Any:
            data, *rest = given
            if not torch.backends.cudnn.enabled or data.numel() == 0:  # use_cudnn in RNN.cpp
                return native.decompose(*given)
            if packed:
                rest = rest[1:]
            states, weights, _has_biases, *options = rest
            states = (states,) if isinstance(states, torch.Tensor) else states
            out = self._run(mode, data, states, weights, (*options, False)[:5], packed=packed)
            return out if mode == "lstm" else out[:2]

        return layers

    def _run(
        self,
        mode: str,
        data: torch.Tensor,
        states: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        options: Sequence[Any],
        *,
        packed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layers, dropout, training, bidirectional, batch_first = options
        hidden, cell = states[0], states[1] if len(states) > 1 else None
        if torch.is_autocast_enabled(data.device.type) and data.dtype is not torch.float64:
            data, hidden = data.to(torch.float16), hidden.to(torch.float16)
            cell = None if cell is None else cell.to(torch.float16)
            if weights[0].dtype is not torch.float16:
                weights = _FlatHalf.apply(*weights)  # type: ignore[no-untyped-call]
        width = (hidden if cell is None else cell).shape[-1]
        size = RecurrentSize(
            mode=mode,
            features=data.shape[-1],
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
            may_be_small=not packed and data.dtype in (torch.float32, torch.float16),
        )
        if size.dropout and self._dropout_state is None:
            self._dropout_state = torch.empty(
                _DROPOUT_STATE_BYTES, dtype=torch.uint8, device=data.device
            )
        self._uncertain(f"cuDNN {mode}", int(_OTHER_VERSIONS * size.workspace_bytes()))
        layout = _Layout(size=size, batch_first=batch_first, training=training)
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Layers.apply(  # type: ignore[no-untyped-call]
            layout, data, hidden, cell, *weights
        )
        return out


def install_recurrent(library: torch.library.Library, uncertain: Uncertain) -> None:
    """Have recurrent layers on the fake device run as cuDNN does.

    `uncertain` takes a name and an excess in bytes.
    """
    layers = _RecurrentLayers(uncertain)
    for operator in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        library.impl(f"{operator}.input", layers.kernel(operator, packed=False))  # type: ignore[no-untyped-call]
        library.impl(f"{operator}.data", layers.kernel(operator, packed=True))  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell", lambda *given: _FusedGruCell.apply(*given))  # type: ignore[no-untyped-call]
