"""The five numbers of an attention say what their definitions say, and only about what is within
the lengths.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.learning.alignment import alignment_facts


def around(centres: torch.Tensor, positions: int, width: float = 0.5) -> torch.Tensor:
    """Return attention rows that are bells around these positions; shape ``(steps, positions)``."""
    places = torch.arange(positions) + 0.5
    return torch.softmax(-(places - centres[:, None]).square() / (2 * width**2), dim=1)


def diagonal(steps: int, positions: int, width: float = 0.5) -> torch.Tensor:
    return around((torch.arange(steps) + 0.5) / steps * positions, positions, width)


def facts_of(attention: torch.Tensor, max_decoder_steps: int | None = None) -> dict[str, float]:
    steps, positions = attention.shape
    return alignment_facts(
        attention[None], torch.tensor([positions]), torch.tensor([steps]), max_decoder_steps
    )


@settings(max_examples=40, deadline=None)
@given(positions=st.integers(20, 120), steps=st.integers(20, 300))
def test_uniform_attention_has_the_values_of_its_formulas(positions, steps):
    """Diagonality is the integral of the band, 0.4213; sharpness 1/N; entropy 1."""
    facts = facts_of(torch.full((steps, positions), 1 / positions))
    g = 0.2
    band = 2 * (
        g * math.sqrt(math.pi / 2) * math.erf(1 / (g * math.sqrt(2)))
        - g**2 * (1 - math.exp(-0.5 / g**2))
    )
    assert facts["diagonality"] == pytest.approx(band, abs=0.005)
    assert facts["sharpness"] == pytest.approx(1 / positions, rel=1e-4)
    assert facts["entropy"] == pytest.approx(1.0, abs=1e-4)


def test_failures_are_told_from_success_by_one_number():
    """Stuck, read twice, rushed and random attention are below 0.6.

    Blurred and irregular diagonals are above.
    """
    torch.manual_seed(0)
    steps, positions = 300, 80
    line = (torch.arange(steps) + 0.5) / steps * positions
    durations = torch.rand(positions).exp().cumsum(0)
    irregular = (
        torch.searchsorted(durations / durations[-1], (torch.arange(steps) + 0.5) / steps) + 0.5
    )
    bad = {
        "stuck at the first": around(torch.full((steps,), 0.5), positions),
        "stuck in the middle": around(torch.full((steps,), 40.0), positions),
        "read twice": around((2 * line) % positions, positions),
        "done at a third": around((3 * line).clamp(max=positions - 0.5), positions),
        "somewhere each time": around(torch.rand(steps) * positions, positions),
    }
    good = {
        "irregular": around(irregular, positions),
        "blurred": diagonal(steps, positions, width=0.2 * positions),
        "noisy": (
            0.6 * diagonal(steps, positions)
            + 0.4 * torch.softmax(torch.randn(steps, positions), dim=1)
        ),
    }
    found = {name: facts_of(attention) for name, attention in (bad | good).items()}
    assert all(found[name]["diagonality"] < 0.6 for name in bad), found
    assert all(found[name]["diagonality"] > 0.7 for name in good), found
    assert found["stuck at the first"]["diagonality"] == pytest.approx(0.2507, abs=0.01)
    assert found["somewhere each time"]["monotonic_share"] == pytest.approx(0.5, abs=0.1)
    assert found["read twice"]["monotonic_share"] == pytest.approx(1 - 1 / 299, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 14)), min_size=1, max_size=5),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    rubbish=st.sampled_from([0.0, 7.0, math.nan, math.inf]),
)
def test_padding_has_no_influence_and_a_batch_is_the_mean_of_its_utterances(
    lengths, padding, rubbish
):
    """Whatever lies beyond the lengths, the facts are those of the utterances alone, each with
    the same weight.
    """
    torch.manual_seed(1)
    inputs, outputs = zip(*lengths, strict=True)
    batch = torch.full((len(lengths), max(outputs) + padding[0], max(inputs) + padding[1]), rubbish)
    alone = []
    for row, (n, t) in enumerate(lengths):
        attention = torch.softmax(torch.randn(t, n), dim=1)
        batch[row, :t, :n] = attention
        alone.append(facts_of(attention, 10))
    found = alignment_facts(batch, torch.tensor(inputs), torch.tensor(outputs), 10)
    expected = {name: sum(facts[name] for facts in alone) / len(alone) for name in alone[0]}
    expected["utterances"] = len(lengths)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert found["share_at_max_decoder"] == pytest.approx(
        sum(t >= 10 for t in outputs) / len(outputs)
    )


def test_utterances_that_cannot_be_judged_are_left_out_and_not_counted():
    """Lengths of 0 or beyond the attention, and weights that are NaN, say nothing about the
    others.
    """
    good = diagonal(12, 6)
    batch = torch.stack([good] * 6)
    batch[5, 3, 2] = math.nan
    found = alignment_facts(
        batch, torch.tensor([6, 0, 7, 6, 6, 6]), torch.tensor([12, 12, 12, 13, -1, 12]), 12
    )
    assert found == pytest.approx({**facts_of(good, 12), "utterances": 1.0})
    nothing = alignment_facts(batch[5:], torch.tensor([6]), torch.tensor([12]))
    assert nothing.pop("utterances") == 0
    assert all(math.isnan(value) for value in nothing.values())


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4, 5), (3, 4, 5)])
def test_shapes_that_do_not_fit_are_an_error_that_names_them(shape):
    """A swapped or missing dimension is said with the shapes that were given."""
    with pytest.raises(ValueError, match=r"\(batch, decoder, encoder\)"):
        alignment_facts(torch.rand(shape), torch.tensor([1, 2]), torch.tensor([1, 2]))
