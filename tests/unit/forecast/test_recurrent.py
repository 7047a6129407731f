"""Recurrent layers of the forecast.

The sizes that cuDNN asks for, and what the layers keep on the fake device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.forecast.emulated import leaf, seen
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.kernels.recurrent import RecurrentSize

RUNS_IN_CHILD = True

# What layers asked for on an H100 with torch 2.11 and cuDNN 9.19: type, steps, sequences, features,
# hidden size, layers, directions, dropout; workspace and reserve in bytes.
MEASURED = {
    "lstm": [
        ("float32", 64, 32, 48, 96, 1, 1, 0.0, 25616896, 3932416),
        ("float32", 64, 32, 48, 96, 3, 1, 0.0, 43180544, 13369600),
        ("float32", 64, 32, 48, 96, 2, 1, 0.1, 35185152, 8675584),
        ("float32", 64, 2048, 64, 128, 2, 1, 0.0, 1477329152, 738197760),
        ("float32", 64, 32, 48, 256, 2, 1, 0.0, 31654400, 23068928),
        ("float32", 64, 512, 256, 256, 2, 2, 0.1, 572526848, 742392064),
        ("float16", 64, 2048, 64, 128, 2, 1, 0.0, 747061504, 369099008),
        ("bfloat16", 64, 2048, 64, 128, 2, 1, 0.0, 212287744, 369099008),
        ("float32", 64, 32, 200, 96, 2, 1, 0.0, 35877376, 8651008),
    ],
    "gru": [
        ("float32", 64, 32, 48, 96, 1, 1, 0.0, 23570944, 4718848),
        ("float32", 64, 2048, 64, 128, 2, 1, 0.0, 1372242176, 872415488),
        ("float32", 64, 512, 256, 256, 2, 2, 0.1, 525865216, 876609792),
        ("bfloat16", 64, 2048, 64, 128, 2, 1, 0.0, 173375744, 436207872),
        ("float32", 64, 32, 200, 96, 2, 1, 0.0, 36558336, 10223872),
    ],
    "rnn": [
        ("float32", 64, 32, 48, 96, 1, 1, 0.0, 19528192, 786688),
        ("float32", 64, 2048, 64, 128, 2, 1, 0.0, 1036239104, 201326848),
        ("bfloat16", 64, 2048, 64, 128, 2, 1, 0.0, 162660608, 100663552),
    ],
}
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


@pytest.mark.parametrize(
    ("mode", "case"), [(mode, case) for mode, cases in MEASURED.items() for case in cases]
)
def test_what_cudnn_asked_for_comes_out(mode: str, case: Any) -> None:
    """The reserve to the byte; of the workspace rather too much than too little."""
    dtype, steps, batch, features, hidden, layers, directions, dropout, workspace, reserve = case
    inputs = [features, *[directions * hidden] * (layers - 1)]
    per_gate = sum(directions * hidden * (each + hidden) for each in inputs)
    biases = GATES[mode] * 2 * hidden * layers * directions
    size = RecurrentSize(
        mode=mode,
        features=features,
        hidden=hidden,
        projection=0,
        layers=layers,
        directions=directions,
        batch=batch,
        rows=steps * batch,
        weights=GATES[mode] * per_gate + biases,
        biases=biases,
        element_bytes=getattr(torch, dtype).itemsize,
        dropout=dropout,
        may_be_small=dtype != "bfloat16",
    )
    assert size.reserve_bytes == reserve
    assert 0.98 * workspace <= size.workspace_bytes() <= 1.12 * workspace


def small(mode: str, gates: int, **others: Any) -> RecurrentSize:
    """The layers of these tests: 5 steps of 4 sequences, 16 features, hidden size 32."""
    sizes: dict[str, Any] = {
        "layers": 1,
        "directions": 1,
        "projection": 0,
        "element_bytes": 4,
        "dropout": 0.0,
    }
    sizes |= others
    biases = sizes.pop("biases", 2 * gates * 32)
    weights = sizes.pop("weights", gates * 32 * (16 + 32)) + biases
    return RecurrentSize(
        mode=mode, features=16, hidden=32, batch=4, rows=20, weights=weights, biases=biases, **sizes
    )


@pytest.mark.parametrize(
    ("mode", "kind", "gates"), [("lstm", nn.LSTM, 4), ("gru", nn.GRU, 3), ("rnn", nn.RNN, 1)]
)
def test_layers_keep_output_states_and_reserve(
    mode: str, kind: type[nn.RNNBase], gates: int
) -> None:
    """A layer keeps its reserve until backward and needs a workspace in both.

    Its gradients share a buffer.
    """
    with forecast_device() as device:
        x, layer, size = leaf(5, 4, 16), kind(16, 32).cuda(), small(mode, gates)
        run = seen(lambda: layer(x)[0])
        assert set(device.uncalibrated.calls) == {f"cuDNN {mode}"}
        assert len({p.grad.untyped_storage()._cdata for p in layer.parameters()}) == 1
    assert run.forward.count(size.reserve_bytes) >= 1
    assert run.forward.count(size.workspace_bytes()) == 1
    # For the input's gradient, then for the weights'
    assert run.backward.count(size.workspace_bytes()) == 2
    assert gates * 32 * (16 + 32 + 2) * 4 in run.backward
    output, state = 20 * 32 * 4, 4 * 32 * 4
    states = (4 if mode == "lstm" else 2) if mode != "rnn" else 1
    assert (
        output + size.reserve_bytes
        <= run.kept
        <= output + size.reserve_bytes + (states + 1) * state
    )


def test_autocast_runs_in_half_precision_with_flat_weights() -> None:
    """Under autocast to bf16 the layer runs in fp16 on one flat copy of its weights.

    The gradients are fp32.
    """
    with forecast_device():
        layer = nn.LSTM(16, 32).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            run = seen(lambda: layer(leaf(5, 4, 16))[0])
        assert layer.weight_ih_l0.grad.dtype is torch.float32
    assert run.dtype is torch.float16
    assert 4 * 32 * (16 + 32 + 2) * 2 in run.forward


def test_stacked_and_projected_layers() -> None:
    """Layers, directions, batch first, projections and dropout between layers are all counted."""
    with forecast_device():
        layers: Any = nn.LSTM(
            16, 32, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True
        ).cuda()
        stacked = seen(lambda: layers(leaf(5, 4, 16))[0])
        projected = seen(lambda: nn.LSTM(16, 32, proj_size=8).cuda()(leaf(5, 4, 16))[0])
    weights = 2 * 4 * 32 * ((16 + 32) + (64 + 32))
    # 4 samples of 5 steps here, batch first: 5 sequences of 4 steps
    size = replace(
        small("lstm", 4, weights=weights, biases=4 * 2 * 4 * 32),
        layers=2,
        directions=2,
        batch=5,
        dropout=0.1,
    )
    assert stacked.shape == (5, 4, 64)
    assert {size.reserve_bytes, size.workspace_bytes()} <= set(stacked.forward)
    assert stacked.kept > 2 * 2**20  # the generators' states
    assert projected.shape == (5, 4, 8)
    assert small("lstm", 4, projection=8).reserve_bytes in projected.forward


def test_cells_and_native_steps() -> None:
    """Cells take torch's fused kernels, and without cuDNN the layer runs step by step."""
    with forecast_device():
        gru = seen(lambda: nn.GRUCell(16, 32).cuda()(leaf(4, 16)))
        lstm = seen(lambda: nn.LSTMCell(16, 32).cuda()(leaf(4, 16))[0])
        with torch.backends.cudnn.flags(enabled=False):
            native = seen(lambda: nn.LSTM(16, 32).cuda()(leaf(5, 4, 16))[0])
    assert gru.forward.count(4 * 32 * 5 * 4) == 1
    assert lstm.node == "ThnnFusedLstmCellBackward0"
    assert len(native.forward) > 5 * 5


def test_known_lengths_are_used_and_unknown_ones_assumed_long() -> None:
    """Packing known lengths keeps their rows only.

    Unknown ones count as the longest, and that is said.
    """
    rows = []
    with forecast_device() as device:
        layer = nn.LSTM(16, 32, batch_first=True).cuda()

        def packed(lengths: Any) -> torch.Tensor:
            data = pack_padded_sequence(
                leaf(4, 7, 16), lengths, batch_first=True, enforce_sorted=False
            )
            rows.append(data.data.shape[0])
            return pad_packed_sequence(layer(data)[0], batch_first=True)[0]

        assert seen(lambda: packed([7, 3, 2, 1])).shape == (4, 7, 32)
        seen(lambda: packed(torch.randint(1, 7, (4,))))
        (assumption,) = device.assumptions
    assert rows == [7 + 3 + 2 + 1, 4 * 7]
    assert "pack_padded_sequence" in assumption.what
    assert "7" in assumption.what


def test_the_ctc_loss_keeps_its_forward_variables() -> None:
    """The CTC loss keeps a number for each step and twice the labels, and its backward pass
    needs another.
    """
    with forecast_device():
        scores, targets = leaf(50, 4, 20), torch.zeros(4, 10, dtype=torch.long, device="cuda")
        lengths = torch.full((4,), 50), torch.full((4,), 10)
        run = seen(lambda: functional.ctc_loss(scores.log_softmax(-1), targets, *lengths))
    variables = 4 * 50 * (2 * 10 + 1) * 4
    assert run.forward.count(variables) == run.backward.count(variables) == 1


def test_rms_norm_keeps_one_number_for_each_row() -> None:
    """RMS norm keeps its output and a number for each row, as CUDA's fused kernel does."""
    with forecast_device():
        x, weight = leaf(8, 128, 256, dtype=torch.bfloat16), leaf(256, dtype=torch.bfloat16)
        run = seen(lambda: functional.rms_norm(x, (256,), weight))
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    assert run.kept == 8 * 128 * 256 * 2 + 8 * 128 * 4
