"""Recurrent layers of the forecast: the sizes that cuDNN asks for, and what the layers keep on the fake device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.forecast.running import run_emulation

from holdfast.forecast.kernels.recurrent import RecurrentSize

# pytorch issue 2895: four layers, hidden size 320, input size 123, fp32; 250 steps of 100 sequences fit its figures.
PER_GATE = 123 * 320 + 7 * 320 * 320
BIASES_PER_GATE = 8 * 320


def published(mode: str, gates: int) -> RecurrentSize:
    return RecurrentSize(
        mode=mode,
        hidden=320,
        projection=0,
        layers=4,
        directions=1,
        batch=100,
        rows=25_000,
        weights=gates * (PER_GATE + BIASES_PER_GATE),
        biases=gates * BIASES_PER_GATE,
        element_bytes=4,
        dropout=0.0,
    )


@pytest.mark.parametrize(
    ("mode", "gates", "reserve", "workspace"),
    [("lstm", 4, 736_000_000, 17_730_560), ("gru", 3, 864_000_000, 13_169_920)],
)
def test_the_published_sizes_come_out(mode: str, gates: int, reserve: int, workspace: int) -> None:
    """The formulas give exactly what cuDNN asked for in the one public measurement."""
    size = published(mode, gates)
    assert size.reserve_bytes == reserve
    assert size.workspace_bytes == workspace


@pytest.fixture(scope="module")
def emulated() -> dict[str, Any]:
    """What the program of the emulation saw on a fake device in a process of its own."""
    return run_emulation()


def small(mode: str, gates: int, **others: Any) -> RecurrentSize:
    """The layers of the program: 5 steps of 4 sequences, 16 features, hidden size 32."""
    sizes: dict[str, Any] = {"layers": 1, "directions": 1, "projection": 0, "element_bytes": 4, "dropout": 0.0}
    sizes |= others
    biases = sizes.pop("biases", 2 * gates * 32)
    weights = sizes.pop("weights", gates * 32 * (16 + 32)) + biases
    return RecurrentSize(mode=mode, hidden=32, batch=4, rows=20, weights=weights, biases=biases, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "gates"), [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_layers_keep_output_states_and_reserve(emulated: dict[str, Any], mode: str, gates: int) -> None:
    """A layer keeps its reserve until the backward pass and needs a workspace in both, as cuDNN's does."""
    seen, size = emulated[mode], small(mode, gates)
    assert seen["forward"].count(size.reserve_bytes) >= 1
    assert seen["forward"].count(size.workspace_bytes) == 1
    assert seen["backward"].count(size.workspace_bytes) == 2  # for the input's gradient, then for the weights'
    output, state = 20 * 32 * 4, 4 * 32 * 4
    states = (4 if mode == "lstm" else 2) if mode != "rnn" else 1
    assert output + size.reserve_bytes <= seen["kept"] <= output + size.reserve_bytes + (states + 1) * state


@pytest.mark.slow
def test_gradients_of_the_weights_share_a_buffer(emulated: dict[str, Any]) -> None:
    """The gradients of all weights are views of one buffer, as cuDNN's are."""
    for mode, gates in (("lstm", 4), ("gru", 3), ("rnn", 1)):
        assert emulated[f"{mode} gradients share"] == 1
        assert gates * 32 * (16 + 32 + 2) * 4 in emulated[mode]["backward"]


@pytest.mark.slow
def test_autocast_runs_in_half_precision_with_flat_weights(emulated: dict[str, Any]) -> None:
    """Under autocast to bf16 the layer runs in fp16 on one flat copy of its weights; the gradients are fp32."""
    seen = emulated["autocast"]
    assert seen["dtype"] == "torch.float16"
    assert 4 * 32 * (16 + 32 + 2) * 2 in seen["forward"]
    assert emulated["autocast gradient"] == "torch.float32"


@pytest.mark.slow
def test_stacked_and_projected_layers(emulated: dict[str, Any]) -> None:
    """Layers, directions, batch first, projections and dropout between layers are all counted."""
    assert emulated["stacked"]["shape"] == [5, 4, 64]
    layer = 4 * 32 * (16 + 32)
    deeper = 4 * 32 * (64 + 32)
    # 4 samples of 5 steps here, batch first: 5 sequences of 4 steps
    stacked = replace(
        small("lstm", 4, weights=2 * (layer + deeper), biases=4 * 2 * 4 * 32), layers=2, directions=2, batch=5
    )
    assert stacked.reserve_bytes in emulated["stacked"]["forward"]
    assert stacked.workspace_bytes in emulated["stacked"]["forward"]
    assert emulated["stacked"]["kept"] > 2 * 2**20  # the generators' states
    assert emulated["projected"]["shape"] == [5, 4, 8]
    assert small("lstm", 4, projection=8).reserve_bytes in emulated["projected"]["forward"]


@pytest.mark.slow
def test_recomputation_meets_the_layer_again(emulated: dict[str, Any]) -> None:
    """A checkpoint's recomputation makes a second reserve."""
    assert emulated["reserves with recomputation"] == 2


@pytest.mark.slow
def test_cells_and_native_steps(emulated: dict[str, Any]) -> None:
    """Cells take torch's fused kernels, and without cuDNN the layer runs step by step."""
    assert emulated["gru cell"]["forward"].count(4 * 32 * 5 * 4) == 1
    assert emulated["lstm cell"]["node"] == "ThnnFusedLstmCellBackward0"
    assert len(emulated["without cuDNN"]["forward"]) > 5 * 5


@pytest.mark.slow
def test_known_lengths_are_used_and_unknown_ones_assumed_long(emulated: dict[str, Any]) -> None:
    """Packing known lengths keeps their rows only; unknown ones count as the longest, and that is said."""
    assert emulated["rows"] == [7 + 3 + 2 + 1, 4 * 7]
    assert emulated["known lengths"]["shape"] == [4, 7, 32]
    assert emulated["assumed"] == ["all sequences given to pack_padded_sequence were taken as 7 long"]


@pytest.mark.slow
def test_the_ctc_loss_keeps_its_forward_variables(emulated: dict[str, Any]) -> None:
    """The CTC loss keeps a number for each step and twice the labels, and its backward pass needs another."""
    variables = 4 * 50 * (2 * 10 + 1) * 4
    assert emulated["ctc"]["forward"].count(variables) == 1
    assert emulated["ctc"]["backward"].count(variables) == 1


@pytest.mark.slow
def test_sizes_of_cudnn_count_as_uncalibrated(emulated: dict[str, Any]) -> None:
    """Every fused layer is taken down as uncertain."""
    assert set(emulated["uncertain"]) == {"cuDNN lstm", "cuDNN gru", "cuDNN rnn"}


@pytest.mark.slow
def test_rms_norm_keeps_one_number_for_each_row(emulated: dict[str, Any]) -> None:
    """RMS norm keeps its output and a number for each row, as CUDA's fused kernel does."""
    assert emulated["rms norm"]["kept"] == 8 * 128 * 256 * 2 + 8 * 128 * 4
    assert emulated["rms norm gradients"] == [[8, 128, 256], [256]]
