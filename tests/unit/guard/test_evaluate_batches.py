"""`Guard.evaluate_batches`: outputs in order, batches split that do not fit, training untouched."""

from __future__ import annotations

import errno
import math

import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.errors import BatchError, OutOfMemoryError, PolicyError

FEATURES = 4


def make_guard(tmp_path, **more):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return holdfast.Guard(tmp_path / "run", model=model, optimizer=optimizer, **more), model


def batches_of(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, FEATURES, generator=generator), torch.arange(size) % 3) for size in sizes
    ]


def fitting(most_samples, function):
    """Return a function that runs out of memory for more than some samples."""

    def limited(batch):
        if len(batch[0]) > most_samples:
            raise MemoryError("no room")
        limited.calls.append(len(batch[0]))
        return function(batch)

    limited.calls = []
    return limited


def splits_of(guard):
    return [
        (event.data["batch_size"], event.data["micro_batch_size"])
        for event in guard.events()
        if event.kind == "evaluation_split"
    ]


def test_the_outputs_of_all_batches_are_combined_in_order(tmp_path):
    """Each kind of output is what the plain loop computes."""
    guard, model = make_guard(tmp_path)
    batches = batches_of(8, 8, 5)

    outputs = guard.evaluate_batches(
        batches,
        lambda batch: {
            "logits": model(batch[0]),
            "names": [f"sample {label}" for label in batch[1].tolist()],
            "loss": (nn.functional.cross_entropy(model(batch[0]), batch[1]), len(batch[1])),
            "largest": batch[1].max(),
            "nothing": None,
        },
    )

    whole = tuple(torch.cat(column) for column in zip(*batches, strict=True))
    model.eval()
    logits = model(whole[0]).detach()
    loss = nn.functional.cross_entropy(logits, whole[1]).item()
    assert torch.allclose(outputs["logits"], logits, atol=1e-6)
    assert outputs["names"] == [f"sample {label}" for label in whole[1].tolist()]
    assert math.isclose(outputs["loss"], loss, rel_tol=1e-5)
    assert outputs["largest"].tolist() == [2, 2, 2]
    assert outputs["nothing"] is None


def test_a_batch_that_does_not_fit_is_halved_and_the_size_is_remembered(tmp_path):
    """Later batches and evaluations begin with the size that fits."""
    guard, model = make_guard(tmp_path)
    batches = batches_of(16, 7, 3)
    function = fitting(4, lambda batch: (model(batch[0]), batch[1]))

    logits, labels = guard.evaluate_batches(batches, function)

    assert function.calls == [4, 4, 4, 4, 4, 3, 3]
    assert torch.equal(labels, torch.cat([batch[1] for batch in batches]))
    model.eval()
    expected = model(torch.cat([batch[0] for batch in batches])).detach()
    assert torch.allclose(logits, expected, atol=1e-6)
    assert splits_of(guard) == [(16, 8), (8, 4)]

    guard.evaluate_batches(batches, function)
    assert splits_of(guard) == [(16, 8), (8, 4)], "the second evaluation tries no larger part"


def test_parts_that_are_complete_are_not_evaluated_again(tmp_path):
    """A function that counts samples counts each of them once."""
    guard, _ = make_guard(tmp_path)
    counted = []

    def runs_out_of_memory_once(batch):
        if 3 in batch[1].tolist() and len(batch[1]) > 1:
            raise torch.OutOfMemoryError("no room")
        counted.extend(batch[1].tolist())
        return batch[1]

    labels = guard.evaluate_batches([(torch.zeros(4, 1), torch.arange(4))], runs_out_of_memory_once)

    assert counted == labels.tolist() == [0, 1, 2, 3]


def test_each_function_has_a_size_of_its_own(tmp_path):
    """A small function is not split because a large one was."""
    guard, _ = make_guard(tmp_path)
    batches = batches_of(8)
    guard.evaluate_batches(batches, fitting(2, lambda batch: batch[1]))

    # A scalar of a part would be refused.
    assert guard.evaluate_batches(batches, lambda batch: batch[1].float().mean()).shape == (1,)


def test_training_is_untouched(tmp_path):
    """Weights, buffers, modes and random state are as before."""
    guard, model = make_guard(tmp_path)
    model[1].eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()

    def draws(batch):
        assert not torch.is_grad_enabled()
        assert not model.training
        return model(batch[0]) + torch.rand(1)

    guard.evaluate_batches(batches_of(8, 3), fitting(2, draws))

    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert guard.global_step == 0


def test_outputs_are_copies(tmp_path):
    """A model or loader that uses its memory again for the next batch does not change them."""
    guard, _ = make_guard(tmp_path)
    buffer = torch.zeros(2)

    def reuses_its_memory(batch):
        return buffer.copy_(batch[0])

    batches = [(torch.full((2,), float(number)),) for number in range(3)]
    assert guard.evaluate_batches(batches, reuses_its_memory).tolist() == [0, 0, 1, 1, 2, 2]


def test_means_are_weighted_by_their_items(tmp_path):
    """Parts without items have no weight, although their mean is NaN."""
    guard, _ = make_guard(tmp_path)
    batches = [torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([0.0, 0.0])]

    def mean_of_positive(batch):
        positive = batch[batch > 0]
        return holdfast.Loss(positive.mean(), items=len(positive))

    def no_room_for_three(batch):
        if len(batch) > 2:
            raise MemoryError
        return mean_of_positive(batch)

    assert guard.evaluate_batches(batches, no_room_for_three) == 2.0
    assert math.isnan(guard.evaluate_batches(batches[1:], mean_of_positive))


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda batch: batch[0].mean(), "H205"),  # a scalar, of a batch that is split
        (lambda batch: (batch[0].mean(), batch[0].mean()), "H205"),  # two scalars are no mean
        (lambda batch: batch[0].sum(dim=0), "H204"),  # a row per feature
        (lambda batch: [batch[0], batch[1]], "H204"),  # not one entry per sample
        (lambda batch: {1, 2}, "H204"),
        (lambda batch: batch[0].to_sparse(), "H204"),
        (lambda batch: holdfast.Loss(batch[0].mean(), 8, extra={"more": 1}), "H204"),
        (lambda batch: (batch[0].mean(), 3), "H204"),  # a mean and a count of correct ones
        (lambda batch: {str(len(batch[0])): batch[1]}, "H204"),  # another structure
        (lambda batch: None if len(batch[0]) == 8 else batch[1], "H204"),  # another kind
    ],
)
def test_outputs_that_cannot_be_combined_are_refused(tmp_path, function, rule):
    """The error names a rule."""
    guard, _ = make_guard(tmp_path)
    with pytest.raises(BatchError) as refusal:
        guard.evaluate_batches(batches_of(16, 5), fitting(8, function))
    assert refusal.value.rule == rule


def test_two_counts_are_two_results(tmp_path):
    """Correct predictions and all of them are no mean over items."""
    guard, _ = make_guard(tmp_path)
    correct, total = guard.evaluate_batches(
        batches_of(8, 5), lambda batch: ((batch[1] == 0).sum(), len(batch[1]))
    )
    assert correct.tolist() == [3, 2]
    assert total.tolist() == [8, 5]


class Unchangeable(dict):
    """A mapping that refuses to be changed, as the outputs of Hugging Face's models do."""

    def update(self, *_args, **_more):
        raise TypeError("cannot be updated")


def test_a_mapping_that_refuses_changes_becomes_a_dict(tmp_path):
    """Its outputs are combined like those of a dict."""
    guard, model = make_guard(tmp_path)
    outputs = guard.evaluate_batches(
        batches_of(4, 4), lambda batch: Unchangeable(logits=model(batch[0]))
    )
    assert type(outputs) is dict
    assert outputs["logits"].shape == (8, 3)


def test_a_size_that_never_fitted_is_not_remembered(tmp_path):
    """Once memory is free again, whole batches are evaluated."""
    guard, _ = make_guard(tmp_path)
    sizes = []
    is_short = True

    def function(batch):
        if is_short:
            raise MemoryError("no room")
        sizes.append(len(batch[1]))
        return batch[1]

    with pytest.raises(OutOfMemoryError):
        guard.evaluate_batches(batches_of(8), function)
    is_short = False
    guard.evaluate_batches(batches_of(8), function)

    assert sizes == [8]


@pytest.mark.parametrize("split", [7, "rows", {"nope": 0}])
def test_a_split_that_does_not_match_the_batch_is_refused_at_once(tmp_path, split):
    """The error does not wait until memory runs out."""
    guard, _ = make_guard(tmp_path)
    with pytest.raises(BatchError):
        guard.evaluate_batches(batches_of(8), lambda batch: batch[1], split=split)


def test_something_that_is_no_function_is_refused(tmp_path):
    """The error names a rule."""
    guard, _ = make_guard(tmp_path)
    with pytest.raises(PolicyError) as refusal:
        guard.evaluate_batches(batches_of(8), None)
    assert refusal.value.rule == "H105"


def test_rows_of_different_shapes_are_refused(tmp_path):
    """They could not be concatenated."""
    guard, _ = make_guard(tmp_path)
    with pytest.raises(BatchError) as refusal:
        guard.evaluate_batches([torch.zeros(2, 3), torch.zeros(2, 5)], lambda batch: batch)
    assert refusal.value.rule == "H204"


def test_a_loader_without_batches_is_refused(tmp_path):
    """An empty result would hide an empty validation set."""
    guard, _ = make_guard(tmp_path)
    with pytest.raises(BatchError) as refusal:
        guard.evaluate_batches([], lambda batch: batch)
    assert refusal.value.rule == "H204"


def test_the_loader_of_the_training_is_refused(tmp_path):
    """Its position is that of the training."""
    loader = holdfast.DataLoader(torch.zeros(8, FEATURES), batch_size=4)
    guard, _ = make_guard(tmp_path, loader=loader)
    with pytest.raises(PolicyError) as refusal:
        guard.evaluate_batches(loader, lambda batch: batch)
    assert refusal.value.rule == "H105"


@pytest.mark.parametrize("batch", [(torch.zeros(1, FEATURES),), ({1, 2},)])
def test_what_cannot_be_split_further_is_named(tmp_path, batch):
    """A single sample, and a batch without a batch dimension."""
    guard, _ = make_guard(tmp_path)

    def never_fits(batch):
        raise MemoryError("no room")

    with pytest.raises(OutOfMemoryError) as refusal:
        guard.evaluate_batches([batch], never_fits)
    assert refusal.value.rule == "H401"
    assert "no room" in refusal.value.what


@pytest.mark.parametrize("earlier_batches", [0, 1])
def test_earlier_outputs_are_mentioned_only_if_there_are_any(tmp_path, earlier_batches):
    """In the first batch, no outputs take up host memory yet."""
    guard, _ = make_guard(tmp_path)
    batches = [torch.zeros(2, 8)] * earlier_batches + [torch.ones(1, 8)]

    def only_zeros_fit(batch):
        if batch.any():
            raise MemoryError("no room")
        return batch

    with pytest.raises(OutOfMemoryError) as refusal:
        guard.evaluate_batches(batches, only_zeros_fit)

    assert ("64 B" in refusal.value.limit) is (earlier_batches > 0)
    assert " 0 B" not in str(refusal.value)


def test_other_errors_of_the_function_are_its_own(tmp_path):
    """They are raised as they are, and the mode of the models is restored."""
    guard, model = make_guard(tmp_path)
    with pytest.raises(KeyError):
        guard.evaluate_batches(batches_of(4), lambda batch: {}["missing"])
    assert model.training


def test_the_batch_dimension_is_that_of_split(tmp_path):
    """It is that of the guard, unless the call names another."""
    guard, _ = make_guard(tmp_path, split=1)
    frames = torch.arange(12).reshape(2, 6)
    sums = guard.evaluate_batches([frames], fitting_columns)
    assert sums.tolist() == frames.sum(dim=0).tolist()
    other = guard.evaluate_batches([frames.T], lambda batch: batch.sum(dim=1), split=0)
    assert other.tolist() == frames.sum(dim=0).tolist()


def fitting_columns(batch):
    if batch.shape[1] > 2:
        raise MemoryError
    return batch.sum(dim=0)


def test_it_evaluates_the_averaged_weights_inside_averaged(tmp_path):
    """Outside, it evaluates the trained weights."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    guard = holdfast.Guard(
        tmp_path / "run",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        averaged=average,
    )
    inputs = torch.ones(2, FEATURES)
    for _ in range(2):
        guard.step(inputs, lambda batch: model(batch).square().mean())

    with guard.averaged():
        averaged_outputs = guard.evaluate_batches([inputs], model)

    assert torch.equal(averaged_outputs, average(inputs).detach())
    assert not torch.equal(guard.evaluate_batches([inputs], model), averaged_outputs)


def test_a_recording_that_does_not_fit_does_not_undo_the_split(tmp_path, monkeypatch):
    """After the loop, the recording must be opened again, for which there may be no memory."""
    guard, model = make_guard(tmp_path)
    guard.close()
    function = fitting(4, lambda batch: model(batch[0]))

    def cannot_allocate(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("holdfast.guard.record.BlackBox", cannot_allocate)
    outputs = guard.evaluate_batches(batches_of(8), function)

    assert len(outputs) == 8
    assert function.calls == [4, 4]
