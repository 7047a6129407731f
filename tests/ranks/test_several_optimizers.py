"""Several optimizers on one model, such as Muon for the matrices and AdamW for the rest.

Whatever happens to a step, the ranks end with the same bits as a loop without a guard in which it
did not happen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from tests.unit.guard.guarded import ask_for_too_much, assert_same
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer

import holdfast

pytestmark = pytest.mark.slow

STEPS = 8
MAX_NORM = 0.5


class Training:
    """A model on several ranks, with one optimizer for its matrices and one for the rest.

    Args:
        rank: The rank.
        wrapper: ``"ddp"`` or ``"fully_shard"``.
        matrices: The optimizer class for the matrices.
    """

    def __init__(self, rank: int, wrapper: str, matrices: type[Optimizer]) -> None:
        self.rank = rank
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 8), nn.Tanh()
        )
        self.model: nn.Module
        if wrapper == "ddp":
            self.model = DistributedDataParallel(layers)
        else:
            for layer in layers:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            self.model = fully_shard(layers)
        parameters = list(self.model.parameters())
        momentum = {"momentum": 0.9} if matrices is SGD else {}
        self.optimizers = {
            "matrices": matrices([p for p in parameters if p.ndim == 2], lr=0.02, **momentum),
            "rest": AdamW([p for p in parameters if p.ndim != 2], lr=0.01),
        }
        torch.manual_seed(10 + rank)

    def batches(self) -> list[torch.Tensor]:
        """Return the batches of this rank."""
        generator = torch.Generator().manual_seed(self.rank)
        return [torch.randn(8, 6, generator=generator) for _ in range(STEPS)]

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def step(self, batch: torch.Tensor, names: Sequence[str] = ("matrices", "rest")) -> None:
        """Make a step without a guard, with the optimizers of these names."""
        self.loss(batch).backward()
        optimizers = [self.optimizers[name] for name in names]
        # Like the guard, clip the gradients of the parameters that are stepped.
        stepped = {p for o in optimizers for group in o.param_groups for p in group["params"]}
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p in stepped], MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
        self.model.zero_grad()

    def guard(self, run: Path, **settings: Any) -> holdfast.Guard:
        settings = {"save_interval_steps": None, "recompute": False, **settings}
        return holdfast.Guard(
            run,
            model=self.model,
            optimizer=self.optimizers,
            max_grad_norm=MAX_NORM,
            diagnose=False,
            **settings,
        )

    def state(self) -> list[torch.Tensor]:
        """Return the weights, the state of both optimizers and the random state of this rank."""
        tensors = [*self.model.parameters()]
        for optimizer in self.optimizers.values():
            for state in optimizer.state.values():
                tensors += [torch.as_tensor(state[key]) for key in sorted(state)]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return [*(t.detach().clone() for t in local), torch.get_rng_state()]


def train_bare(rank: int, wrapper: str, matrices: type[Optimizer], left_out: set[int]) -> Any:
    """Train without a guard, leaving out the steps that a guard has to skip."""
    training = Training(rank, wrapper, matrices)
    for index, batch in enumerate(training.batches()):
        if index not in left_out:
            training.step(batch)
    return training.state()


def fail_half_way(optimizer: Optimizer, fails: Any) -> None:
    """Make an optimizer run out of memory after it has updated its first parameter.

    Args:
        optimizer: The optimizer.
        fails: Function that returns whether the current step fails.
    """
    whole_step = optimizer.step

    def step() -> Any:
        if not fails():
            return whole_step()
        others = optimizer.param_groups[0]["params"][1:]
        gradients = [other.grad for other in others]
        for other in others:
            other.grad = None
        whole_step()
        for other, gradient in zip(others, gradients, strict=True):
            other.grad = gradient
        return ask_for_too_much()

    optimizer.step = step  # type: ignore[method-assign]


def train_with_faults(
    rank: int,
    run: Path,
    wrapper: str,
    matrices: type[Optimizer],
    optimizer_failures: dict[tuple[int, int], str],
) -> Any:
    """Train with a NaN, a lack of memory before and after a forward pass, and optimizer failures.

    Args:
        rank: The rank.
        run: The run directory.
        wrapper: How the model is distributed.
        matrices: The optimizer class for the matrices.
        optimizer_failures: The name of the optimizer that fails half-way, by step and rank.
    """
    training = Training(rank, wrapper, matrices)
    guard = training.guard(run)
    step = 0
    for name, optimizer in training.optimizers.items():
        fail_half_way(optimizer, lambda name=name: optimizer_failures.get((step, rank)) == name)
    results = []
    for step, batch in enumerate(training.batches()):
        failures = iter({(3, 1): ["before"], (5, 0): ["after"]}.get((step, rank), []))
        if (step, rank) == (2, 1):
            batch[3, 2] = float("nan")

        def loss(part: torch.Tensor, failures: Any = failures) -> torch.Tensor:
            where = next(failures, None)
            if where == "before":
                ask_for_too_much()
            value = training.loss(part)
            if where == "after":
                ask_for_too_much()
            return value

        results.append(guard.step(batch, loss))
    guard.close()
    facts = [(result.skipped, result.attempts) for result in results]
    return training.state(), facts, guard.global_step, [event.kind for event in guard.events()]


CASES = [("ddp", Muon), ("ddp", SGD), ("fully_shard", Muon), ("fully_shard", SGD)]


@pytest.mark.parametrize(("wrapper", "matrices"), CASES)
def test_skipped_and_repeated_steps_have_the_bits_of_a_bare_loop(
    tmp_path: Path, wrapper: str, matrices: type[Optimizer]
) -> None:
    """Weights, momenta and step counters are those of a loop that leaves out the NaN batch."""
    bare = all_returned(run_ranks(train_bare, 2, wrapper, matrices, {2}))
    guarded = all_returned(run_ranks(train_with_faults, 2, tmp_path, wrapper, matrices, {}))

    for expected, (state, facts, global_step, _) in zip(bare, guarded, strict=True):
        assert_same(state, expected)
        assert [index for index, (skipped, _) in enumerate(facts) if skipped] == [2]
        assert [index for index, (_, attempts) in enumerate(facts) if attempts > 1] == [3, 5]
        assert global_step == STEPS - 1


@pytest.mark.parametrize(
    "failures",
    [{(4, 1): "matrices"}, {(4, 0): "rest"}, {(0, 1): "rest", (6, 0): "matrices"}],
    ids=str,
)
def test_a_rank_takes_the_state_of_all_optimizers_if_one_has_failed_half_way(
    tmp_path: Path, failures: dict[tuple[int, int], str]
) -> None:
    """Otherwise, the ranks would continue with different momenta of the optimizer that failed."""
    bare = all_returned(run_ranks(train_bare, 2, "ddp", Muon, {2}))
    guarded = all_returned(run_ranks(train_with_faults, 2, tmp_path, "ddp", Muon, failures))

    for rank, (expected, ending) in enumerate(zip(bare, guarded, strict=True)):
        state, _, global_step, kinds = ending
        assert_same(state, expected)
        assert global_step == STEPS - 1
        assert kinds.count("state_taken") == sum(failed == rank for _, failed in failures)


def train_until_killed(
    rank: int, run: Path, wrapper: str, matrices: type[Optimizer], killed_at: int | None
) -> Any:
    """Train and save every third step. Both ranks are killed before the step `killed_at`."""
    training = Training(rank, wrapper, matrices)
    guard = training.guard(run, loader=training.batches(), save_interval_steps=3, async_save=False)
    first_step = guard.global_step
    for batch in guard.batches(max_epochs=1):
        if guard.global_step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        guard.step(batch, training.loss)
    return training.state(), first_step


@pytest.mark.parametrize(("wrapper", "matrices"), CASES)
def test_a_killed_run_resumes_with_the_bits_of_a_bare_loop(
    tmp_path: Path, wrapper: str, matrices: type[Optimizer]
) -> None:
    """The checkpoint holds the state of both optimizers, on all ranks."""
    bare = all_returned(run_ranks(train_bare, 2, wrapper, matrices, set()))
    killed = run_ranks(train_until_killed, 2, tmp_path, wrapper, matrices, 5)
    resumed = all_returned(run_ranks(train_until_killed, 2, tmp_path, wrapper, matrices, None))

    assert -signal.SIGKILL in [end.exit_code for end in killed], killed
    for expected, (state, first_step) in zip(bare, resumed, strict=True):
        assert first_step == 3
        assert_same(state, expected)


NAMES = [("matrices",), ("rest",), ("matrices", "rest"), ("rest",)] * 2


def train_one_at_a_time(
    rank: int, run: Path, wrapper: str, matrices: type[Optimizer], micro_batch_size: Any
) -> Any:
    """Train with one optimizer in most steps, with and without a guard; return both states."""
    bare = Training(rank, wrapper, matrices)
    for names, batch in zip(NAMES, bare.batches(), strict=True):
        bare.step(batch, names)
    expected = bare.state()

    training = Training(rank, wrapper, matrices)
    guard = training.guard(run, micro_batch_size=micro_batch_size)
    for number, (names, batch) in enumerate(zip(NAMES, training.batches(), strict=True)):
        failures = iter([True] if (number, rank) in {(1, 1), (4, 0)} else [])

        def loss(part: torch.Tensor, failures: Any = failures) -> torch.Tensor:
            value = training.loss(part)
            if next(failures, False):
                ask_for_too_much()
            return value

        others = [
            parameter
            for name, optimizer in training.optimizers.items()
            if name not in names
            for parameter in optimizer.param_groups[0]["params"]
        ]
        before = [parameter.grad for parameter in others]
        guard.step(batch, loss, optimizer=names)
        # As with one process, the gradients of other parameters stay as they are. A rank that has
        # failed under fully_shard drops them.
        for parameter, gradient in zip(others, before, strict=True):
            is_dropped = wrapper == "fully_shard" and parameter.grad is None
            assert is_dropped or parameter.grad is gradient
    guard.close()
    return expected, training.state()


@pytest.mark.parametrize(
    ("wrapper", "matrices", "micro_batch_size"),
    [("ddp", Muon, None), ("ddp", SGD, 4), ("fully_shard", Muon, None)],
)
def test_a_step_of_one_optimizer_reduces_all_gradients_but_keeps_only_its_own(
    tmp_path: Path, wrapper: str, matrices: type[Optimizer], micro_batch_size: int | None
) -> None:
    """DistributedDataParallel waits for all gradients, and shards get none that is asked for."""
    returned = all_returned(
        run_ranks(train_one_at_a_time, 2, tmp_path, wrapper, matrices, micro_batch_size)
    )

    for expected, state in returned:
        if micro_batch_size is None:
            assert_same(state, expected)
        else:
            for found, wanted in zip(state[:-1], expected[:-1], strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def step_differently(rank: int, run: Path, decide: str) -> None:
    """Step other optimizers on each rank in the fourth step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)))
    first, second = model.module
    optimizers = {
        "first": AdamW(first.parameters(), fused=True),
        "second": AdamW(second.parameters(), fused=True),
    }
    guard = holdfast.Guard(run, model=model, optimizer=optimizers, decide=decide)
    for number in range(8):
        name = "second" if (number, rank) == (4, 1) else "first"
        guard.step(torch.ones(2, 6), lambda b: model(b).square().mean(), optimizer=name)


@pytest.mark.parametrize("decide", ["now", "late"])
def test_ranks_that_step_different_optimizers_end_with_an_error(
    tmp_path: Path, decide: str
) -> None:
    """Without it, the weights would silently differ from then on."""
    ends = run_ranks(step_differently, 2, tmp_path, decide)

    assert all("H116" in (end.raised or "") for end in ends), ends
    assert any("steps other optimizers" in (end.raised or "") for end in ends), ends


def train_late(rank: int, run: Path, decide: str) -> Any:
    """Train with two fused optimizers, a NaN on one rank and a lack of memory on the other."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    )
    first, _, second = model.module
    optimizers = {
        "first": AdamW(first.parameters(), lr=0.01, fused=True),
        "second": AdamW(second.parameters(), lr=0.02, fused=True),
    }
    torch.manual_seed(10 + rank)
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizers, decide=decide, recompute=False, diagnose=False
    )
    skipped = []
    late = 0
    for number in range(16):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(20 * rank + number))
        failures = iter([True] if (number, rank) == (11, 0) else [])
        if (number, rank) == (8, 1):
            batch[0] = float("nan")

        def loss(part: torch.Tensor, failures: Any = failures) -> torch.Tensor:
            if next(failures, False):
                ask_for_too_much()
            return model(part).square().mean()

        names = ["first", "second"] if number % 3 else "second"
        result = guard.step(batch, loss, optimizer=names)
        late += type(result) is not holdfast.StepResult
        skipped.append(result)
    guard.close()
    tensors = [*model.parameters()]
    for optimizer in optimizers.values():
        for state in optimizer.state.values():
            tensors += [state[key] for key in sorted(state)]
    state = [*(t.detach().clone() for t in tensors), torch.get_rng_state()]
    return state, [result.skipped for result in skipped], late


def test_steps_of_two_optimizers_that_are_decided_late_end_alike(tmp_path: Path) -> None:
    """A refused step is a step that neither optimizer has made, on any rank."""
    now = all_returned(run_ranks(train_late, 2, tmp_path / "now", "now"))
    late = all_returned(run_ranks(train_late, 2, tmp_path / "late", "late"))

    for (state_now, skipped_now, _), (state, skipped, count) in zip(now, late, strict=True):
        assert count >= 5
        assert skipped == skipped_now == [number == 8 for number in range(16)]
        assert_same(state, state_now)


def train_out_of_memory_in_muon(rank: int, run: Path) -> None:
    """Train a sharded model; Muon runs out of memory on one rank, before it updates anything."""
    training = Training(rank, "fully_shard", Muon)
    guard = training.guard(run)
    if rank == 1:
        training.optimizers["matrices"].register_step_pre_hook(
            lambda *_: ask_for_too_much() if guard.global_step == 3 else None
        )
    for batch in training.batches():
        guard.step(batch, training.loss)


def test_ranks_do_not_wait_in_the_collectives_of_a_muon_that_has_failed(tmp_path: Path) -> None:
    """Muon of a sharded model has collectives in its step, which the failed rank does not reach."""
    first, second = run_ranks(train_out_of_memory_in_muon, 2, tmp_path)

    assert "H402" in (second.raised or ""), second
    assert "H114" in (first.raised or "") + first.output, first
    assert first.seconds < 120


class Game(nn.Module):
    """A generator and a discriminator in one module, so that one wrapper serves both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, part: str, batch: torch.Tensor) -> torch.Tensor:
        if part == "generator":
            return self.discriminator(self.generator(batch))
        with torch.no_grad():
            fake = self.generator(batch[:, 2:])
        return self.discriminator(batch[:, :2]) - self.discriminator(fake)


def play(rank: int, run: Path, *, guarded: bool) -> list[torch.Tensor]:
    """Train both parts in turn. With a guard, one rank runs out of memory in two of the steps."""
    torch.manual_seed(0)
    game = DistributedDataParallel(Game(), find_unused_parameters=True)
    optimizers = {
        name: torch.optim.Adam(getattr(game.module, name).parameters(), lr=0.01)
        for name in ("generator", "discriminator")
    }
    guard = None
    if guarded:
        guard = holdfast.Guard(
            run, model=game, optimizer=optimizers, recompute=False, objective="adversarial"
        )
    generator = torch.Generator().manual_seed(rank)
    for number in range(6):
        for name, size in (("generator", 4), ("discriminator", 6)):
            batch = torch.randn(8, size, generator=generator)
            failures = iter([True] if guarded and (number, rank) == (3, 1) else [])

            def loss(part: torch.Tensor, name: str = name, failures: Any = failures) -> Any:
                value = game(name, part).sigmoid().mean()
                if next(failures, False):
                    ask_for_too_much()
                return value

            if guard is not None:
                guard.step(batch, loss, optimizer=name)
                continue
            loss(batch).backward()
            optimizers[name].step()
            game.zero_grad()
    return [p.detach().clone() for p in game.parameters()]


def play_twice(rank: int, run: Path) -> list[list[torch.Tensor]]:
    """Return the weights after training without a guard and with one."""
    return [play(rank, run, guarded=False), play(rank, run, guarded=True)]


def test_a_gan_in_one_module_has_the_bits_of_a_bare_loop(tmp_path: Path) -> None:
    """This is what the error about two wrapped models recommends."""
    for bare, guarded in all_returned(run_ranks(play_twice, 2, tmp_path)):
        assert_same(guarded, bare)
