"""The split test finds what a bare mean is over, and refuses to split where nothing reproduces
the gradient.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.guard.guarded import guarded
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast.guard.splitting import split_trials
from holdfast.guard.splitting.weighting import SAMPLES, Weighting, find_weightings, shares

Model = nn.Module
LENGTHS = torch.tensor([5, 1, 6, 2, 3, 6, 1, 4, 2, 2])


def ragged() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return frames, labels padded with -100, and a mask; shapes (10, 6, 5), (10, 6), (10, 6)."""
    torch.manual_seed(1)
    x = torch.randn(10, 6, 5, dtype=torch.float64)
    mask = torch.arange(6) < LENGTHS.unsqueeze(1)
    return x, torch.randint(0, 3, (10, 6)).where(mask, torch.tensor(-100)), mask


def step(
    run_dir: Any, batch: Any, make_loss: Callable[[Model], Any], **policy: Any
) -> tuple[torch.Tensor, Any, dict]:
    """Return the gradient that a first step leaves, its result, and what a split promises.

    Without a split there is nothing to promise, and the dict is empty.
    """
    torch.manual_seed(2)
    model = nn.Linear(5, 3).double()
    guard = guarded(run_dir, model, **policy)
    split = policy.pop("split", None)
    with guard:
        result = guard.step(batch, make_loss(model), split=split)
        promises = [event.data for event in guard.events() if event.kind == "promises"]
    assert len(promises) <= 1
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return gradient, result, promises[0] if promises else {}


def errors(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(dim=-1)


def over(count: Callable[[Any], torch.Tensor]) -> Callable[[Model], Any]:
    """Return a loss that is a mean over the frames that `count` says."""
    return lambda model: (
        lambda batch: (errors(model, batch[0]) * count(batch)).sum() / count(batch).sum()
    )


X, Y, MASK = ragged()
CASES = {
    "samples": ((X, Y), lambda m: lambda b: errors(m, b[0]).mean(), "samples"),
    "ignore_index": (
        (X, Y),
        lambda m: lambda b: F.cross_entropy(m(b[0]).mT, b[1]),
        "valid labels of batch[1] (not -100)",
    ),
    "padding": (
        {"x": X, "ids": Y.masked_fill(~MASK, 7)},
        lambda m: lambda b: F.cross_entropy(m(b["x"]).mT, b["ids"], ignore_index=7),
        "valid labels of batch['ids'] (not 7)",
    ),
    "next token": (
        {"x": X, "labels": Y},
        lambda m: lambda b: F.cross_entropy(m(b["x"])[:, :-1].mT, b["labels"][:, 1:]),
        "valid labels of batch['labels'] without the first of each row (not -100)",
    ),
    "mask": ((X, MASK), over(lambda b: b[1]), "entries of the mask batch[1] (not 0)"),
    "padding mask": ((X, ~MASK), over(lambda b: ~b[1]), "entries of the mask batch[1] (not 1)"),
    "lengths": (
        (X, LENGTHS),
        over(lambda b: torch.arange(6) < b[1].unsqueeze(1)),
        "sum of batch[1]",
    ),
    "weights": ((X[:, 0], LENGTHS.double() / 7), over(lambda b: b[1]), "sum of batch[1]"),
    "sum": ((X, Y), lambda m: lambda b: errors(m, b[0]).sum(), "a sum, not a mean"),
    "CTC sum": (
        (X, Y.clamp(1, 2), LENGTHS.clamp(max=2)),
        lambda m: lambda b: ctc(m, b, "sum"),
        "a sum, not a mean",
    ),
    "CTC mean": (
        (X, Y.clamp(1, 2), LENGTHS.clamp(max=2)),
        lambda m: lambda b: ctc(m, b, "mean"),
        "samples",
    ),
}


def ctc(model: Model, batch: Any, reduction: str) -> torch.Tensor:
    """Return the loss of torch, whose "mean" is over samples, each divided by the length of its
    target.
    """
    x, targets, lengths = batch
    scores = model(x).log_softmax(2).transpose(0, 1)
    return F.ctc_loss(scores, targets, torch.full((len(x),), 6), lengths, reduction=reduction)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_what_a_bare_mean_is_over_is_found_out_and_used(tmp_path, case, micro_batch_size):
    """For each thing that a mean may be over, the first batch shows which it is, and the split
    is exact.
    """
    batch, loss, weighting = CASES[case]
    whole, expected, _ = step(tmp_path / "a", batch, loss)
    parted, found, said = step(tmp_path / "b", batch, loss, micro_batch_size=micro_batch_size)
    assert said["weighting"] == weighting
    torch.testing.assert_close(parted, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    assert found.items == expected.items == 10


def test_a_loss_that_no_weights_reproduce_is_refused_and_the_reason_says_what_was_tried(tmp_path):
    """The error says by how much the parts miss the whole, what was tried, and the two ways out."""
    with pytest.raises(holdfast.HoldfastError) as caught:
        step(
            tmp_path,
            (X, Y),
            lambda m: lambda b: F.cross_entropy(m(b[0]).mT, b[1]).sqrt(),
            micro_batch_size=3,
        )
    text = str(caught.value)
    assert caught.value.rule == "H207"
    for words in (
        "over 4 samples differs",
        "%",
        "as a mean over samples",
        "valid labels of batch[1] (not -100)",
    ):
        assert words in text
    assert "TwoPass(outputs, loss)" in text
    assert "Loss(mean, items)" in text


def test_of_what_is_equal_the_plainest_is_kept_until_a_batch_tells_them_apart(tmp_path):
    """With equal lengths samples are kept.

    The first ragged batch is tried before it is split, and is exact.
    """
    torch.manual_seed(2)
    model = nn.Linear(5, 3).double()
    guard = guarded(
        tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=3
    )
    full = Y.masked_fill(~MASK, 1)

    def loss(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).mT, batch[1])

    for _ in range(4):  # the 3rd split step is not one that is tried anyway
        guard.step((X, full.clamp(min=1)), loss)
    for _ in range(3):
        guard.step((X, Y), loss)
    said = [event.data["weighting"] for event in guard.events() if event.kind == "promises"]
    assert said == ["samples", "valid labels of batch[1] (not -100)"]
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    loss((X, Y)).backward()
    torch.testing.assert_close(
        found, torch.cat([p.grad.flatten() for p in model.parameters()]), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(
    "leaf",
    [
        torch.full((4, 3), torch.inf),
        torch.full((4, 3), torch.nan),
        torch.arange(12, dtype=torch.uint8).reshape(4, 3),
        torch.arange(12, dtype=torch.int8).reshape(3, 4),
        torch.full((4, 3), 2**62),
        torch.zeros(4, 0),
        torch.zeros(4, 3, dtype=torch.complex64),
        torch.zeros(4, 3, 2, dtype=torch.bfloat16),
        torch.rand(4, 3, dtype=torch.float16),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, 3).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        [torch.zeros(2), torch.zeros(3), torch.zeros(0), torch.zeros(1)],
        ["a", "b", "c", "d"],
        pytest.param(object(), id="object"),
        None,
    ],
    ids=str,
)
def test_no_leaf_of_a_batch_is_too_strange_to_look_at(leaf):
    """Whatever a batch holds, the search for weightings ends, and each of them can be counted in
    it.
    """
    batch = {"leaf": leaf, 3: [torch.ones(4)], (1, 2): torch.ones(4)}
    found = find_weightings(batch, 4)
    assert found[0] == SAMPLES
    assert all(
        float(weighting.count(batch, 4)) >= 0 or weighting.kind == "total" for weighting in found
    )
    assert shares(Weighting(kind="labels", keys=("absent", 0)), [(batch, 4)]) is None
    with pytest.raises(
        holdfast.HoldfastError, match=r"(?s)valid labels of batch\['absent'\].*H207"
    ):
        Weighting(kind="labels", keys=("absent",)).count(batch, 4)


def test_a_compiled_model_is_tried_as_it_is_written(tmp_path):
    """The trial of a split compiles nothing: in a copy of the process that would never end."""
    ours = os.getpid()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        if os.getpid() != ours:
            time.sleep(1000)  # as inductor does, whose own processes are not copied
        return graph.forward

    model = torch.compile(nn.Linear(4, 1), backend=backend)
    features, targets = torch.randn(8, 4), torch.randn(8, 1)
    F.mse_loss(model(features), targets).backward()  # it is compiled for batches of 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = holdfast.Policy(micro_batch_size=3)
    with holdfast.Guard(tmp_path, model=model, optimizer=optimizer, policy=policy) as guard:
        guard.step((features, targets), lambda batch: F.mse_loss(model(batch[0]), batch[1]))
        (promises,) = (event for event in guard.events() if event.kind == "promises")
    assert promises.data["split_check"]["outcome"] == "exact"


def noisy(model: Model, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return (out + 0.3 * torch.randn_like(out)).square().sum(dim=-1)


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize(
    ("reduce", "weighting"), [(torch.sum, "a sum, not a mean"), (torch.mean, "samples")]
)
def test_a_loss_with_noise_of_its_own_is_split_as_the_sum_or_the_mean_that_it_is(
    tmp_path, monkeypatch, reduce, weighting, forks
):
    """As that of a VAE.

    Parts of a sum are added, not averaged, also where the trial is made in place.
    """
    if not forks:
        monkeypatch.setattr(split_trials, "backward_works_in_a_copy", lambda: False)
    found = {}
    for size in (None, 2):
        folder = tmp_path / str(size)
        found[size], _, said = step(
            folder, X, lambda m: lambda x: reduce(noisy(m, x)), micro_batch_size=size
        )
    assert said["split_check"]["outcome"] == "random"
    assert said["weighting"] == weighting
    ratio = found[2].norm() / found[None].norm()
    assert 0.7 < ratio < 1.4  # five parts: 5 or 1/5 if sum and mean are mistaken


def both(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Return a mean with a sum beside it: no weights of the parts fit both."""
    found = noisy(model, x)
    return found.mean() + 1e-2 * found.sum()


def contrast(model: Model, x: torch.Tensor) -> torch.Tensor:
    first, second = (F.dropout(model(x).flatten(1), 0.3) for _ in range(2))
    return F.cross_entropy(first @ second.T, torch.arange(len(x)))


def of_pairs_with_one_label(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, alike = model(x).flatten(1), y[:, None] == y
    return ((out[:, None] - out).square().sum(dim=-1) * alike).sum() / len(x) + out.square().mean()


def gathered(model: Model, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return errors(model, x)[kept].mean()


def hardest(model: Model, x: torch.Tensor, person: torch.Tensor) -> torch.Tensor:
    """Return a triplet loss of the farthest of a person and the nearest of others.

    Without others it is 0.
    """
    out, alike = model(x).flatten(1), person[:, None] == person
    distance = (out[:, None] - out).square().sum(dim=-1)
    return F.relu((distance * alike).amax(1) - distance.masked_fill(alike, 1e9).amin(1) + 1).mean()


def of_two_domains(model: Model, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a mean, and the distance of the means of two domains where there are both."""
    found = errors(model, x).mean()
    if target.all() or not target.any():
        return found
    out = model(x).flatten(1)
    return found + (out[target].mean(0) - out[~target].mean(0)).square().sum()


def mixed(x: torch.Tensor) -> torch.Tensor:
    return x[torch.randperm(len(x))]


def of_two_passes(model: Model, generator: torch.Generator) -> holdfast.TwoPass:
    """Return a loss whose second pass sees other noise than the first."""
    return holdfast.TwoPass(
        lambda b: own(model, b[0], generator)[None].expand(len(b[0])), lambda out, b: out.norm()
    )


def clamped(model: Model) -> Any:
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return lambda b: errors(model, b[0]).mean()


NOT_SPLIT = {
    "coupled in training alone": lambda m: (
        lambda b: errors(m, b[0]).mean() ** (2 if m.training else 1)
    ),
    "hardest triplets of persons in a row": lambda m: lambda b: hardest(m, b[0], b[2] // 5),
    "two domains, one after the other": lambda m: lambda b: of_two_domains(m, b[0], b[2] >= 5),
    "items wrongly declared": lambda m: (
        lambda b: holdfast.Loss(F.cross_entropy(m(b[0]).mT, b[1]), len(b[0]))
    ),
    "two passes with a generator of their own": lambda m: of_two_passes(m, torch.Generator()),
    "a small sum": lambda m: lambda b: errors(m, b[0]).mean() + 1e-4 * errors(m, b[0]).sum(),
    "a hook that clamps": clamped,
    "a mean over each class": lambda m: (
        lambda b: (errors(m, b[0]).mean(1) / (b[2][:, None] == b[2]).sum(1)).sum()
    ),
    "a sum by the number of positives": lambda m: (
        lambda b: errors(m, b[0]).sum() / (b[2] == 0).sum().clamp(min=1)
    ),
    "mean and sum": lambda m: lambda b: both(m, b[0]),
    "noise, then a root": lambda m: lambda b: noisy(m, b[0]).mean().sqrt(),
    "contrast of two dropouts": lambda m: lambda b: contrast(m, b[0]),
    "some of the samples": lambda m: lambda b: gathered(m, b[0], torch.randperm(len(b[0]))[:2]),
    "samples mixed": lambda m: lambda b: errors(m, b[0] + mixed(b[0])).mean(),
    "samples mixed by numpy": lambda m: (
        lambda b: errors(m, b[0] + b[0][np.random.permutation(len(b[0]))]).mean()
    ),
    "mixed half of the time": lambda m: (
        lambda b: errors(m, (mixed if np.random.rand() < 0.5 else abs)(b[0])).mean()
    ),
    "mixed in training alone": lambda m: (
        lambda b: errors(m, b[0] + m.training * mixed(b[0])).mean()
    ),
    "noise seeded in each call": lambda m: lambda b: own(m, b[0], torch.Generator().manual_seed(3)),
    "pairs of one of many classes": lambda m: lambda b: of_pairs_with_one_label(m, b[0], b[2]),
}


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("case", NOT_SPLIT)
def test_a_loss_whose_parts_do_not_make_up_the_whole_is_refused(tmp_path, monkeypatch, case, forks):
    """Or whose random numbers cannot be given to parts, so that it could not be tried."""
    if not forks:
        monkeypatch.setattr(split_trials, "backward_works_in_a_copy", lambda: False)
    with pytest.raises(holdfast.BatchError) as refused:
        step(tmp_path, (X, Y, torch.arange(10)), NOT_SPLIT[case], micro_batch_size=2)
    assert refused.value.rule == "H207"


def own(model: Model, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return errors(model, x + torch.randn(x.shape, generator=generator, dtype=x.dtype)).mean()


def rows_of(draws: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(draws.standard_normal((len(x), 1, 1)))


def again(model: Model, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: F.dropout(model(x)), x, use_reentrant=False).square()


SPLIT = {
    "dropout": (lambda m: lambda b: errors(m, F.dropout(b[0], 0.4)).mean(), False),
    "a generator of its own": (
        lambda m: functools.partial(lambda g, b: own(m, b[0], g), torch.Generator()),
        False,
    ),
    "random slopes": (lambda m: lambda b: F.rrelu(m(b[0]), training=True).square().mean(), False),
    "frames flattened": (lambda m: lambda b: noisy(m, b[0].flatten(0, 1)).mean(), False),
    "time first": (lambda m: lambda b: noisy(m, b[0].transpose(0, 1)).mean(), False),
    "classes sampled": (lambda m: lambda b: sampled(m, b[0]).mean(), False),
    "one number for all": (
        lambda m: lambda b: errors(m, b[0]).mean() * (1 + 9 * torch.randn(())),
        True,
    ),
    "rows of numpy": (lambda m: lambda b: errors(m, b[0] + rows_of(np.random, b[0])).mean(), False),
    "dropout in a checkpoint": (lambda m: lambda b: again(m, b[0]).mean(), False),
    "one number of numpy for all": (
        lambda m: lambda b: errors(m, b[0]).mean() * np.random.beta(2, 2),
        True,
    ),
}


def sampled(model: Model, x: torch.Tensor) -> torch.Tensor:
    scores = model(x[:, 0])
    return F.cross_entropy(
        scores, torch.multinomial(scores.softmax(1), 1).squeeze(1), reduction="none"
    )


@pytest.mark.parametrize("case", SPLIT)
def test_a_random_loss_is_tried_with_the_same_numbers_in_parts_and_whole(tmp_path, case):
    """Where numbers belong to one sample each, a split is equal in distribution.

    Else it has less variance.
    """
    make_loss, shared = SPLIT[case]
    _, _, said = step(tmp_path, (X, Y), make_loss, micro_batch_size=2)
    assert said["split_check"] == said["split_check"] | {
        "outcome": "random",
        "draws": "shared" if shared else "own",
    }
    assert said["weighting"] == "samples"


def test_a_model_that_returns_other_things_in_evaluation_is_split(tmp_path):
    """Nothing is tried in evaluation that can be tried in training."""
    _, _, said = step(
        tmp_path,
        X,
        lambda m: lambda x: (errors(m, x) if m.training else None).mean(),
        micro_batch_size=2,
    )
    assert (said["split_check"]["outcome"], said["split_promise"]) == (
        "exact",
        "equal up to rounding",
    )


def test_rows_of_a_generator_of_numpy_are_split_if_items_are_declared(tmp_path):
    """What could not be tried in training, and shows nothing in evaluation, is then what the
    caller says.
    """
    own = np.random.default_rng(3)

    def loss_of(model):
        return lambda b: holdfast.Loss(
            errors(model, b[0] + rows_of(own, b[0]) * model.training).mean(), len(b[0])
        )

    _, _, said = step(tmp_path, (X, Y), loss_of, micro_batch_size=2)
    assert (said["split_check"]["outcome"], said["split_promise"]) == ("random", "changes training")


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("kind", ["negatives count", "a regulariser"])
def test_a_part_without_anything_to_count_is_tried_before_it_is_left_out(tmp_path, kind, declared):
    """The loss of a detector is over its positives, and images without any count all the same."""
    model = nn.Linear(5, 3).double()

    def loss(batch):
        found = batch[1].sum()
        if kind == "negatives count":
            mean = errors(model, batch[0]).sum() / found.clamp(min=1)
        else:
            mean = (errors(model, batch[0]) * batch[1]).sum() / found.clamp(
                min=1
            ) + model.weight.square().sum()
        return holdfast.Loss(mean, found) if declared else mean

    positives = torch.ones(10, 6, dtype=torch.long)
    positives[:, 3:] = 0
    some = positives.clone()
    some[1, 0] = 0
    with guarded(tmp_path, model, micro_batch_size=2) as guard:
        guard.step((X, positives), loss)  # as many in each image: a mean over images
        guard.step((X, some), loss)
        some[8:] = 0
        before = model.weight.detach().clone()
        if kind == "negatives count":
            with pytest.raises(holdfast.BatchError, match="H207"):
                guard.step((X, some), loss)
            assert torch.equal(before, model.weight)
            return
        terms = loss((X, some))
        (expected,) = torch.autograd.grad(terms.mean if declared else terms, model.weight)
        guard.step((X, some), loss)
        torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_what_a_loss_brings_beside_it_is_put_together(
    tmp_path: Any, micro_batch_size: int | None
) -> None:
    """Rows follow each other, numbers are averaged over the samples, all else is a list.

    Nothing keeps a graph.
    """
    model = nn.Linear(5, 3).double()

    def loss(x: torch.Tensor) -> holdfast.Loss:
        outputs = model(x)
        extra = {
            "outputs": outputs,
            "nested": [{"outputs": outputs}],
            "first": outputs[:, 0].mean(),
            "share": len(x) / 10,
            "name": f"of {len(x)}",
        }
        return holdfast.Loss(outputs.square().mean(), items=len(x), extra=extra)

    with torch.no_grad():
        expected = model(X[:, 0])
    with guarded(tmp_path, model, micro_batch_size=micro_batch_size, check_split=False) as guard:
        found = guard.step(X[:, 0], loss).extra
        assert guard.step(X[:, 0], lambda x: model(x).mean()).extra == {}
    assert torch.allclose(found["outputs"], expected)
    assert not found["outputs"].requires_grad
    nested = found["nested"][0] if micro_batch_size is None else found["nested"][0][0]
    assert not nested["outputs"].requires_grad
    with (
        guarded(tmp_path / "b", model) as guard,
        pytest.raises(holdfast.BatchError, match="extra of a Loss is a Tensor"),
    ):
        guard.step(X[:, 0], lambda x: holdfast.Loss(model(x).mean(), items=len(x), extra=model(x)))
    assert torch.allclose(found["first"], expected[:, 0].mean())
    assert found["share"] == pytest.approx(1.0 if micro_batch_size is None else (16 + 16 + 4) / 100)
    assert found["name"] == ("of 10" if micro_batch_size is None else ["of 4", "of 4", "of 2"])
