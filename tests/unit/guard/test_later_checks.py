"""A split that was right in its trials and turns wrong later.

Losses that choose the samples that count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import assert_same, events, guarded, tensors_of, the_event
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.guard.splitting.loss_history import choose_interval

SAMPLES = 32
MINING_BEGINS = 20


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(SAMPLES, 6, generator=generator) for _ in range(count)]
    return [(x, x[:, :3].argmax(1)) for x in inputs]


def losses_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def hardest_quarter(losses: torch.Tensor) -> torch.Tensor:
    return losses.topk(max(1, len(losses) // 4)).values.mean()


def above_a_threshold(losses: torch.Tensor) -> torch.Tensor:
    return losses[losses > 1.0].mean()


def counted_above_a_threshold(losses: torch.Tensor) -> torch.Tensor:
    chosen = (losses.detach() > 1.0).float()
    return (losses * chosen).sum() / chosen.sum()


def by_index(losses: torch.Tensor) -> torch.Tensor:
    return losses[torch.nonzero(losses > 1.0).squeeze(1)].mean()


def hardest_by_quantile(losses: torch.Tensor) -> torch.Tensor:
    return losses[losses >= losses.detach().quantile(0.75)].mean()


def hardest_by_sort(losses: torch.Tensor) -> torch.Tensor:
    _, order = losses.sort(descending=True)
    return losses[order[: max(1, len(order) // 4)]].mean()


MINERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "topk": hardest_quarter,
    "mask": above_a_threshold,
    "count": counted_above_a_threshold,
    "nonzero": by_index,
    "quantile": hardest_by_quantile,
    "sort": hardest_by_sort,
}


@pytest.mark.parametrize("miner", MINERS)
def test_a_miner_that_begins_after_a_warm_up_ends_splitting(tmp_path, miner):
    """A loss that chooses samples from step 20 on is not split any more soon after, and the
    event says since when.
    """
    model = a_model()
    guard = guarded(tmp_path, model, micro_batch_size=8)

    def loss(batch: Any) -> torch.Tensor:
        losses = losses_of(model, batch)
        return losses.mean() if guard.global_step < MINING_BEGINS else MINERS[miner](losses)

    with pytest.raises(holdfast.BatchError) as caught:
        for batch in batches(80):
            guard.step(batch, loss)

    assert caught.value.rule == "H207"
    assert MINING_BEGINS <= guard.global_step < 80
    stopped = the_event(guard, "split_stopped").data
    assert stopped["promise"] == "changes training"
    assert stopped["allow_split_with"] == "coupled_loss"
    assert stopped["equal_until_step"] < MINING_BEGINS
    assert events(guard, "promises")[0].data["split_promise"] == "equal up to rounding"


class StandingClock:
    """A clock on which nothing takes any time, so that checks come as often as they may."""

    def unix_seconds(self) -> float:
        return 0.0

    def monotonic_seconds(self) -> float:
        return 0.0


def test_a_micro_batch_is_compared_with_its_halves_between_the_trials(tmp_path):
    """Trials come at the 128th and 256th split step.

    Mining that begins at step 130 is found after the 192nd.
    """
    model = a_model()
    guard = guarded(tmp_path, model, micro_batch_size=8, clock=StandingClock())

    def loss(batch: Any) -> torch.Tensor:
        losses = losses_of(model, batch)
        return losses.mean() if guard.global_step < 130 else hardest_quarter(losses)

    with pytest.raises(holdfast.BatchError):
        for batch in batches(200):
            guard.step(batch, loss)

    assert 192 <= guard.global_step < 196
    assert the_event(guard, "split_stopped").data["equal_until_step"] == 127
    assert [event.data["split_promise"] for event in events(guard, "promises")] == [
        "equal up to rounding",
        "changes training",
    ]


def test_a_micro_batch_that_differs_once_lowers_the_promise_only_for_a_while(tmp_path):
    """After a single failed comparison and four that pass, the promise is as before and the run
    continues.
    """
    model = a_model()
    guard = guarded(tmp_path, model, micro_batch_size=8, clock=StandingClock())

    def loss(batch: Any) -> torch.Tensor:
        losses = losses_of(model, batch)
        return hardest_quarter(losses) if guard.global_step == 191 else losses.mean()

    for batch in batches(200):
        guard.step(batch, loss)

    assert not events(guard, "split_stopped")
    assert [event.data["split_promise"] for event in events(guard, "promises")] == [
        "equal up to rounding",
        "changes training",
        "equal up to rounding",
    ]


# --- what rounding does


def test_a_threshold_that_chooses_all_samples_at_first_lowers_the_promise_at_once(tmp_path):
    """While every loss is above the threshold the mean is over samples.

    Split, but not as equal up to rounding.
    """
    model = a_model()
    guard = guarded(
        tmp_path, model, torch.optim.Adam(model.parameters(), lr=0.02), micro_batch_size=8
    )
    promise = None

    def loss(batch: Any) -> torch.Tensor:
        losses = losses_of(model, batch)
        return losses[losses > 0.3].mean()

    with pytest.raises(holdfast.BatchError) as caught:
        for batch in batches(200):
            guard.step(batch, loss)
            promise = promise or the_event(guard, "promises").data

    assert caught.value.rule == "H207"
    assert guard.global_step > 1
    assert promise is not None
    assert promise["split_promise"] == "changes training"
    assert promise["split_check"]["selects"] == "mask"
    assert the_event(guard, "split_stopped").data["equal_until_step"] is not None


def hardest_half_by_numpy(losses: torch.Tensor) -> torch.Tensor:
    order = np.argsort(losses.detach().numpy())
    return losses[torch.from_numpy(order[-8:].copy())].mean()


def hardest_half_by_sorting_a_list(losses: torch.Tensor) -> torch.Tensor:
    values = losses.tolist()
    return losses[sorted(range(len(values)), key=values.__getitem__)[-8:]].mean()


@pytest.mark.parametrize("miner", [hardest_half_by_numpy, hardest_half_by_sorting_a_list])
def test_samples_that_are_chosen_outside_of_torch_lower_the_promise_at_once(tmp_path, miner):
    """A miner that keeps as many samples as a micro-batch has passes each trial, and is promised
    less anyway.
    """
    model = a_model()
    guard = guarded(tmp_path, model, micro_batch_size=8)

    guard.step(batches(1)[0], lambda batch: miner(losses_of(model, batch)))

    assert the_event(guard, "promises").data["split_promise"] == "changes training"


@pytest.mark.parametrize("allowed", [False, True])
def test_what_is_found_later_is_refused_unless_it_is_allowed_by_name(tmp_path, allowed):
    """With "auto" the batch is run whole from then on.

    Allowed by name it is split, and the promise is lowered.
    """
    model = a_model()
    policy = {"allow_split_with": ("coupled_loss",)} if allowed else {}
    guard = guarded(tmp_path, model, forecast_micro_batch_size=8, grow_after_steps=10_000, **policy)

    def loss(batch: Any) -> torch.Tensor:
        losses = losses_of(model, batch)
        return losses.mean() if guard.global_step < MINING_BEGINS else hardest_quarter(losses)

    sizes = [guard.step(batch, loss).micro_batch_size for batch in batches(80)]

    assert sizes[0] == 8
    assert sizes[-1] == (8 if allowed else SAMPLES)
    assert len(events(guard, "split_stopped")) == (0 if allowed else 1)
    assert events(guard, "promises")[-1].data["split_promise"] == (
        "changes training" if allowed else None
    )


# --- what chooses no samples


class Experts(nn.Module):
    """Sends each sample to one of two experts, by the largest score of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(1).topk(1)
        result = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen[:, 0] == number)[0]
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows])
        return result


def with_ignored_labels(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, ignore_index=0)


def with_an_accuracy_for_a_log(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    outputs = model(x)
    correct = (outputs.argmax(1) == y).float().mean()
    _ = float(correct), outputs.detach().sort(0)
    return F.cross_entropy(outputs, y)


def with_an_accuracy_by_numpy(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    outputs = model(x)
    _ = (outputs.detach().numpy().argmax(1) == y.numpy()).mean()
    return -outputs.log_softmax(1)[torch.arange(len(y)), y].mean()


def with_a_bend(model: nn.Module, batch: Any) -> torch.Tensor:
    x, _ = batch
    errors = model(x) - x[:, :3]
    return torch.where(errors.abs() < 1, errors.square(), 2 * errors.abs() - 1).mean()


def with_the_worst_output_of_each_sample(model: nn.Module, batch: Any) -> torch.Tensor:
    x, _ = batch
    return (model(x) - x[:, :3]).square().topk(2, dim=1).values.mean()


def with_weights_that_are_not_counted(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = losses_of(model, batch)
    return (losses * (losses.detach() > 1.0)).mean()


def with_a_sum_above_a_threshold(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = losses_of(model, batch)
    return losses[losses > 1.0].sum()


def with_items_that_are_declared(model: nn.Module, batch: Any) -> Any:
    losses = losses_of(model, batch)
    chosen = losses.detach() > 1.0
    return holdfast.Loss(losses[chosen].mean(), items=int(chosen.sum()))


UNSELECTIVE = [
    with_ignored_labels,
    with_an_accuracy_for_a_log,
    with_an_accuracy_by_numpy,
    with_a_bend,
    with_the_worst_output_of_each_sample,
    with_weights_that_are_not_counted,
    with_a_sum_above_a_threshold,
    with_items_that_are_declared,
]


@pytest.mark.parametrize("loss", UNSELECTIVE, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("make", [a_model, Experts], ids=["plain", "experts"])
def test_what_chooses_no_samples_keeps_its_promise(tmp_path, loss, make):
    """Ignored labels, routing in the model, logs and choices within a sample stay equal up to
    rounding.
    """
    torch.manual_seed(0)
    model = make()
    guard = guarded(tmp_path, model, micro_batch_size=8)

    for batch in batches(20):
        guard.step(batch, lambda part: loss(model, part))

    assert {event.data["split_promise"] for event in events(guard, "promises")} == {
        "equal up to rounding"
    }
    assert not events(guard, "split_stopped")


def test_padding_that_the_batch_shows_is_no_choice(tmp_path):
    """A mask made from the inputs alone lowers no promise, whatever the weighting."""
    model = a_model()
    guard = guarded(tmp_path, model, micro_batch_size=8)

    def loss(part: Any) -> torch.Tensor:
        x, _, real = part
        return (model(x).square().mean(1) * real).sum() / real.sum()

    for x, y in batches(20):
        guard.step((x, y, (torch.arange(SAMPLES) % 8 != 0).float()), loss)

    assert {event.data["split_promise"] for event in events(guard, "promises")} == {
        "equal up to rounding"
    }


# --- what the checks cost and leave behind


def test_later_checks_leave_no_trace(tmp_path):
    """A run that is checked while it splits ends with the bits of one that is not, dropout and
    buffers included.
    """
    ends = []
    for name, checks in (("checked", True), ("trusted", False)):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 3)
        )
        policy = {"micro_batch_size": 8, "allow_split_with": ("batch_norm",), "check_split": checks}
        guard = guarded(tmp_path / name, model, **policy)
        for batch in batches(70):
            guard.step(batch, lambda part, model=model: losses_of(model, part).mean())
        ends.append([*tensors_of(model), torch.get_rng_state()])
        assert not events(guard, "split_stopped")

    assert_same(*ends)


@pytest.mark.parametrize(
    ("check", "step", "steps"), [(0.0, 0.1, 64), (0.5, 0.1, 512), (1.0, 0.1, 1024)]
)
def test_checks_take_at_most_a_hundredth_of_the_time_of_split_steps(check, step, steps):
    """The distance of two checks is a power of two at which they cost 1 % or less."""
    assert choose_interval(check, step) == steps
    assert check <= 0.01 * step * steps
