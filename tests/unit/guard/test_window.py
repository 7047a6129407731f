"""A window of batches is one step: as one large batch, or added as the caller has divided them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Guard, Loss
from holdfast.guard.hosted import HostedGuard, hosted_policy
from holdfast.guard.splitting.window import Window

BATCHES = [
    torch.randn(size, 3, generator=torch.Generator().manual_seed(size)) for size in (4, 4, 3)
]


def trained(
    folder: Path,
    batch: Any,
    loss: Callable[[torch.nn.Module], Any],
    *,
    most: int = 99,
    steps: int = 2,
    **policy: Any,
) -> tuple[torch.Tensor, Any]:
    """Return the weights after some steps; more samples than `most` in a pass do not fit."""
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1)
    inner = loss(model)

    def limited(part: torch.Tensor) -> Any:
        if len(part) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return inner(part)

    settings = {"recompute": False, "diagnose": False, "save_interval_steps": None} | policy
    guard = Guard(
        folder, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings
    )
    given = inner if most == 99 else limited
    results = [guard.step(batch, given) for _ in range(steps)]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), results


def mean_of(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda part: model(part).square().mean()


def declared(model: torch.nn.Module) -> Callable[[torch.Tensor], Loss]:
    return lambda part: Loss(model(part).square().sum() / (part > 0).sum(), (part > 0).sum())


@pytest.mark.parametrize("loss", [mean_of, declared])
@pytest.mark.parametrize("most", [99, 2])
def test_a_window_is_one_large_batch(tmp_path: Path, loss: Any, most: int) -> None:
    """Batches of 4, 4 and 3 samples move the weights as all 11 do, also where they are cut for
    memory.
    """
    whole, expected = trained(tmp_path / "a", torch.cat(BATCHES), loss)
    found, results = trained(tmp_path / "b", Window(BATCHES), loss, most=most)
    assert torch.allclose(whole, found, atol=1e-6)
    assert float(results[0].loss) == pytest.approx(float(expected[0].loss), rel=1e-5)
    assert float(results[0].items) == float(expected[0].items)
    assert results[1].micro_batch_size == min(most, 4)


@pytest.mark.parametrize("most", [99, 2])
def test_losses_of_an_added_window_are_not_divided_again(tmp_path: Path, most: int) -> None:
    """Losses that the caller has divided give the gradient of a loop that adds them, bit for bit
    where they fit.
    """
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in BATCHES:
            (model(batch).square().mean() / 3).backward()
        optimizer.step()
    bare = torch.cat([p.detach().flatten() for p in model.parameters()])

    def third(model: torch.nn.Module) -> Any:
        return lambda part: model(part).square().mean() / 3

    found, _ = trained(tmp_path, Window(BATCHES, added=True), third, most=most)
    assert torch.equal(bare, found) if most == 99 else torch.allclose(bare, found, atol=1e-6)


def test_a_bad_sample_of_a_window_is_left_out(tmp_path: Path) -> None:
    """The sample with NaN is named by its place in the window.

    `on_cut` gets what is left before it is used.
    """
    hurt = [batch.clone() for batch in BATCHES]
    hurt[1][2, 0] = torch.nan
    seen: list[list[int]] = []
    window = Window(hurt, on_cut=lambda left: seen.append([len(batch) for batch in left]))
    whole, _ = trained(
        tmp_path / "a", torch.cat([BATCHES[0], BATCHES[1][[0, 1, 3]], BATCHES[2]]), mean_of
    )
    found, results = trained(tmp_path / "b", window, mean_of, drop_nonfinite_samples=True)
    assert torch.allclose(whole, found, atol=1e-6)
    assert results[0].dropped_samples == (6,)
    assert seen[-1] == [4, 3, 3]


def test_a_hosted_guard_carries_its_state_and_ends_no_process(tmp_path: Path) -> None:
    """What it has counted and learnt goes on in another process as JSON.

    A stop request is the host's to honour.
    """
    import json

    def guard(folder: Path) -> HostedGuard:
        torch.manual_seed(3)
        model = torch.nn.Linear(3, 1)
        policy = hosted_policy(
            {"nonfinite_patience": None}, max_grad_norm=1.0, precision="fp32", host="the host"
        )
        return HostedGuard(
            folder, model=model, optimizer=torch.optim.Adam(model.parameters()), policy=policy
        )

    first = guard(tmp_path / "a")
    loss = mean_of(first._parts.models["model"])
    for batch in (*BATCHES, BATCHES[0] * torch.nan):
        first.step(batch, loss)
    first.request_stop("SIGTERM")
    first.step(BATCHES[0], loss)
    assert first.stop_reason == "SIGTERM"
    carried = json.loads(json.dumps(first.state_dict()))
    first.close()
    assert not list((tmp_path / "a").glob("checkpoints/*"))
    second = guard(tmp_path / "b")
    second.load_state_dict(carried)
    found = second.statistics()
    assert (found.global_step, found.skipped_steps, found.resumes) == (4, 1, 1)
    assert second.nonfinite_state() is None
    second.close()


def test_gradient_norms_of_several_groups_add_up_as_in_a_bare_loop(tmp_path: Path) -> None:
    """With two groups, as for weight decay, clipping has the last bit of ``clip_grad_norm_``
    over the model.
    """

    def parts() -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = torch.nn.ParameterList(
            [torch.randn(5, 5) if at % 2 else torch.randn(9) for at in range(40)]
        )
        groups = [[p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False)]
        return model, torch.optim.SGD([{"params": group} for group in groups], lr=0.3)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return sum((p.square().sum() for p in model), torch.zeros(())) * batch.mean()

    batches = [torch.rand(5, generator=torch.Generator().manual_seed(at)) for at in range(20)]
    model, optimizer = parts()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
    mine, optimizer = parts()
    settings: dict[str, Any] = {
        "max_grad_norm": 0.7,
        "save_interval_steps": None,
        "diagnose": False,
    }
    guard = Guard(tmp_path, model=mine, optimizer=optimizer, **settings)
    for batch in batches:
        guard.step(batch, lambda batch: loss(mine, batch))
    for ours, theirs in zip(mine.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_window_after_single_batches_is_tried_before_it_is_weighted(tmp_path: Path) -> None:
    """Steps over one batch need no weights, so what a mean is over is found out at the first window
    of several batches, however late it comes.
    """
    labels = [torch.tensor([-100, -100, 0, -100]), torch.tensor([0, 1, 2, 1])]
    inputs = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(5))
    batches = list(zip(inputs, labels, strict=True))
    together = (inputs.flatten(0, 1), torch.cat(labels))

    def weights_after(folder: Path, last: Any) -> torch.Tensor:
        torch.manual_seed(3)
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(folder, model=model, optimizer=optimizer, save_interval_steps=None)

        def loss_fn(batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

        for batch in [*[batches[0]] * 3, last]:
            guard.step(batch, loss_fn)
        return model.weight.detach()

    whole = weights_after(tmp_path / "whole", together)
    window = weights_after(tmp_path / "window", Window(batches))

    torch.testing.assert_close(window, whole, rtol=1e-6, atol=1e-7)
