"""Answers to questions for values: what is known, what is expected, what is guessed, and that guesses are listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.forecast.in_child import answer, case, results_of
from torch.nn import functional as F

from holdfast.core.errors import PolicyError
from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.fake.guesses import Guesses

HERE = "test_guesses.py"


def test_an_answer_is_listed_once_with_its_line() -> None:
    """The same question at the same line is one assumption, however often it is asked."""
    guesses = Guesses()
    answers = [guesses.decide() for _ in range(3)]
    (line,) = guesses.asked
    assert answers == [True] * 3
    assert line.startswith(f"{HERE}:")
    (assumption,) = guesses.assumptions
    assert assumption.line == line
    assert "False was not looked at" in assumption.what


def test_the_other_answer_can_be_given_for_a_line() -> None:
    """It is used there only, so that both ways can be traced, and what was assumed there no longer is."""

    def ask(guesses: Guesses) -> bool:
        return guesses.decide()

    guesses = Guesses()
    ask(guesses)
    (line,) = guesses.asked
    guesses.give({line: False})
    assert guesses.assumptions == ()
    assert ask(guesses) is False
    assert guesses.decide() is True


def test_a_loop_that_waits_for_a_tensor_is_refused() -> None:
    """A question that is asked without end in one step ends in H424 with its line; another step begins anew."""
    guesses = Guesses()
    with pytest.raises(PolicyError, match=f"a loop asked a tensor 10000 times.*{HERE}:") as caught:
        while guesses.decide():
            pass
    assert caught.value.rule == "H424"
    guesses.begin_step()
    assert guesses.decide()


def _on_device(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda")


@case
def decisions() -> Any:
    with forecast_device() as device:
        x = _on_device(4)
        found = {
            "finite": bool(torch.isfinite(x).all()),
            "nan": bool(torch.isnan(x).any()),
            "inf or nan": bool(torch.isnan(x).any() or torch.isinf(x.sum())),
            "not finite": bool((~torch.isfinite(x)).any().cpu()),
            "branch": bool(x.sum() > 0),
            "equal": torch.equal(x, x + 1),
            "equal of other shapes": torch.equal(x, _on_device(5)),
        }
        asked = len(device.guesses.asked)
        lines = {a.line.split(":")[0] for a in device.assumptions}
    return {"found": found, "asked": asked, "lines": sorted(lines)}


@case
def known_values() -> Any:
    with forecast_device() as device:
        with device.suspended():
            lengths, ids = torch.tensor([3, 1, 2]), torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0], [5, 6, 0, 0]])
        there, mask = lengths.to("cuda"), ids.cuda() != 0
        positions = torch.arange(int(there.max()), device="cuda")
        inside = positions[None] < there[:, None]
        found = {
            "lengths": there.tolist(),
            "sum of mask": int(mask.sum(1).max()),
            "all": bool(mask.all()),
            "rows": list(mask.nonzero().shape),
            "selected": list(_on_device(3, 4).masked_select(mask).shape),
            "indexed": list(_on_device(3, 4, 2)[mask].shape),
            "made here": inside.sum().item(),
            "distinct": torch.unique(ids.cuda()).tolist(),
            "numpy": there.cpu().numpy().tolist(),
            "repeated": list(_on_device(3, 2).repeat_interleave(there, 0).shape),
            "bins": list(torch.bincount(there).shape),
            "max of one-hot": list(F.one_hot(there, 4).shape),
        }
        return {"found": found, "assumed": len(device.assumptions)}


@case
def overwritten_values() -> Any:
    with forecast_device() as device:
        counter = torch.zeros(2, dtype=torch.long, device="cuda")
        view = counter[:1]
        counter += 3
        known = [counter.tolist(), view.tolist()]
        counter.copy_(torch.argmax(_on_device(2, 9), 1))
        return [*known, int(counter[0]), int(view), len(device.assumptions)]


@case
def worst_cases() -> Any:
    with forecast_device() as device:
        x = _on_device(4, 6)
        mask = x > 0
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
        rows = x[mask]
        found = {
            "nonzero": list(mask.nonzero().shape),
            "where": [list(part.shape) for part in torch.where(mask)],
            "masked_select": list(x.masked_select(mask).shape),
            "indexed": list(rows.shape),
            "unique": [list(values.shape), list(inverse.shape), list(counts.shape)],
            "count": int(mask.sum()),
            "per row": int(mask.sum(1).max()),
            "assigned": list(x.index_put((mask,), torch.zeros((), device="cuda")).shape),
            "on": str(rows.fake_device),
        }
        x[mask] = 0
        (x.requires_grad_()[mask]).sum().backward()
        return {
            "found": found,
            "gradient": list(x.grad.shape),
            "assumed": sorted({a.what.partition(" ")[0] for a in device.assumptions}),
        }


@case
def likely() -> Any:
    with forecast_device() as device:
        lengths = torch.randint(1, 50, (4,))
        found = {
            "longest": int(lengths.max()),
            "layer dropped at 0.1": bool(torch.rand([]) < 0.1),
            "by item": torch.rand(1).item() < 0.1,
            "at a uniform": bool(torch.empty(()).uniform_(0, 1).cuda() > 0.3),
        }
        return {"found": found, "assumed": sorted({a.what.partition(";")[0] for a in device.assumptions})}


@case
def initialised() -> Any:
    with forecast_device() as device:
        torch.nn.init.trunc_normal_(_on_device(4))
        torch.nn.init.trunc_normal_(_on_device(4), mean=0.0, std=10.0, a=-0.1, b=0.1)
        return len(device.assumptions)


@case
def beyond_all_rules() -> Any:
    library = torch.library.Library("holdfast_guess", "DEF")
    library.define("pick(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
    with forecast_device():
        try:
            torch.ops.holdfast_guess.pick(_on_device(3))
        except PolicyError as error:
            return [error.rule, str(error)]
    return None


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What the cases gave."""
    return results_of(__file__)


def test_checks_for_finite_numbers_pass(results: dict[str, Any]) -> None:
    """Questions about NaN and infinity are answered as for finite numbers, others as yes; each with its line."""
    result = results["decisions"]
    assert result["found"] == {
        "finite": True,
        "nan": False,
        "inf or nan": False,
        "not finite": False,
        "branch": True,
        "equal": True,
        "equal of other shapes": False,
    }
    assert result["asked"] == 2
    assert result["lines"] == [HERE]


def test_values_of_the_batch_stay_known_on_the_device(results: dict[str, Any]) -> None:
    """Lengths and masks from real host tensors give exact shapes through moves, comparisons and sums: no guess."""
    result = results["known_values"]
    assert result["found"] == {
        "lengths": [3, 1, 2],
        "sum of mask": 3,
        "all": False,
        "rows": [6, 2],
        "selected": [6],
        "indexed": [6, 2],
        "made here": 6,
        "distinct": [0, 5, 6, 7],
        "numpy": [3, 1, 2],
        "repeated": [6, 2],
        "bins": [4],
        "max of one-hot": [3, 4],
    }
    assert result["assumed"] == 0


def test_what_is_overwritten_is_no_longer_known(results: dict[str, Any]) -> None:
    """In-place arithmetic is followed through views; a write of something unknown makes all views unknown."""
    counter, view, later, later_view, asked = results["overwritten_values"]
    assert (counter, view) == ([3, 3], [3])
    assert (later, later_view) == (1, 1)
    assert asked == 1  # one line asks both


def test_shapes_that_depend_on_values_are_the_worst_case(results: dict[str, Any]) -> None:
    """Without values every element is kept and counts are as large as they can be, on the device, with gradients."""
    result = results["worst_cases"]
    assert result["found"] == {
        "nonzero": [24, 2],
        "where": [[24], [24]],
        "masked_select": [24],
        "indexed": [24],
        "unique": [[24], [4, 6], [24]],
        "count": 24,
        "per row": 6,
        "assigned": [4, 6],
        "on": "forecast:0",
    }
    assert result["gradient"] == [4, 6]
    assert result["assumed"] == ["an", "aten._unique2", "aten.masked_select", "aten.nonzero"]


def test_random_numbers_are_taken_as_the_middle_of_their_range(results: dict[str, Any]) -> None:
    """Layers are dropped as a likely random number says, and an integer is as large as it can be."""
    result = results["likely"]
    assert result["found"] == {
        "longest": 49,
        "layer dropped at 0.1": False,
        "by item": False,
        "at a uniform": True,
    }
    assert result["assumed"] == [
        "a number of a tensor was taken as 0.5: it matters only if the code branches on it",
        "a random number was taken as the middle of its range",
        "an integer of a tensor was taken as 49 (the worst case)",
    ]


def test_an_initialisation_that_draws_again_ends(results: dict[str, Any]) -> None:
    """Torch's truncated normal distribution waits for numbers that suit; on fake ones it asks nothing."""
    assert results["initialised"] == 0


def test_a_result_that_no_rule_knows_is_refused_by_name(results: dict[str, Any]) -> None:
    """H424 names the operator and the line."""
    rule, text = results["beyond_all_rules"]
    assert rule == "H424"
    assert "holdfast_guess::pick" in text
    assert f"{HERE}:" in text


if __name__ == "__main__":
    answer()
