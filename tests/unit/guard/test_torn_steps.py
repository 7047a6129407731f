"""An optimizer runs out of memory half-way, under a limit that stays.

The checkpoint has to come back all the same.

The limit is the kernel's. What is large is larger than glibc's largest heap block, so no earlier
test has left room.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import FailsHalfWay, ask_for_too_much, events, the_event
from torch import nn

import holdfast
from holdfast.memory.oom import release_memory
from holdfast.testing import limit_memory

WIDTH = 3072  # a weight, its gradient and its momentum take 36 MiB each
HEADROOM_BYTES = 16 * 2**20


@pytest.fixture(autouse=True)
def without_limit_afterwards() -> Iterator[None]:
    yield
    limit_memory(None)


def run_short() -> None:
    """Run out of memory, which is short from now on."""
    gc.collect()  # what earlier tests have left would be room later
    release_memory([])  # and so would what glibc keeps
    limit_memory(HEADROOM_BYTES)
    ask_for_too_much()


class Twin:
    """State of the caller, whose tensors are made anew when it comes back."""

    def __init__(self) -> None:
        # 288 MiB: more than gradients and earlier tests can leave
        self.weight = torch.zeros(8 * WIDTH, WIDTH)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


def train(run_dir: Path, *, fail_at: int, **state: Any) -> tuple[holdfast.Guard, Any]:
    """Make 3 steps; return the guard, and weight and momentum."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = FailsHalfWay(model.parameters(), fail_at, run_short, lr=0.1, momentum=0.9)
    data = holdfast.DataLoader(torch.randn(16, WIDTH).unbind(), batch_size=4, shuffle=True, seed=1)
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=optimizer,
        loader=data,
        save_interval_steps=2,
        async_save=False,
        check_split=False,
        **state,
    )

    def loss(batch: torch.Tensor) -> torch.Tensor:
        limit_memory(None)  # the torn step is over
        return model(batch).square().mean()

    for batch in guard.batches(max_steps=3):
        guard.step(batch, loss)
    return guard, (model.weight.detach(), optimizer.state[model.weight]["momentum_buffer"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("undisturbed"), fail_at=0)[1]


def test_a_checkpoint_comes_back_where_there_is_no_room_for_a_copy_of_it(tmp_path, undisturbed):
    """Each tensor is read to where it lies, twice under the limit, and the run ends
    bit-identical.
    """
    guard, found = train(tmp_path / "b", fail_at=3)
    assert the_event(guard, "roll_back").data["promise"] == "bit-exact"
    assert all(torch.equal(a, b) for a, b in zip(found, undisturbed, strict=True))


def test_where_it_cannot_come_back_the_run_ends_with_h402_and_goes_on_later(tmp_path, undisturbed):
    """State that has to be made anew does not fit.

    An error that says so, an event, no half-changed checkpoint.
    """
    with pytest.raises(
        holdfast.OutOfMemoryError, match="not enough memory to read the checkpoint"
    ) as caught:
        train(tmp_path / "b", fail_at=3, state={"twin": Twin()})
    limit_memory(None)
    assert caught.value.rule == "H402"
    del caught
    guard, found = train(tmp_path / "b", fail_at=0, state={"twin": Twin()})
    stops = events(guard, "stop")
    assert [event.data["rule"] for event in stops] == ["H402"]
    assert "not enough memory" in stops[0].data["reason"]
    assert guard.resumed_from is not None
    assert guard.resumed_from.name.endswith("step00000002")
    assert all(torch.equal(a, b) for a, b in zip(found, undisturbed, strict=True))
