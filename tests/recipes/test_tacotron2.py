"""The recipe Tacotron 2.

The model against the published one, its data, its losses, its bounds, and whole runs.
"""

from __future__ import annotations

import copy
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.tacotron2.data import Padded
from recipes.tacotron2.losses import Weights, losses_of
from recipes.tacotron2.model import Tacotron2
from recipes.tacotron2.public_weights import named_as_here, read_public_weights
from recipes.tacotron2.sizes import PAPER, TINY
from recipes.tacotron2.synthesis import MemoryUse, batch_of, synthesise, tensor_bytes
from recipes.tacotron2.text import SYMBOLS
from recipes.tacotron2.train import CLIPS, main
from tests.own_process import in_own_process

from holdfast.loader import random_state
from holdfast.memory.blocks import find_blocks
from holdfast.memory.recompute import recomputing

PUBLIC_PARAMETERS = 28_193_153  # of NVIDIA/tacotron2 with its default settings and 148 symbols
STEADY = replace(TINY, prenet_dropout=0.0, dropout=0.0, zoneout=0.0)


def public_shapes() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the public implementation's weights."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (148, 512)}
    widths = {"encoder": [512] * 4, "postnet": [80, 512, 512, 512, 512, 80]}
    for part, around in widths.items():
        for place, (given, made) in enumerate(itertools.pairwise(around)):
            name = f"{part}.convolutions.{place}"
            shapes |= {f"{name}.0.conv.weight": (made, given, 5), f"{name}.0.conv.bias": (made,)}
            shapes |= {
                f"{name}.1.{each}": (made,)
                for each in ("weight", "bias", "running_mean", "running_var")
            }
            shapes[f"{name}.1.num_batches_tracked"] = ()
    for direction in ("", "_reverse"):
        shapes |= {f"encoder.lstm.weight_ih_l0{direction}": (1024, 512)}
        shapes |= {f"encoder.lstm.weight_hh_l0{direction}": (1024, 256)}
        shapes |= {f"encoder.lstm.bias_{kind}_l0{direction}": (1024,) for kind in ("ih", "hh")}
    for cell, given in (("attention_rnn", 768), ("decoder_rnn", 1536)):
        shapes |= {
            f"decoder.{cell}.weight_ih": (4096, given),
            f"decoder.{cell}.weight_hh": (4096, 1024),
        }
        shapes |= {f"decoder.{cell}.bias_ih": (4096,), f"decoder.{cell}.bias_hh": (4096,)}
    attention = "decoder.attention_layer"
    return shapes | {
        "decoder.prenet.layers.0.linear_layer.weight": (256, 80),
        "decoder.prenet.layers.1.linear_layer.weight": (256, 256),
        f"{attention}.query_layer.linear_layer.weight": (128, 1024),
        f"{attention}.memory_layer.linear_layer.weight": (128, 512),
        f"{attention}.v.linear_layer.weight": (1, 128),
        f"{attention}.location_layer.location_conv.conv.weight": (32, 2, 31),
        f"{attention}.location_layer.location_dense.linear_layer.weight": (128, 32),
        "decoder.linear_projection.linear_layer.weight": (80, 1536),
        "decoder.linear_projection.linear_layer.bias": (80,),
        "decoder.gate_layer.linear_layer.weight": (1, 1536),
        "decoder.gate_layer.linear_layer.bias": (1,),
    }


def a_batch(
    text_lengths: list[int], mel_lengths: list[int], *, frames_per_step: int = 4
) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return Padded(frames_per_step=frames_per_step)(
        [
            {
                "text": torch.randint(1, 60, (symbols,), generator=drawn),
                "mel": torch.randn(frames, 80, generator=drawn) - 5,
            }
            for symbols, frames in zip(text_lengths, mel_lengths, strict=True)
        ]
    )


def gradients(model: Tacotron2, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    losses = losses_of(model(**batch), batch, Weights(guided=1.0))
    torch.stack([each.mean for each in losses.values()]).sum().backward()
    return {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


# --- the model


def test_the_papers_size_has_the_weights_of_the_public_implementation() -> None:
    """Number, shapes and (renamed) names of all weights are those of the public implementation."""
    with torch.device("meta"):
        model = Tacotron2(PAPER)
    assert sum(each.numel() for each in model.parameters()) == PUBLIC_PARAMETERS
    assert len(SYMBOLS) == 148
    renamed = named_as_here(
        {name: torch.empty(shape, device="meta") for name, shape in public_shapes().items()}
    )
    assert {name: each.shape for name, each in renamed.items()} == {
        name: each.shape for name, each in model.state_dict().items()
    }


def test_published_weights_are_read_and_other_files_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names may begin with module., as DataParallel writes them.

    Text, code, another size are told in a sentence.
    """
    made = {name: torch.rand(shape) for name, shape in public_shapes().items()}
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in made.items()}},
        tmp_path / "public.pt",
    )
    model = Tacotron2(PAPER)
    model.load_state_dict(read_public_weights(tmp_path / "public.pt"))
    assert torch.equal(model.encoder.embedding.weight, made["embedding.weight"])
    (tmp_path / "text.pt").write_text("hello, this is no file of weights")
    torch.save(Tacotron2(TINY), tmp_path / "code.pt")
    torch.save([1], tmp_path / "list.pt")
    for name in ("text.pt", "code.pt", "list.pt", "nowhere.pt", "public.pt"):
        with pytest.raises(SystemExit, match="2"):
            main(
                [
                    "--data",
                    str(CLIPS),
                    "--run-dir",
                    str(tmp_path),
                    "--weights",
                    str(tmp_path / name),
                    *TINY_RUN,
                ]
            )
        told = capsys.readouterr().err.splitlines()
        assert len(told) < 6, told
        assert any(name in line for line in told)
        assert [line.startswith("Fix: ") for line in told].count(True) == 1, told
        assert (tmp_path / "features.h5").exists() == (name == "public.pt"), (
            "those of others are not computed"
        )


def test_padding_changes_nothing_in_evaluation() -> None:
    """An utterance says the same alone and beside a longer one."""
    model = Tacotron2(STEADY).eval()
    both = a_batch([5, 9], [8, 16])
    alone = {
        "text": both["text"][:1, :5],
        "text_lengths": torch.tensor([5]),
        "mel": both["mel"][:1, :8],
        "mel_lengths": torch.tensor([8]),
    }
    with torch.no_grad():
        beside, by_itself = model(**both), model(**alone)
    assert torch.allclose(beside.mel[0, :8], by_itself.mel[0], atol=1e-5)
    assert torch.allclose(beside.attention[0, :2, :5], by_itself.attention[0], atol=1e-6)


def test_segments_change_nothing_and_truncation_cuts_the_gradient_only() -> None:
    """Segments alone keep every bit of the gradient.

    Truncated, frames stay and gradients through time are gone.
    """
    batch = a_batch([6, 9], [24, 22])
    whole = Tacotron2(TINY)
    cut, truncated = copy.deepcopy(whole), copy.deepcopy(whole)
    cut.segment_steps = truncated.segment_steps = 2
    truncated.truncate = True
    expected, found, shortened = (gradients(model, batch) for model in (whole, cut, truncated))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    name = "decoder.recurrence.attention_rnn.weight_hh"
    assert not torch.allclose(shortened[name], expected[name], rtol=1e-3)
    torch.manual_seed(3)
    plain = whole(**batch)
    torch.manual_seed(3)
    assert torch.equal(truncated(**batch).mel, plain.mel)


def test_recomputed_segments_keep_every_bit_and_hold_less() -> None:
    """Recomputing the decoder's segments, as `Policy.recompute` does it, changes no bit and
    keeps a part of them.
    """
    batch = a_batch([30, 30], [160, 160])
    model = Tacotron2(TINY, segment_steps=10)
    kept = {"plain": 0, "recomputed": 0}

    def measured(name: str) -> dict[str, torch.Tensor]:
        def count(tensor: torch.Tensor) -> torch.Tensor:
            kept[name] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            return gradients(model, batch)

    expected = measured("plain")
    ((_, block),) = find_blocks({"model": model}, names=["decoder.recurrence"])
    with recomputing([block], random_state.capture, random_state.restore):
        found = measured("recomputed")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept["recomputed"] < 0.5 * kept["plain"]


# --- losses


def test_losses_are_means_over_frames_and_steps() -> None:
    """Over two utterances each loss is that of both alone, weighted by frames or steps.

    Accumulation is exact.
    """
    model = Tacotron2(STEADY).eval()
    both = a_batch([5, 9], [8, 21])
    parts = [{name: value[place : place + 1] for name, value in both.items()} for place in (0, 1)]
    weights = Weights(stop=2.0, last_step=5.0, guided=3.0)
    whole, *each = [losses_of(model(**batch), batch, weights) for batch in (both, *parts)]
    assert list(whole) == ["coarse", "mel", "stop", "guided"]
    assert [int(whole[name].items) for name in whole] == [29, 29, 2 + 6, 2 + 6]
    for name, loss in whole.items():
        total = sum(part[name].mean * part[name].items for part in each)
        assert torch.allclose(loss.mean * loss.items, total, rtol=1e-5), name


# --- synthesis


@pytest.mark.parametrize(("bias", "steps", "by_gate"), [(-100.0, 9, False), (100.0, 1, True)])
def test_synthesis_ends_by_the_gate_or_at_the_limit_and_keeps_nothing(
    bias: float, steps: int, by_gate: bool
) -> None:
    """A gate that never opens is ended at the limit, an open one at once.

    No tensor is left of either.
    """
    found = in_own_process(synthesised, bias)
    assert found["steps"] == [steps, steps]
    assert found["by_gate"] == [by_gate, by_gate]
    assert found["shape"] == (2, 4 * steps, 80)
    assert found["meanwhile"] > found["inference_tensor_bytes_before"]
    assert found["inference_tensor_bytes_after"] == found["inference_tensor_bytes_before"] > 0
    assert found["inference_peak_bytes"] > found["inference_growth_bytes"] >= 0


def synthesised(bias: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tacotron2(TINY).eval()
    with torch.no_grad():
        model.decoder.gate.bias.fill_(bias)
    text, lengths = batch_of(["A fox.", "A zebra sees it."], torch.device("cpu"))
    memory = MemoryUse(torch.device("cpu"))
    found = synthesise(model, text, lengths, max_steps=9, memory=memory)
    facts = {
        "steps": found.steps.tolist(),
        "by_gate": found.by_gate.tolist(),
        "shape": tuple(found.mel.shape),
        "meanwhile": tensor_bytes(),
    }
    assert facts["meanwhile"] > memory.tensors_before
    del found
    memory.ended()
    return {**facts, **memory.figures()}


def test_synthesis_says_what_teacher_forcing_says_when_it_hears_the_same() -> None:
    """Fed with its own frames, the decoder under teacher forcing makes just the frames of free
    running.
    """
    model = Tacotron2(STEADY).eval()
    text, lengths = batch_of(["A fox sees a jar."], torch.device("cpu"))
    with torch.no_grad():
        model.decoder.gate.bias.fill_(-100.0)
        free = synthesise(model, text, lengths, max_steps=6)
        coarse = free.mel.new_zeros(1, 24, 80)
        for _ in range(6):  # one more step is right in each round
            coarse = model(text, lengths, coarse, torch.tensor([24])).coarse
        forced = model(text, lengths, coarse, torch.tensor([24]))
    assert torch.allclose(forced.mel, free.mel, atol=1e-4)
    assert torch.allclose(forced.attention, free.attention, atol=1e-5)


# --- whole runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the clips that come with the recipe."""
    return Path(shutil.copytree(CLIPS, tmp_path / "clips"))


TINY_RUN = ["--size", "tiny", "--batch-size", "4", "--evaluate-every", "4", "--device", "cpu"]


def test_a_folder_that_cannot_be_used_ends_with_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends at once, with the mistake on stderr and no run begun."""
    (folder / "wavs" / "clip-3.wav").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(folder), "--run-dir", str(tmp_path / "run"), *TINY_RUN])
    assert "there is no" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
