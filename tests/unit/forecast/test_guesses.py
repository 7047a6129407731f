"""Answers to questions for values.

What is known, what is expected, what is guessed, and that guesses are listed.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from holdfast.core.errors import PolicyError
from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.fake.guesses import Guesses

RUNS_IN_CHILD = True
HERE = "test_guesses.py"


def on_device(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda")


def test_an_answer_is_listed_once_with_its_line_and_can_be_turned() -> None:
    """One line is one assumption.

    Turned, it is answered with False, and what was assumed there no longer is.
    """
    guesses = Guesses()

    def ask() -> bool:
        return guesses.decide()

    assert [ask() for _ in range(3)] == [True] * 3
    (line,) = guesses.asked
    (assumption,) = guesses.assumptions
    assert line.startswith(f"{HERE}:")
    assert assumption.line == line
    assert "False was not" in assumption.what
    guesses.answer_false(line)
    assert guesses.assumptions == ()
    assert ask() is False
    assert guesses.decide() is True


def test_a_loop_that_waits_for_a_tensor_is_refused() -> None:
    """A question that is asked without end in one step ends in H424 with its line.

    Another step begins anew.
    """
    guesses = Guesses()
    with pytest.raises(PolicyError, match=f"10,000 times.*{HERE}:") as caught:
        while guesses.decide():
            pass
    assert caught.value.rule == "H424"
    guesses.begin_step()
    assert guesses.decide()


def test_checks_for_finite_numbers_pass() -> None:
    """Questions about NaN and infinity are answered as for finite numbers, others as yes.

    Each with its line.
    """
    with forecast_device() as device:
        x = on_device(4)
        assert torch.isfinite(x).all()
        assert not torch.isnan(x).any()
        assert not (torch.isnan(x).any())
        assert not (torch.isinf(x.sum()))
        assert not (~torch.isfinite(x)).any().cpu()
        assert len(device.guesses.asked) == 0
        assert x.sum() > 0
        assert torch.equal(x, x + 1)
        assert len(device.guesses.asked) == 2
        assert {one.line.split(":")[0] for one in device.assumptions} == {HERE}


def test_values_of_the_batch_stay_known_on_the_device() -> None:
    """Lengths and masks from real host tensors give exact shapes through moves, comparisons and
    sums: no guess.
    """
    with forecast_device() as device:
        lengths, ids = (
            torch.tensor([3, 1, 2]),
            torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0], [5, 6, 0, 0]]),
        )
        there, mask = lengths.to("cuda"), ids.cuda() != 0
        positions = torch.arange(int(there.max()), device="cuda")
        inside = positions[None] < there[:, None]
        assert there.tolist() == there.cpu().numpy().tolist() == [3, 1, 2]
        assert int(mask.sum(1).max()) == 3
        assert not mask.all()
        assert mask.nonzero().shape == (6, 2)
        assert on_device(3, 4).masked_select(mask).shape == (6,)
        assert on_device(3, 4, 2)[mask].shape == (6, 2)
        assert inside.sum().item() == 6
        assert torch.unique(ids.cuda()).tolist() == [0, 5, 6, 7]
        assert on_device(3, 2).repeat_interleave(there, 0).shape == (6, 2)
        assert torch.bincount(there).shape == (4,)
        assert F.one_hot(there, 4).shape == (3, 4)
        assert device.assumptions == ()


def test_what_is_overwritten_is_no_longer_known() -> None:
    """In-place arithmetic is followed through views.

    A write of something unknown makes all views unknown.
    """
    with forecast_device() as device:
        counter = torch.zeros(2, dtype=torch.long, device="cuda")
        view = counter[:1]
        counter += 3
        assert (counter.tolist(), view.tolist()) == ([3, 3], [3])
        counter.copy_(torch.argmax(on_device(2, 9), 1))
        assert device.assumptions == ()
        assert (int(counter[0]), int(view)) == (1, 1)
        assert len(device.assumptions) == 1


def test_shapes_that_depend_on_values_are_the_worst_case() -> None:
    """Without values every element is kept and counts are as large as they can be, on the
    device, with gradients.
    """
    with forecast_device() as device:
        x = on_device(4, 6)
        mask = x > 0
        assert mask.nonzero().shape == (24, 2)
        assert [part.shape for part in torch.where(mask)] == [(24,), (24,)]
        assert x.masked_select(mask).shape == x[mask].shape == (24,)
        assert (int(mask.sum()), int(mask.sum(1).max())) == (24, 6)
        assert x.index_put((mask,), torch.zeros((), device="cuda")).shape == (4, 6)
        assert x[mask].fake_device == device.device
        x[mask] = 0
        x.requires_grad_()[mask].sum().backward()
        assert x.grad.shape == (4, 6)
        said = {one.what.partition(" ")[0] for one in device.assumptions}
        assert said == {"an", "aten.masked_select", "aten.nonzero"}


def test_random_numbers_are_taken_as_the_middle_of_their_range() -> None:
    """Layers are dropped as a likely random number says, and an integer is as large as it can
    be.
    """
    with forecast_device() as device:
        assert int(torch.randint(1, 50, (4,)).max()) == 49
        assert not torch.rand([]) < 0.1
        assert not torch.rand(1).item() < 0.1
        assert torch.empty(()).uniform_(0, 1).cuda() > 0.3
        assumptions = {assumption.what for assumption in device.assumptions}
    for words in ("0.5", "random number", "49"):
        assert any(words in assumption for assumption in assumptions), words


def test_a_result_that_no_rule_knows_is_refused_by_name() -> None:
    """H424 names the operator and the line."""
    library = torch.library.Library("holdfast_guess", "DEF")
    library.define("pick(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
    with (
        forecast_device(),
        pytest.raises(PolicyError, match=f"holdfast_guess::pick.*{HERE}:") as caught,
    ):
        torch.ops.holdfast_guess.pick(on_device(3))
    assert caught.value.rule == "H424"
