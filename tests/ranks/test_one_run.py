"""A model that each rank has a copy or a share of.

Undisturbed a bare loop, and one run whatever happens.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks.harness import all_returned, run_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from typer.testing import CliRunner

import holdfast
from holdfast.checkpoint import saver
from holdfast.checkpoint.verify import verify
from holdfast.cli.main import make_app
from holdfast.testing import flip_bit

STEPS = 6
# Copies by `DistributedDataParallel`, shares by `fully_shard`.
both = pytest.mark.parametrize(
    "kind", ["replicated", pytest.param("resharded", marks=pytest.mark.slow)]
)


def bare_model(*, norm=True):
    torch.manual_seed(0)
    layers = [
        nn.Linear(6, 17),
        nn.BatchNorm1d(17) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(17, 17),
        nn.Linear(17, 1),
    ]
    return nn.Sequential(*layers)


def made(kind="resharded"):
    model = bare_model(norm=kind not in ("bf16", "static"))
    if kind in ("replicated", "static", "averaged"):
        model = DistributedDataParallel(model, static_graph=kind == "static")
    elif kind != "alone":
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        given = {"mp_policy": low} if kind == "bf16" else {}
        if kind == "hybrid":
            given["mesh"] = init_device_mesh(
                "cpu", (2, distributed.get_world_size() // 2), mesh_dim_names=("a", "b")
            )
        for layer in (model[0], model[4]):
            fully_shard(layer, reshard_after_forward=kind != "kept", **given)
        fully_shard(model, **given)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model):
    return lambda batch: model(batch).float().square().mean()


def batches_of(rank, *, sizes=(8,) * STEPS):
    return [
        torch.randn(n, 6, generator=torch.Generator().manual_seed(10 * k + rank))
        for k, n in enumerate(sizes)
    ]


def state_of(model, optimizer):
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *moments]
    return [
        getattr(each, "to_local", lambda each=each: each)().detach().clone() for each in tensors
    ]


def bare(rank, kind):
    model, optimizer = made(kind)
    torch.manual_seed(rank)
    for batch in batches_of(rank):
        with torch.no_grad():
            model.eval()(batch)
        model.train()
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [*state_of(model, optimizer), torch.get_rng_state()]


def guarded(rank, run, kind):
    model, optimizer = made(kind)
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=optimizer,
        loader=batches_of(rank),
        max_grad_norm=0.1,
        save_interval_steps=2,
    )
    torch.manual_seed(rank)
    losses = []
    for batch in guard.batches(max_epochs=1):
        with guard.evaluate():  # leaves the outermost parameters whole
            model(batch)
        losses.append(float(guard.step(batch, loss_of(model)).loss))
    found = [*state_of(model, optimizer), torch.get_rng_state()]
    guard.close()
    return found, losses


def bare_and_guarded(rank, run, kinds):
    return [(bare(rank, kind), guarded(rank, f"{run}/{kind}", kind)) for kind in kinds]


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (1, ["replicated", "resharded"]),
        (2, ["replicated", "static"]),
        (3, ["replicated", "static"]),
        pytest.param(2, ["resharded", "kept", "bf16"], marks=pytest.mark.slow),
        pytest.param(3, ["resharded"], marks=pytest.mark.slow),
        pytest.param(4, ["hybrid"], marks=pytest.mark.slow),
    ],
)
def test_undisturbed_ranks_equal_a_bare_loop_bit_for_bit(tmp_path, world_size, kinds):
    """Weights, moments, buffers and random state are those of a loop without a guard.

    The loss is that of all.
    """
    found = all_returned(run_ranks(bare_and_guarded, world_size, tmp_path, kinds))
    for of_rank in found:
        for (of_bare, (of_guarded, losses)), (_, (_, of_first)) in zip(
            of_rank, found[0], strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(of_bare, of_guarded, strict=True))
            assert losses == of_first


def trained(rank, run, kind, until):
    model, optimizer = made(kind)
    data = list(torch.randn(96, 6, generator=torch.Generator().manual_seed(1)).unbind())
    loader = holdfast.DataLoader(list(enumerate(data)), batch_size=4, shuffle=True, seed=3)
    given = {"model": model, "optimizer": optimizer, "loader": loader, "save_interval_steps": 2}
    if kind == "averaged":
        given["averaged"] = AveragedModel(model.module)
    guard = holdfast.Guard(run, **given)
    begun_at, begun_with = guard.global_step, whole(model, optimizer)
    torch.manual_seed(100 + rank) if guard.resumed_from is None else None
    seen, damaged = [], [event for event in guard.events() if event.kind == "checkpoint_damaged"]
    for indices, batch in guard.batches(max_epochs=1, max_steps=until):
        seen += indices.tolist()
        guard.step(batch, loss_of(model))
    guard.close()
    own = [*state_of(model, optimizer), torch.get_rng_state()]
    own += given["averaged"].state_dict().values() if kind == "averaged" else []
    return {
        "seen": seen,
        "begun at": begun_at,
        "begun with": begun_with,
        "damaged": len(damaged),
        "ended with": whole(model, optimizer),
        "own": own,
    }


def whole(model, optimizer):
    """Return weights and moments by name, put together of all ranks."""
    bare_names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    found = dict(zip(bare_names, model.parameters(), strict=True))
    for name, parameter in zip(bare_names, model.parameters(), strict=True):
        found |= {
            f"{key} of {name}": value for key, value in optimizer.state.get(parameter, {}).items()
        }
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)().detach().clone()
        for name, each in found.items()
    }


def equal(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


CHAINS = {
    "replicated": [("averaged", 2), ("averaged", 3), ("averaged", 2)],
    "sharded": [("resharded", 4), ("kept", 2), ("resharded", 3)],
    "replicated, then sharded": [("replicated", 2), ("resharded", 3), ("replicated", 2)],
    "hybrid, then alone": [("hybrid", 4), ("alone", 1), ("resharded", 2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_on_other_numbers_of_ranks_and_spread_in_another_way(tmp_path, chain):
    """What each continues with is what the one before had, bit for bit.

    Each sample of the epoch is taken once.
    """
    seen, before = [], None
    for number, (kind, world_size) in enumerate(CHAINS[chain]):
        until = 3 * (number + 1) if number < 2 else None
        found = all_returned(run_ranks(trained, world_size, tmp_path, kind, until))
        seen += [index for of_rank in found for index in of_rank["seen"]]
        for of_rank in found:
            assert equal(of_rank["ended with"], found[0]["ended with"])
            assert before is None or equal(of_rank["begun with"], before)
        before = found[0]["ended with"]
    assert sorted(seen) == list(range(96))


RAGGED = [(5, 8, 3, 1), (2, 1, 7, 6), (4, 4, 1, 9)]
FEW = torch.randn(17, 6, generator=torch.Generator().manual_seed(5))


def ragged(rank, run, kind, few):
    model, optimizer = made(kind)
    model.eval()
    loader = holdfast.DataLoader(FEW, batch_size=5) if few else batches_of(rank, sizes=RAGGED[rank])
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=loader, save_interval_steps=None
    )
    items = [guard.step(batch, loss_of(model)).items for batch in guard.batches(max_epochs=1)]
    return whole(model, optimizer), items


@both
@pytest.mark.parametrize("few", [False, True])
def test_ragged_batches_weigh_by_their_items(tmp_path, kind, few):
    """The weights are those of one process with the batches of all ranks, where one sample is
    given to two too.
    """
    batches = [FEW[:15], FEW[15:]] if few else []
    batches = batches or [
        torch.cat(each)
        for each in zip(*(batches_of(r, sizes=n) for r, n in enumerate(RAGGED)), strict=True)
    ]
    alone, optimizer = made("alone")
    alone.eval()
    for batch in batches:
        optimizer.zero_grad()
        loss_of(alone)(batch).backward()
        optimizer.step()
    for found, items in all_returned(run_ranks(ragged, 3, tmp_path, kind, few)):
        assert items == [len(batch) for batch in batches]
        weights = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
        off = torch.cat([found[name].flatten() for name, _ in alone.named_parameters()]) - weights
        assert off.norm() <= 1e-6 * weights.norm()


@dataclass
class Disturbance:
    """What goes wrong on one rank in its fourth step, and NaN in the first step as well."""

    # The kind of disturbance. None on the other ranks, and in an undisturbed run.
    what: str | None
    # The results of the steps so far.
    results: list[holdfast.StepResult]

    def is_due(self, what):
        return self.what == what and len(self.results) == 3

    def before_step(self, guard, batch):
        if self.is_due("nan") or (self.what == "nan" and not self.results):
            batch[3] = float("nan")
        if self.is_due("stop"):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.is_due("asked"):
            guard.request_stop("enough")
        if self.is_due("outside"):
            raise ValueError("uncaught in the body")

    def in_loss(self, loss):
        if self.is_due("bad input"):
            return loss.detach()
        if self.is_due("exception"):
            raise KeyError("the wrong key")
        if self.is_due("out of memory"):
            exhaust_memory()
        if self.is_due("in backward"):
            loss.register_hook(exhaust_memory)
        return loss

    def in_optimizer(self, *_):
        if self.is_due("optimizer"):
            exhaust_memory()

    def after_step(self):
        if self.is_due("killed"):
            os.kill(os.getpid(), signal.SIGKILL)


def exhaust_memory(*_):
    torch.empty(2**50, dtype=torch.uint8)


def disturbed(rank, run, kind, what, where):
    """Train, and disturb rank `where`. Return the weights, the results and the statistics."""
    model, optimizer = made(kind)
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=batches_of(rank), save_interval_steps=2
    )
    results = []
    disturbance = Disturbance(what if rank == where else None, results)
    optimizer.register_step_pre_hook(disturbance.in_optimizer)

    def loss_fn(batch):
        return disturbance.in_loss(loss_of(model)(batch))

    for batch in guard.batches(max_epochs=1):
        disturbance.before_step(guard, batch)
        results.append(guard.step(batch, loss_fn))
        disturbance.after_step()
    reasons = [(result.skipped, result.reason) for result in results]
    return whole(model, optimizer), reasons, guard.statistics()


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("replicated", 0),
        ("static", 1),
        pytest.param("resharded", 0, marks=pytest.mark.slow),
        pytest.param("resharded", 1, marks=pytest.mark.slow),
    ],
)
def test_nan_on_one_rank_is_skipped_by_all_and_the_rank_is_named(tmp_path, kind, where):
    """Also in the first step. It comes to all by the gradients; whose loss it was says the row."""
    found = all_returned(run_ranks(disturbed, 2, tmp_path, kind, "nan", where))
    for state, results, _ in found:
        assert equal(state, found[0][0])
        assert all(value.isfinite().all() for value in state.values())
        assert [skipped for skipped, _ in results] == [True, False, False, True, False, False]
        assert f"rank {where}: " in results[0][1]
        assert f"rank {where}: " in results[3][1]
    # No layer mixes samples there
    assert kind != "static" or "without sample 3" in found[where][1][3][1]


@pytest.mark.parametrize(
    ("kind", "what", "where"),
    [
        ("replicated", "stop", 1),
        ("replicated", "asked", 0),
        pytest.param("resharded", "stop", 1, marks=pytest.mark.slow),
    ],
)
def test_a_stop_on_one_rank_stops_all_at_the_same_step(tmp_path, kind, what, where):
    """All have written their shares by then; of copies one writes."""
    for rank, found in enumerate(
        all_returned(run_ranks(disturbed, 2, tmp_path, kind, what, where))
    ):
        _, results, statistics = found
        assert len(results) == 4
        assert (statistics.global_step, statistics.checkpoints_failed) == (4, 0)
        assert bool(statistics.checkpoints_saved) == (kind == "resharded" or rank == 0)
    shares = [*Path(tmp_path, "checkpoints").glob("*-step00000004/rank1/model.safetensors")]
    assert bool(shares) == (kind == "resharded")


TEXTS = {
    "bad input": "H202",
    "exception": "KeyError: 'the wrong key'",
    "out of memory": "H401",
    "in backward": "H401",
    "outside": "ValueError: uncaught in the body",
    "optimizer": "H402",
    "killed": "H114",
}


@both
@pytest.mark.parametrize(
    ("what", "where"), [(what, number % 2) for number, what in enumerate(TEXTS)]
)
def test_what_one_rank_fails_with_ends_all_with_its_text(tmp_path, kind, what, where):
    """No rank hangs, and the other one names the failed rank with its error.

    Started again, they continue from the checkpoint of all.
    """
    if kind == "replicated" and what == "optimizer":
        pytest.skip("the rank takes the state of another one, and continues")

    ends = run_ranks(disturbed, 2, tmp_path, kind, what, where)

    seconds = [end.seconds for end in ends]
    output_of_other = ends[1 - where].output
    assert all(end.exit_code != 0 for end in ends), ends
    assert max(seconds) - min(seconds) < 20.0
    assert TEXTS[what] in output_of_other
    # A killed rank cannot say who it was, and it may have saved more or less than the others.
    if what == "killed":
        assert_goes_on(tmp_path, kind)
        return
    assert f"rank {where}" in output_of_other
    assert assert_goes_on(tmp_path, kind) == STEPS - 2


def assert_goes_on(run, kind):
    """Check that all ranks continue to the end, and return how many steps each of them makes."""
    found = all_returned(run_ranks(disturbed, 2, run, kind, None, 0))
    counts = {len(results) for _, results, _ in found}
    assert len(counts) == 1
    return counts.pop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["model.safetensors", "rank1/model.safetensors", "rank2/optimizer.safetensors"]
)
def test_a_flipped_bit_in_the_file_of_any_rank_is_seen_and_all_take_the_checkpoint_before(
    tmp_path, where
):
    """Every byte of every rank has its digest in the one manifest."""
    first = all_returned(run_ranks(trained, 3, tmp_path, "resharded", 2))
    all_returned(run_ranks(trained, 3, tmp_path, "resharded", 4))
    newest = max(Path(tmp_path, "checkpoints").iterdir())
    flip_bit(newest / where, 8 * (newest / where).stat().st_size - 9)
    assert CliRunner().invoke(make_app(), ["checkpoints", str(tmp_path), "--verify"]).exit_code == 1
    found = all_returned(run_ranks(trained, 3, tmp_path, "resharded", 5))
    for of_rank in found:
        assert of_rank["begun at"] < 4
        assert of_rank["begun at"] > 2 or equal(of_rank["begun with"], first[0]["ended with"])
    assert found[0]["damaged"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size"), [("resharded", 2), ("averaged", 2), ("averaged", 3)]
)
def test_a_resume_on_as_many_ranks_is_bit_exact(tmp_path, kind, world_size):
    """Each rank goes on with its weights, its samples, its random state and its statistics of
    batches.
    """
    undisturbed = all_returned(run_ranks(trained, world_size, tmp_path / "whole", kind, None))
    first = all_returned(run_ranks(trained, world_size, tmp_path / "parts", kind, 5))
    rest = all_returned(run_ranks(trained, world_size, tmp_path / "parts", kind, None))
    for of_whole, before, after in zip(undisturbed, first, rest, strict=True):
        assert before["seen"] + after["seen"] == of_whole["seen"]
        assert all(torch.equal(a, b) for a, b in zip(of_whole["own"], after["own"], strict=True))


@pytest.mark.slow
def test_the_weights_of_all_ranks_become_one_plain_file(tmp_path):
    """It is loaded without ranks, and without this library."""
    found, _ = all_returned(run_ranks(trained, 2, tmp_path, "resharded", 3))
    target = tmp_path / "model.safetensors"
    ended = CliRunner().invoke(make_app(), ["checkpoints", str(tmp_path), "--export", str(target)])
    assert ended.exit_code == 0, ended.output
    model = bare_model()
    model.load_state_dict(load_file(target))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, found["ended with"][name])


def saving_badly(rank, run, what):
    """Train while rank 1 cannot save two times, or has an Inf in its state that no step shows."""
    model, optimizer = made()
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=optimizer,
        loader=batches_of(rank, sizes=(8,) * 9),
        save_interval_steps=1,
        async_save=what != "full disk, at once",
        nonfinite_patience=1,
    )
    if rank == 1:
        disturb_saves(guard, what)
    steps = []
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
        steps.append(guard.global_step)
        if what == "NaN" and rank == 1 and len(steps) == 5:
            moments = optimizer.state[next(model.parameters())]["exp_avg_sq"].to_local()
            moments.view(-1)[0] = float("inf")
        # A save in the background has to end before the next step.
        time.sleep(0.1 if what == "NaN" else 0.05)
    return steps, guard.statistics(), whole(model, optimizer)


def disturb_saves(guard, what):
    """Let the saves after steps 2 and 3 fail, or take long, in the file of the optimizer."""
    write = saver.write_tensors

    def write_badly(path, tensors):
        if guard.global_step in (2, 3) and path.name == "optimizer.safetensors":
            if "full disk" in what:
                raise OSError("No space left on device")
            if what == "slow disk":
                time.sleep(0.5)
        return write(path, tensors)

    saver.write_tensors = write_badly


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full disk, at once", "full disk", "slow disk", "NaN"])
def test_a_share_that_cannot_be_saved_is_seen_by_all(tmp_path, what):
    """A save fails, waits or is refused on all ranks, and no checkpoint has half a state."""
    found = all_returned(run_ranks(saving_badly, 2, tmp_path, what))

    (steps, statistics, weights), (other_steps, other_statistics, other_weights) = found
    assert steps == other_steps
    assert equal(weights, other_weights)
    assert statistics.checkpoints_saved == other_statistics.checkpoints_saved > 1
    assert statistics.checkpoints_failed == other_statistics.checkpoints_failed
    if "full disk" in what:
        assert statistics.checkpoints_failed >= 1
    if what == "NaN":
        assert statistics.rollbacks == other_statistics.rollbacks == 1
        assert all(value.isfinite().all() for value in weights.values())
    for path in Path(tmp_path, "checkpoints").iterdir():
        assert not path.name.startswith(".tmp")
        files_of_rank_1 = [name for name in verify(path).files if name.startswith("rank1/")]
        # Before the first step, the optimizer has no state.
        assert len(files_of_rank_1) == (1 if "step00000000" in path.name else 2)
