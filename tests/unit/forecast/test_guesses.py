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
    """The same question at the same line is one question and one assumption, however often it is asked."""
    guesses = Guesses()
    answers = [guesses.decide() for _ in range(3)]
    (question,) = guesses.questions
    assert answers == [True] * 3
    assert (question.kind, question.answer, question.times) == ("bool", True, 3)
    assert question.line.startswith(f"{HERE}:")
    assert question.line.endswith("in <listcomp>") or question.line.endswith("its_line")
    (assumption,) = guesses.assumptions
    assert assumption.line == question.line
    assert "False was not looked at" in assumption.what


def test_the_other_answer_can_be_asked_for() -> None:
    """An answer given for a line is used there only: so that both ways can be traced."""

    def ask(guesses: Guesses) -> bool:
        return guesses.decide()

    first = Guesses()
    ask(first)
    second = Guesses(answers={first.questions[0].line: False})
    assert ask(second) is False
    assert second.decide() is True


def test_numbers_follow_what_is_known_of_them() -> None:
    """A count is its upper bound where there is one, else 1; an answer that is given comes first; a float is 1."""

    def count(guesses: Guesses, at_most: int | None) -> int:
        return guesses.count(at_most=at_most)

    guesses = Guesses()
    assert count(guesses, 12) == 12
    assert count(guesses, None) == 1
    assert guesses.number() == 1.0
    assert count(Guesses(answers={guesses.questions[0].line: 7}), 12) == 7
    assert any("the worst case" in assumption.what for assumption in guesses.assumptions)


def test_a_loop_that_waits_for_a_tensor_turns_once() -> None:
    """The condition of a ``while`` enters its loop once in each run of the code, also if it is negated."""
    guesses = Guesses()
    turns = []
    for _ in range(2):
        turns.append(0)
        while guesses.decide():
            turns[-1] += 1
    while not (guesses.decide() and turns):
        turns.append(7)
    assert turns == [1, 1, 7]
    assert {assumption.what for assumption in guesses.assumptions} == {
        "a loop that waits for a tensor was taken to turn once"
    }


def test_a_check_passes() -> None:
    """A question whose one answer raises is given the other one, however it is put."""
    guesses, passed = Guesses(), []
    if len(passed) == 0 and guesses.decide():
        raise ValueError
    if not guesses.decide() or not (guesses.decide()):
        passed.append("no")
        raise ValueError
    assert guesses.decide()
    assert not guesses.decide()
    if guesses.decide():
        passed.append("yes")
    else:
        raise ValueError
    turns = 0
    while True:
        turns += 1
        if not guesses.decide():
            break
    assert turns == 1
    for last in range(5):
        turns = last
        if guesses.decide():
            break
    assert turns == 4
    if guesses.decide():
        passed.append("no check")
    assert passed == ["yes", "no check"]
    assert [question.kind for question in guesses.questions] == ["bool"]


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
        asked = [(q.kind, q.answer) for q in device.guesses.questions]
        lines = {a.line.split(":")[0] for a in device.assumptions}
    return {"found": found, "asked": asked, "lines": sorted(lines)}


@case
def both_answers() -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.repeat(2) if x.sum() > 0 else x

    shapes, answers = [], {}
    for _ in range(2):
        guesses = Guesses(answers=answers)
        with forecast_device(guesses=guesses):
            shapes.append(list(forward(_on_device(4)).shape))
        answers = {question.line: False for question in guesses.questions}
    return shapes


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
        return {"found": found, "asked": [q.kind for q in device.guesses.questions]}


@case
def overwritten_values() -> Any:
    with forecast_device() as device:
        counter = torch.zeros(2, dtype=torch.long, device="cuda")
        view = counter[:1]
        counter += 3
        known = [counter.tolist(), view.tolist()]
        counter.copy_(torch.argmax(_on_device(2, 9), 1))
        return [*known, int(counter[0]), int(view), [q.kind for q in device.guesses.questions]]


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
            "unique rows": list(torch.unique(x, dim=0).shape),
            "consecutive": list(torch.unique_consecutive(x).shape),
            "count": int(mask.sum()),
            "count of longs": int(mask.long().sum()),
            "per row": int(mask.sum(1).max()),
            "argmax": int(x[0].argmax()),
            "assigned": list(x.index_put((mask,), torch.zeros((), device="cuda")).shape),
            "on": str(rows.fake_device),
        }
        x[mask] = 0
        (x.requires_grad_()[mask]).sum().backward()
        return {
            "found": found,
            "gradient": list(x.grad.shape),
            "kinds": sorted({q.kind for q in device.guesses.questions}),
        }


@case
def bounds() -> Any:
    with forecast_device() as device:
        ids = torch.randint(3, 100, (4, 9), device="cuda")
        labels = ids.masked_fill(ids == 0, -100)
        lengths = torch.randint(1, 50, (4,))
        found = {
            "below the vocabulary": bool((labels.max() >= 100).any()),
            "no id is 0": bool((ids == 0).any()),
            "could be 7": bool((ids == 7).any()),
            "longest": int(lengths.max()),
            "after a convolution": int(((lengths - 3) // 2 + 1).max()),
            "layer dropped at 0": bool(torch.rand([]) < 0.0),
            "layer dropped at 0.1": bool(torch.rand([]) < 0.1),
            "by item": torch.rand(1).item() < 0.1,
            "at a uniform": bool(torch.empty(()).uniform_(0, 1).cuda() > 0.3),
        }
        ids[0, :2] = 200
        found["after a write"] = bool((ids >= 150).any())
        return {"found": found, "assumed": sorted({a.what.partition(";")[0] for a in device.assumptions})}


@case
def optimizer_state() -> Any:
    found: dict[str, Any] = {}
    with forecast_device() as device:
        for name in ("AdamW", "NAdam", "RAdam", "ASGD"):
            for options in ({"foreach": False}, {"foreach": True}):
                layer = torch.nn.Linear(2, 2).cuda()
                optimizer = getattr(torch.optim, name)(layer.parameters(), **options)
                for _ in range(3):
                    layer(_on_device(2, 2)).sum().backward()
                    optimizer.step()
                state = optimizer.state[layer.weight]
                found[f"{name} {options['foreach']}"] = [state["step"].item(), "mu_product" in state]
                if name == "NAdam":
                    found["product"] = round(state["mu_product"].item(), 3)
        found["asked"] = len(device.guesses.questions)
    return found


@case
def checks() -> Any:
    with forecast_device() as device:
        x, turns = _on_device(4), []
        if x.sum() > 3:
            raise ValueError
        if not (x > 0).any():
            raise ValueError
        if len(turns) == 0 and x.max() > 0:
            turns.append("no")
            raise ValueError
        assert (x > 3).all()
        assert not (x > 3).all(), "a message"
        while (x > 0).any():
            turns.append("while")
            x = x - 1
        while not (x > 0).all():
            turns.append("while not")
            x = x - 1
        while True:
            turns.append("true")
            if not (x > 0).any():
                break
        while True:
            turns.append("true")
            if (x > 0).any():
                break
        for _ in range(3):
            turns.append("for")
            if (x > 0).all():
                break
        torch.nn.init.trunc_normal_(x)
        torch.nn.init.trunc_normal_(x, mean=0.0, std=10.0, a=-0.1, b=0.1)
        return [turns, len(device.guesses.questions)]


@case
def counters() -> Any:
    with forecast_device():
        seen = torch.zeros((), dtype=torch.long)
        seen += 1
        seen.add_(torch.ones((), dtype=torch.long))
        rounds = torch.tensor(3)
        rounds += 4
        rounds.add_(seen)
        flags = torch.ones_like(torch.randint(5, (2, 3), device="cuda"), dtype=torch.bool)
        flags[0, 1] = False
        before = int(flags.sum())
        flags.fill_(True)
        return [int(seen), int(rounds), before, bool(flags.all())]


@case
def printed_values() -> Any:
    with forecast_device() as device:
        loss = _on_device(3).mean()
        return [
            f"{loss:.3f} {loss.item():.1f}",
            float(loss),
            loss.detach().cpu().numpy().shape,
            _on_device(2, 3).numpy(force=False).dtype.name,
            _on_device(2, 0).tolist(),
            {a.what.partition(":")[0] for a in device.assumptions}.__len__() >= 1,
        ]


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
    assert result["asked"] == [["bool", True], ["bool", True]]
    assert result["lines"] == [HERE]


def test_a_branch_can_be_traced_both_ways(results: dict[str, Any]) -> None:
    """The lines asked about in one trace are the keys with which the next takes the other way."""
    assert results["both_answers"] == [[8], [4]]


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
    assert result["asked"] == []


def test_what_is_overwritten_is_no_longer_known(results: dict[str, Any]) -> None:
    """In-place arithmetic is followed through views; a write of something unknown makes all views unknown."""
    counter, view, later, later_view, asked = results["overwritten_values"]
    assert (counter, view) == ([3, 3], [3])
    assert (later, later_view) == (1, 1)
    assert asked == ["int"]  # one line asks both


def test_shapes_that_depend_on_values_are_the_worst_case(results: dict[str, Any]) -> None:
    """Without values every element is kept and counts are as large as they can be, on the device, with gradients."""
    result = results["worst_cases"]
    assert result["found"] == {
        "nonzero": [24, 2],
        "where": [[24], [24]],
        "masked_select": [24],
        "indexed": [24],
        "unique": [[24], [4, 6], [24]],
        "unique rows": [4, 6],
        "consecutive": [24],
        "count": 24,
        "count of longs": 24,
        "per row": 6,
        "argmax": 5,
        "assigned": [4, 6],
        "on": "forecast:0",
    }
    assert result["gradient"] == [4, 6]
    assert result["kinds"] == ["int", "rows"]


def test_bounds_decide_what_they_can(results: dict[str, Any]) -> None:
    """Checks against bounds are certain, layers are dropped as a likely random number says, writes end a bound."""
    result = results["bounds"]
    assert result["found"] == {
        "below the vocabulary": False,
        "no id is 0": False,
        "could be 7": True,
        "longest": 49,
        "after a convolution": 24,
        "layer dropped at 0": False,
        "layer dropped at 0.1": False,
        "by item": False,
        "at a uniform": True,
        "after a write": True,
    }
    assert result["assumed"] == [
        "a number of a tensor was taken as 0.5: it matters only if the code branches on it",
        "a random number was taken as the middle of its range",
        "an integer of a tensor was taken as 24 (the worst case)",
        "an integer of a tensor was taken as 49 (the worst case)",
        "bool(tensor) was taken as True",
    ]


def test_scalars_of_optimizers_keep_their_values(results: dict[str, Any]) -> None:
    """Step counts on the host are exact after three steps, for-loop and foreach, and nothing is asked."""
    found = results["optimizer_state"]
    assert found.pop("asked") == 0
    assert 0 < found.pop("product") < 1
    assert found == {
        f"{name} {foreach}": [3.0, name == "NAdam"]
        for name in ("AdamW", "NAdam", "RAdam", "ASGD")
        for foreach in (False, True)
    }


def test_checks_of_tensors_pass_and_loops_end(results: dict[str, Any]) -> None:
    """Tensors as conditions raise nothing, turn a while once and a for to its end, also in torch's own code."""
    turns, open_questions = results["checks"]
    assert turns == ["while", "while not", "true", "true", "for", "for", "for"]
    assert open_questions <= 1


def test_counters_count_once(results: dict[str, Any]) -> None:
    """What torch's own constants follow is not followed a second time, and a fill makes everything known again."""
    assert results["counters"] == [2, 9, 5, True]


def test_numbers_can_be_printed(results: dict[str, Any]) -> None:
    """Format strings, float(), numpy() and tolist() work on fake tensors, and say that the number is none."""
    assert results["printed_values"] == ["1.000 1.0", 1.0, [], "float32", [[], []], True]


def test_a_result_that_no_rule_knows_is_refused_by_name(results: dict[str, Any]) -> None:
    """H424 names the operator and the line."""
    rule, text = results["beyond_all_rules"]
    assert rule == "H424"
    assert "holdfast_guess::pick" in text
    assert f"{HERE}:" in text


if __name__ == "__main__":
    answer()
