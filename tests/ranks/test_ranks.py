"""Several ranks under a guard.

Undisturbed they are a bare loop, and whatever happens to one happens to all.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from evals.fuzz.targets import forge
from tests.docs.pages import DOCS, blocks
from tests.ports import unused_port
from tests.prepared import Prepared
from tests.ranks.harness import Ended, all_returned, run_ranks
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import holdfast
from holdfast.checkpoint.store import Store
from holdfast.guard.ranks import pace
from holdfast.guard.splitting.window import Window
from holdfast.testing import limit_memory

STEPS = 8


def model_and_optimizer(*, norm=False, static=False):
    torch.manual_seed(0)
    layers = [
        nn.Linear(6, 16),
        nn.BatchNorm1d(16) if norm else nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(16, 1),
    ]
    model = DistributedDataParallel(nn.Sequential(*layers), static_graph=static)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model):
    return lambda batch: model(batch).square().mean()


def batches_of(rank, *, sizes=(8,) * STEPS):
    return [
        torch.randn(n, 6, generator=torch.Generator().manual_seed(10 * k + rank))
        for k, n in enumerate(sizes)
    ]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def state_of(model, optimizer):
    moments = [value for state in optimizer.state.values() for value in state.values()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [weights(model), *buffers, *moments, torch.get_rng_state()]


def accumulating(rank, run, added):
    """Train on two batches in each step, without a guard and with one."""
    found = []
    for guarded in (False, True):
        model, optimizer = model_and_optimizer()
        torch.manual_seed(rank)
        mean = loss_of(model)
        halves = (lambda batch, mean=mean: mean(batch) / 2) if added or not guarded else mean
        pairs = list(zip(*[iter(batches_of(rank))] * 2, strict=True))
        if guarded:
            guard = holdfast.Guard(run, model=model, optimizer=optimizer, max_grad_norm=1.0)
        for pair in pairs:
            if guarded:
                guard.step(Window(pair, added=added), halves)
                continue
            with model.no_sync():
                halves(pair[0]).backward()
            halves(pair[1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(state_of(model, optimizer))
    return found


@pytest.mark.parametrize("added", [False, True])
def test_a_window_of_batches_is_one_step_of_all_ranks(tmp_path, added):
    """It equals accumulation without a guard.

    Bit for bit where the caller has divided the losses.
    """
    for bare_state, guarded_state in all_returned(run_ranks(accumulating, 2, tmp_path, added)):
        for a, b in zip(bare_state, guarded_state, strict=True):
            assert torch.equal(a, b) if added else torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def heard(rank, run):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=batches_of(rank), recompute=False
    )
    failures = iter([1, 2])

    def loss_fn(batch):
        if rank == guard.global_step == 1 and next(failures, None):
            torch.empty(2**50, dtype=torch.uint8)
        return loss_of(model)(batch)

    for number, batch in enumerate(guard.batches(max_epochs=1)):
        batch[0] = float("nan") if rank and number == 3 else 0.0
        guard.step(batch, loss_fn)


EVENT = r"(?=\bstep \d+: )"  # where the text of an event begins in a line of the log


def test_what_ranks_do_alike_is_said_once_and_else_the_rank_is_named(tmp_path):
    """The log of all ranks together has a line for each event that people should see."""
    ends = run_ranks(heard, 2, tmp_path)
    all_returned(ends)
    of_first, of_second = (
        [line for line in end.output.splitlines() if re.search(EVENT, line)] for end in ends
    )
    assert len([line for line in of_first if "skipped: " in line and "rank 1: " in line]) == 1, ends
    assert {re.split(EVENT, line, maxsplit=1)[1] for line in of_first}.isdisjoint(
        re.split(EVENT, line, maxsplit=1)[1] for line in of_second
    ), ends
    assert (
        len([line for line in of_second if line.startswith("rank 1: ") and "out of memory" in line])
        == 2
    ), ends
    assert all(line.startswith("rank 1: ") for line in of_second), ends


def leaving_out(rank, run):
    torch.manual_seed(0)
    parts = nn.ModuleDict({"always": nn.Linear(6, 6), "at_times": nn.Linear(6, 6)})

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = parts

        def forward(self, batch, *, whole):
            batch = self.parts["always"](batch)
            return self.parts["at_times"](batch) if whole else batch

    model = DistributedDataParallel(Chosen(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    skipped = []
    for batch in guard.batches(max_epochs=1):
        if rank and len(skipped) == 2:
            batch[0] = float("nan")
        whole = len(skipped) % 3 == 2
        skipped.append(
            guard.step(batch, lambda b, w=whole: model(b, whole=w).square().mean()).skipped
        )
    return weights(model), skipped


def test_a_rank_that_looks_for_nan_leaves_nothing_in_its_reducer(tmp_path):
    """With find_unused_parameters, marks of the passes that it makes alone would spoil the next
    step.
    """
    for of_rank, skipped in all_returned(found := run_ranks(leaving_out, 2, tmp_path)):
        assert torch.equal(of_rank, found[0].returned[0])
        assert skipped == [False, False, True] + [False] * (STEPS - 3)


def with_own_collective(rank, run):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))

    def loss_fn(batch):
        loss = loss_of(model)(batch)
        total = loss.detach().clone()
        distributed.all_reduce(total)
        return loss

    reasons = []
    for batch in guard.batches(max_epochs=1):
        if rank and len(reasons) == 2:
            batch[0] = float("nan")
        reasons.append(guard.step(batch, loss_fn).reason)
    return weights(model), reasons


def test_a_loss_over_all_ranks_is_not_replayed_by_one(tmp_path):
    """It would wait for the others for ever; the rank is named all the same."""
    for of_rank, reasons in all_returned(found := run_ranks(with_own_collective, 2, tmp_path)):
        assert torch.equal(of_rank, found[0].returned[0])
        assert [number for number, reason in enumerate(reasons) if reason] == [2]
        assert "rank 1: " in reasons[2]


def spiking(rank, run):
    model, optimizer = model_and_optimizer()
    loader = batches_of(rank, sizes=(8,) * 202)
    optimizer.param_groups[0]["lr"] = 1e-4
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=loader, spike_action="skip"
    )
    skipped = []
    for number, batch in enumerate(guard.batches(max_epochs=1)):
        # In the loss of this rank, and in the gradient of all
        factor = 1e4 if rank and number == 180 else 1.0
        skipped.append(
            guard.step(batch, lambda b, factor=factor: loss_of(model)(b) * factor).skipped
        )
    return weights(model), skipped


def test_a_spike_on_one_rank_is_judged_alike_by_all(tmp_path):
    """They judge the loss of all ranks, so that none of them commits alone."""
    found = all_returned(run_ranks(spiking, 2, tmp_path))
    for of_rank, skipped in found:
        assert torch.equal(of_rank, found[0][0])
        assert skipped == [number == 180 for number in range(202)]


def short_of_memory(rank, run, where):
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(512, 3072), nn.Tanh(), nn.Linear(3072, 512))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    loader = [torch.randn(1024, 512, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    average = AveragedModel(model.module)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, averaged=average, loader=loader)
    optimizer.register_step_pre_hook(
        lambda *_: limit_memory(-(1 << 28)) if rank == where and guard.global_step == 1 else None
    )
    for batch in guard.batches(max_epochs=1):
        if rank == where:
            limit_memory(1 << 32)  # from now on, what is freed is no headroom
        guard.step(batch, loss_of(model))
    return torch.cat([weights(model), weights(average)])


@pytest.mark.slow
def test_memory_that_the_optimizer_of_one_rank_lacks_changes_nothing(tmp_path):
    """The kernel refuses its temporaries in the middle of a step.

    The bits are those of a run that has enough.
    """
    undisturbed, _ = all_returned(run_ranks(short_of_memory, 2, tmp_path / "a", None))
    for found in all_returned(run_ranks(short_of_memory, 2, tmp_path / "b", 1)):
        assert torch.equal(found, undisturbed)
    events = Path(tmp_path, "b", "recorder", "rank1").rglob("*")
    assert any(b"state_taken" in each.read_bytes() for each in events if each.is_file())


def counted(rank, run):
    model, optimizer = model_and_optimizer()
    group, batches, found = model.process_group, batches_of(rank), []
    for batch in batches[:4]:
        before = group._get_sequence_number_for_group()
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        optimizer.step()
        found.append(group._get_sequence_number_for_group() - before)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches)
    for batch in guard.batches(max_steps=4):
        before = group._get_sequence_number_for_group()
        guard.step(batch, loss_of(model))
        found.append(group._get_sequence_number_for_group() - before)
    return found


def test_an_undisturbed_step_adds_one_collective(tmp_path):
    """Counted on the model's own group, beside the reductions of a bare step."""
    for found in all_returned(run_ranks(counted, 2, tmp_path)):
        assert found[7] == found[3] + 1


def going_back(rank, run):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=optimizer,
        loader=batches_of(rank),
        save_interval_steps=2,
        async_save=False,
        nonfinite_patience=2,
        provenance=False,
    )
    for number, batch in enumerate(guard.batches(max_epochs=1)):
        if rank and number in (3, 4, 5):
            batch[0] = float("nan")
        guard.step(batch, loss_of(model))
    return weights(model), guard.statistics().rollbacks, guard.global_step


def test_all_ranks_roll_back_to_the_same_checkpoint(tmp_path):
    """Patience with NaN of one rank ends on all of them, and the others read what the first one
    has written.
    """
    found = all_returned(run_ranks(going_back, 2, tmp_path))
    for of_rank, rollbacks, step in found:
        assert torch.equal(of_rank, found[0][0])
        assert (rollbacks, step) == (1, found[0][2])


def test_a_forged_random_state_of_a_rank_is_an_error_in_words_on_all(tmp_path):
    """It lies beside that of the other ranks, and is looked at before anything is loaded."""
    all_returned(run_ranks(going_back, 2, tmp_path))
    newest = Store(tmp_path / "checkpoints").entries()[0].path
    file = newest / "training.safetensors"
    file.write_bytes(file.read_bytes()[: -3 * 5056] + b"\xff" * 3 * 5056)
    forge(newest)
    for end in run_ranks(going_back, 2, tmp_path):
        assert "H311" in (end.raised or ""), end


def differing(rank, run, what):
    model, optimizer = model_and_optimizer()
    if what == "run directory" and rank:
        run = Path(run, "other")
    if what == "optimizer.0.lr" and rank:
        optimizer.param_groups[0]["lr"] = 0.5
    policy = {"max_grad_norm": float(rank + 1)} if what == "policy" else {}
    length = STEPS - rank if what == "loader" else STEPS
    loader = batches_of(rank)[:length]
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=loader, **policy)
    for batch in guard.batches(max_epochs=2):
        guard.step(batch, loss_of(model))
        if what == "optimizer.0.weight_decay" and rank:
            optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize(
    "what", ["run directory", "optimizer.0.lr", "policy", "optimizer.0.weight_decay"]
)
def test_ranks_that_differ_are_refused_on_all_of_them(tmp_path, what):
    """The error names what differs, at the opening or at the beginning of an epoch."""
    for end in run_ranks(differing, 2, tmp_path, what):
        assert "H115" in end.output, end
        assert what in (end.raised or ""), end


def test_a_loader_that_ends_early_on_one_rank_is_said_on_all(tmp_path):
    """The others are in the middle of a step, and do not wait for ever."""
    ends = run_ranks(differing, 2, tmp_path, "loader")
    for end in ends:
        assert "the loader of rank 1 has ended" in (end.raised or ""), ends


def validating(rank, run, differ):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=batches_of(rank), save_interval_steps=100
    )
    kept = []
    for number, batch in enumerate(guard.batches(max_epochs=1)):
        guard.step(batch, loss_of(model))
        value = (0.3, 0.5, 0.4, 0.2)[number % 4] + differ * rank
        kept.append(guard.validated(value, name="accuracy", mode="max", patience=2))
    return kept, guard.best("accuracy").global_step, guard.global_step


def test_all_ranks_keep_the_same_best_checkpoint_and_stop_alike(tmp_path):
    """One writes it. Values that differ are an error on all."""
    assert (
        all_returned(run_ranks(validating, 2, tmp_path / "a", 0.0))
        == [
            # What one asks for, all hear in the next step
            ([True, True, False, False, False], 2, 5)
        ]
        * 2
    )
    for end in run_ranks(validating, 2, tmp_path / "b", 0.1):
        assert "H115" in end.output


def parting(rank, run, how, where):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    if how == "ends":  # in a loop of its own
        guard.step(batches_of(rank)[0], loss_of(model))
        return guard.close() if rank != where else atexit._run_exitfuncs()
    for number, batch in enumerate(guard.batches(max_epochs=1)):
        guard.step(batch, loss_of(model))
        if number == 2 and rank == where:
            if how == "left":
                break
            guard.close() if how == "closed" else guard.validated(0.5, name="accuracy")
    return time.sleep(1000.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where", "text"),
    [
        (
            "validated",
            0,
            "rank 0 waits for the others in guard.validated, and rank 1 makes another step",
        ),
        (
            "closed",
            1,
            "rank 1 waits for the others in a checkpoint or close, and rank 0 makes another step",
        ),
        ("left", 1, "rank 1 has left its loop or closed its guard, and rank 0 makes another step"),
        ("left", 0, "rank 0 has left its loop or closed its guard, and rank "),
        ("ends", 1, "rank 1 has ended, and rank 0 waits for it"),
    ],
)
def test_what_one_rank_does_alone_is_an_error_on_all(tmp_path, how, where, text):
    """Nobody waits for ever, not even in a collective that has begun."""
    world_size = 3 if (how, where) == ("left", 0) else 2
    for rank, end in enumerate(run_ranks(parting, world_size, tmp_path, how, where)):
        if (how, rank) != ("ends", where):
            assert end.exit_code == 1, end
            assert text in end.output, end
            assert "H116" in end.output, end


def again(rank, run):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
        if guard.global_step == 2:
            break
    time.sleep(2.0 * rank)  # what one rank has left the others hear of
    guard.step(batches_of(rank)[0], loss_of(model))
    time.sleep(2.0 * rank)
    guard.close()
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(model))
    if rank == 0:
        guard.close()  # once more
    return guard.global_step


@pytest.mark.slow
def test_ranks_that_leave_a_loop_together_may_go_on(tmp_path):
    """In a loop of their own, or in another one; that one of them closes once more holds nobody."""
    assert len(set(all_returned(run_ranks(again, 2, tmp_path)))) == 1


def evaluating_alone(rank, run, who):
    model, optimizer = model_and_optimizer(norm=True)
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    for batch in guard.batches(max_epochs=2):
        guard.step(batch, loss_of(model))
        if guard.global_step % 3 == 0 and rank in who:
            with guard.evaluate():
                model(batch)
                model(batch)
    return state_of(model, optimizer)


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_an_evaluation_by_one_rank_alone_changes_nothing(tmp_path, who):
    """Its first call sends the buffers of a norm, to which the others come at their next step,
    as without a guard.
    """
    undisturbed = all_returned(run_ranks(evaluating_alone, 2, tmp_path / "none", ()))
    evaluated = all_returned(run_ranks(evaluating_alone, 2, tmp_path / "some", who))
    for first, second in zip(undisturbed, evaluated, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def slow(rank, run, where):
    if where == "nowhere":
        # Equal ranks are as fast as each other only by a clock that no other process delays.
        pace.time = SimpleNamespace(perf_counter=itertools.count(step=0.001).__next__)
    torch.ones(rank << 26)
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(
        run, model=model, optimizer=optimizer, loader=batches_of(rank, sizes=(8 - rank,) * 40)
    )

    def loss_fn(batch):
        time.sleep(0.05 * (where == "in forward" and rank == 1))
        return loss_of(model)(batch)

    for batch in guard.batches(max_epochs=1):
        time.sleep(0.05 * (where == "between steps" and rank == 1))
        guard.step(batch, loss_fn)
    return [event.data for event in guard.events() if event.kind == "rank_is_slow"]


@pytest.mark.parametrize("where", ["in forward", "between steps", "nowhere"])
def test_the_rank_that_others_wait_for_is_named(tmp_path, where):
    """With where it loses its time, and the items that each rank has."""
    found, others = all_returned(run_ranks(slow, 2, tmp_path, where))
    assert not others
    if where == "nowhere":
        assert not found
        return
    (event,) = found
    assert event["peak_bytes"][1] - event["peak_bytes"][0] > 2**27  # rank 1 has had more
    assert (event["rank"], event["where"][: len(where)], event["items_a_step"]) == (
        1,
        where,
        [8.0, 7.0],
    )


def stays(rank, run):
    model, optimizer = model_and_optimizer()
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    pids = [None, None]
    distributed.all_gather_object(pids, os.getpid())
    try:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda b: 1 / 0 if rank else loss_of(model)(b))
    except ZeroDivisionError:
        # It is caught, and the process stays until the other one has ended.
        while Path(f"/proc/{pids[0]}").exists():
            time.sleep(0.02)
    return model.broadcast_buffers


@pytest.mark.slow
def test_a_rank_that_catches_its_error_and_stays_holds_nobody(tmp_path):
    """The other one is ended by its own process although it waits in a collective."""
    first, second = run_ranks(stays, 2, tmp_path)
    assert isinstance(first, Ended)
    assert first.exit_code == 1
    assert "rank 1 has failed with ZeroDivisionError" in first.output
    assert second.returned is True, "calls of the model outside of a step send buffers again"


def on_two_forked_ranks(script: str, folder: Path) -> str:
    """Run a script undisturbed and without a launcher; return what rank 0 has printed."""
    port = str(unused_port())
    ranks = [
        Prepared(
            [script],
            cwd=folder,
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": "2",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return outputs[0]


@pytest.mark.slow
def test_the_script_of_the_guide_goes_on_after_a_rank_was_killed(tmp_path):
    """Under `holdfast run` and torchrun.

    All start again and go on, and end as if nothing had been.
    """
    (script,) = (
        block.text for block in blocks(DOCS / "guide" / "ranks.md") if block.title == "ddp.py"
    )
    body = "for batch in guard.batches(max_epochs=2):\n"
    assert body in script
    dies = (
        "    if distributed.get_rank() == 1 and guard.global_step == 40 and guard.resumed_from is"
        " None:\n"
    )
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "ddp.py").write_text(
        "import os\n\n" + script.replace(body, f"{body}{dies}        os.kill(os.getpid(), 9)\n", 1)
    )
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "ddp.py").write_text(script)
    beside = Path(sys.executable).parent
    command = [beside / "holdfast", "run", "--"]
    command += [beside / "torchrun", "--nproc-per-node", "2", "ddp.py"]

    whole = on_two_forked_ranks("ddp.py", tmp_path / "whole")
    ended = subprocess.run(
        command, cwd=tmp_path / "killed", capture_output=True, text=True, timeout=240, check=False
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "2 attempts" in ended.stderr
    last_lines = [
        [line for line in output.splitlines() if line.startswith("step 64, loss")]
        for output in (whole, ended.stdout)
    ]
    assert last_lines[0] == last_lines[1] != []


WITHOUT_LAUNCHER = """
import sys, torch, holdfast
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(3, 1))
guard = holdfast.Guard(sys.argv[1], model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
guard.step(torch.ones(2, 3), lambda batch: model(batch).mean())
guard.close()
"""


@pytest.mark.slow
def test_ranks_without_a_launcher_end_in_order(tmp_path):
    """Their store ends with the first rank.

    To whoever is waiting in it at exit, C++ would abort the process.
    """
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
    }
    command = [sys.executable, "-c", WITHOUT_LAUNCHER, str(tmp_path)]
    ranks = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(240) for rank in ranks] == [0, 0]


def hooks(rank, run):
    model, optimizer = model_and_optimizer()
    before = sys.excepthook
    guard = holdfast.Guard(run, model=model, optimizer=optimizer, loader=batches_of(rank))
    for batch in guard.batches(max_epochs=1):
        during = sys.excepthook
        guard.step(batch, loss_of(model))
    return during is before, sys.excepthook is before


def test_the_hook_for_uncaught_errors_is_given_back(tmp_path):
    """It is the guard's while the guard is open, and what it was before afterwards."""
    assert all_returned(run_ranks(hooks, 2, tmp_path)) == [(False, True)] * 2


def refusals(rank, run):
    def guarded(model, optimizer=None, loss_fn=None, batches=(), **policy):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        guard = holdfast.Guard(f"{run}/{len(found)}", model=model, optimizer=optimizer, **policy)
        guard.step(batches or torch.ones(2, 6), loss_fn or (lambda b: model(b).square().mean()))

    def small():
        return nn.Linear(6, 1)

    def linear(**settings):
        return DistributedDataParallel(nn.Linear(6, 1), **settings)

    def two_terms(model):
        return lambda b: [holdfast.Loss(model(b).square().mean(), items=2)] * 2

    def sharded(model, part=None, **settings):
        fully_shard(model if part is None else part, **settings)
        return model

    def hooked():
        model = linear()
        model.register_comm_hook(PowerSGDState(None), powerSGD_hook)
        return model

    def optimizers(models):
        return {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}

    def several(**models):
        guarded(models, optimizers(models))

    def with_frozen(model):
        several(net=model, teacher=small().requires_grad_(requires_grad=False))

    def with_muon(model):
        guarded(model, torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]))

    plain = linear()
    cases = {
        "is a Linear, not a DistributedDataParallel": lambda: guarded(nn.Linear(6, 1)),
        "was passed to fully_shard": lambda: guarded(
            sharded(layers := nn.Sequential(small()), layers[0])
        ),
        "is sharded in part only": lambda: guarded(
            sharded(both := small(), ignored_params={both.bias})
        ),
        "is sharded as": lambda: guarded(
            sharded(small(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        ),
        "is sharded over 1 of the ranks": lambda: guarded(
            sharded(small(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
        ),
        "averaged= is given": lambda: guarded(sharded(small()), averaged=AveragedModel(small())),
        "micro_batch_size=1": lambda: guarded(sharded(small()), micro_batch_size=1),
        "wrapped twice": lambda: guarded(linear_in_linear()),
        "'g', 'd'": lambda: several(g=linear(), d=linear()),
        "'g', 'both'": lambda: several(g=sharded(small()), both=sharded(small())),
        "'g', 'wrapped'": lambda: several(g=sharded(small()), wrapped=linear()),
        "not a DistributedDataParallel as 'net' is": lambda: several(net=linear(), loss=small()),
        "'teacher' holds 'teacher.weight'": lambda: with_frozen(linear()),
        "which does not belong to model 'net'": lambda: with_frozen(sharded(small())),
        "shape (1, 6) under fully_shard": lambda: with_muon(sharded(small())),
        "only 1 of the ranks": lambda: guarded(linear(process_group=alone)),
        "a first step in several parts": lambda: guarded(
            linear(static_graph=True), batches=Window((torch.ones(2, 6), torch.ones(2, 6)))
        ),
        "micro_batch_size=2": lambda: guarded(linear(static_graph=True), micro_batch_size=2),
        "PowerSGD": lambda: guarded(hooked()),
        "drop_nonfinite_samples=True": lambda: guarded(linear(), drop_nonfinite_samples=True),
        "repeat_step_interval=2": lambda: guarded(linear(), repeat_step_interval=2),
        "2 terms": lambda: guarded(plain, loss_fn=two_terms(plain)),
        "returned 2 terms": lambda: guarded(
            plain, loss_fn=two_terms(plain), micro_batch_size=1, check_split=False
        ),
    }

    def linear_in_linear():
        model = nn.Sequential(linear())
        return DistributedDataParallel(model)

    alone = distributed.new_subgroups(1)[0]
    found = {}
    for name, case in cases.items():
        try:
            case()
        except holdfast.HoldfastError as error:
            found[name] = str(error)
    return list(cases), found


def test_what_ranks_cannot_do_together_is_refused_on_all(tmp_path):
    """Each with its rule, before anything is done that the others would wait for."""
    for names, found in all_returned(run_ranks(refusals, 2, tmp_path)):
        assert list(found) == names
        for name, text in found.items():
            assert name in text
            assert ("H203" if "2 terms" in name else "H108") in text
