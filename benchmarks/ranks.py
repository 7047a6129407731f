"""Several ranks under a guard: failures that they recover from in the step, and what a step costs.

How: two or three processes are forked and meet over gloo, on this machine. *Recovered*: in each run
random ranks run out of memory in random steps, before the model, in a layer's forward, in its
backward or half-way through the optimizer: the allocator refuses 2**50 bytes. A failure counts as
recovered if the run ends, and the weights and moments of all ranks have the bits of the run in
which nothing fails. Models: plain, with BatchNorm, with find_unused_parameters and a layer that not
every rank uses, with a communication hook, and with static_graph (whose first step may not fail),
in DistributedDataParallel each; and sharded by fully_shard, where an optimizer that fails half-way
ends all, so that none does.

*Raises*: one rank raises an error of its own at a random step, in the loss function, in backward,
in the optimizer, in the loader or in the body of the loop. Counted is who ends within 5 s after it,
with its text in the error output.

*Cost*: on each of two ranks a bare and a guarded model train in blocks of 20 steps that take turns,
in an order that is random and the same on both. Compared is the CPU time of all threads of both
processes (user and system), warm: after 500 steps; and in the first 400. Of mlp512 also sharded by
fully_shard.

To reach: 200 of 200 recovered; 50 of 50 end in time with the text; cost at most 1.02 at 10 ms and
1.01 at 50 ms.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.forks import Child, Fate, single_threaded, value_in_a_fork
from benchmarks.results_file import Result, read_options
from benchmarks.step_models import MAX_GRAD_NORM, Job, find_batch_size
from holdfast import Guard

_STEPS, _WIDTH, _SAMPLES, _BLOCK, _FIRST, _WARM_AFTER = 6, 23, 8, 20, 400, 500
_PLACES = ("loss", "backward", "optimizer", "loader", "loop")
_KINDS = ("sharded", "plain", "static", "buffers", "sharded", "unused", "hook")
# By step and rank: the phase that fails, and the layer
_Plan = dict[tuple[int, int], tuple[str, int]]


def start_ranks(function: Callable[[int], Any], world_size: int) -> list[Child]:
    """Call a function with the rank in so many processes that are one group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def joined(rank: int) -> Any:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        distributed.init_process_group("gloo", rank=rank, world_size=world_size)
        found = function(rank)
        distributed.barrier()
        return found

    return [Child(partial(joined, rank)) for rank in range(world_size)]


def on_ranks(
    function: Callable[[int], Any], world_size: int, timeout_seconds: float = 300.0
) -> list[Fate]:
    """Call a function with the rank in so many processes that are one group.

    Return how each has ended.
    """
    children = start_ranks(function, world_size)
    until = time.monotonic() + timeout_seconds
    return [child.finish(max(0.1, until - time.monotonic())) for child in children]


# --- recovery


def refused() -> None:
    """Ask for more memory than there can be."""
    torch.empty(2**50, dtype=torch.uint8)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.fails:
            refused()
        return gradients[0], None


class _Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(_WIDTH) if kind == "buffers" else nn.Dropout(0.1)
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, values: torch.Tensor, fails: tuple[str, int] | None, skips: bool) -> Any:
        for at, layer in enumerate(self.layers):
            if fails == ("forward", at):
                refused()
            if not (skips and at == 1):
                values = _Backward.apply(torch.tanh(layer(values)), fails == ("backward", at))  # type: ignore[no-untyped-call]
        return self.head(self.norm(values))


def trained(rank: int, run: str, kind: str, plan: _Plan) -> list[torch.Tensor]:
    """Return the weights and moments after a run in which this rank fails as planned."""
    torch.manual_seed(0)
    unused = kind == "unused"
    model: nn.Module = _Net(kind)
    if kind == "sharded":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)  # type: ignore[arg-type]
        fully_shard(model)
    else:
        model = DistributedDataParallel(
            model, bucket_cap_mb=0.004, find_unused_parameters=unused, static_graph=kind == "static"
        )
    if kind == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made, step_of_torch = [0], optimizer.step

    def step() -> None:
        if plan.get((made[0], rank), ("", 0))[0] != "optimizer":
            step_of_torch()
            return
        left = [*model.parameters()][3:]
        kept = [parameter.grad for parameter in left]
        for parameter in left:
            parameter.grad = None
        step_of_torch()
        for parameter, gradient in zip(left, kept, strict=True):
            parameter.grad = gradient
        refused()

    optimizer.step = step  # type: ignore[method-assign, assignment]
    seeds = (torch.Generator().manual_seed(7 * number + rank) for number in range(_STEPS))
    loader = [torch.randn(_SAMPLES, _WIDTH, generator=seed) for seed in seeds]
    guard = Guard(
        run,
        model=model,
        optimizer=optimizer,
        loader=loader,
        max_grad_norm=MAX_GRAD_NORM,
        save_interval_steps=None,
        recompute=False,
        check_split=False,
    )
    torch.manual_seed(rank)
    for number, batch in enumerate(guard.batches(max_epochs=1)):
        calls = iter(range(100))

        def loss(
            part: torch.Tensor, number: int = number, calls: Iterator[int] = calls
        ) -> torch.Tensor:
            fails = plan.get((number, rank)) if next(calls) == 0 else None
            if fails == ("early", 0):
                refused()
            output: torch.Tensor = model(part, fails, unused and number % 2 == rank % 2)
            return output.square().mean()

        guard.step(batch, loss)
        made[0] += 1
    guard.close()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    found = [*model.state_dict().values(), *moments]
    return [getattr(value, "to_local", lambda value=value: value)().clone() for value in found]


def any_plan(chance: random.Random, world_size: int, kind: str) -> _Plan:
    """Return failures at random places, of which not all are in the optimizer of one step."""
    phases = [("early", 0), *((when, at) for when in ("forward", "backward") for at in (0, 2, 3))]
    if kind != "sharded":
        phases.append(("optimizer", 0))
    plan = {
        (step, rank): chance.choice(phases)
        for step in range(int(kind == "static"), _STEPS)
        for rank in range(world_size)
        if chance.random() < 0.3
    }
    for step in range(_STEPS):
        if all(plan.get((step, rank), ("", 0))[0] == "optimizer" for rank in range(world_size)):
            del plan[step, 0]
    return plan


def recovered(rank: int, folder: str, kind: str, plans: list[_Plan]) -> list[bool]:
    """Say for each plan whether the run has the bits of the undisturbed one."""
    whole, *others = (
        trained(rank, f"{folder}/{at}", kind, plan) for at, plan in enumerate([{}, *plans])
    )
    return [all(map(torch.equal, whole, found)) for found in others]


def measure_recovery(result: Result, failures: int) -> None:
    chance, count, good = random.Random(0), 0, 0
    phases: dict[str, int] = {}
    kinds: dict[str, list[int]] = {kind: [0, 0] for kind in sorted(set(_KINDS))}
    for kind in itertools.cycle(_KINDS):
        if count >= failures:
            break
        world_size = chance.choice((2, 2, 3))
        plans = [any_plan(chance, world_size, kind) for _ in range(4)]
        run = partial(recovered, folder=tempfile.mkdtemp(), kind=kind, plans=plans)
        fates = on_ranks(run, world_size, 120.0)
        for number, plan in enumerate(plans):
            alike = all(fate.value is not None and fate.value[number] for fate in fates)
            count, good = count + len(plan), good + alike * len(plan)
            kinds[kind][0] += alike * len(plan)
            kinds[kind][1] += len(plan)
            for phase, _ in plan.values():
                phases[phase] = phases.get(phase, 0) + 1
        for fate in fates:
            if fate.value is None:
                result.notes.append(f"{kind}, {world_size} ranks: {fate.how} {fate.error or ''}")
    result.parameters["failures"] = {"all": count, **phases}
    result.add_samples(
        "failures recovered with the bits of the undisturbed run",
        "%",
        [100.0 * good / count],
        digits=2,
    )
    for kind, (of_kind, made) in kinds.items():
        result.add_count(f"failures recovered, {kind}", of_kind, made, expected=made)


# --- errors


def _raise_planted(*_: Any) -> None:
    raise ValueError("planted 4711")


def raising(rank: int, folder: str, kind: str, where: str, who: int, step: int) -> None:
    """Train until one rank raises; never returns."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))
    if kind == "sharded":
        fully_shard(net)
    model = net if kind == "sharded" else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def batches() -> Iterator[torch.Tensor]:
        for number in range(2 * _STEPS):
            if (where, who, step) == ("loader", rank, number):
                _raise_planted()
            yield torch.randn(_SAMPLES, _WIDTH)

    class Batches:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return batches()

    try:
        guard = Guard(
            f"{folder}/run",
            model=model,
            optimizer=optimizer,
            loader=Batches(),
            save_interval_steps=None,
        )
        for number, batch in enumerate(guard.batches(max_epochs=1)):
            planted = where if (who, step) == (rank, number) else ""
            if planted == "loop":
                _raise_planted()
            if planted == "optimizer":
                optimizer.register_step_pre_hook(_raise_planted)

            def loss(part: torch.Tensor, planted: str = planted) -> torch.Tensor:
                output: torch.Tensor = model(part)
                if planted == "loss":
                    _raise_planted()
                if planted == "backward":
                    output.register_hook(_raise_planted)
                return output.square().mean()

            guard.step(batch, loss)
    except BaseException as error:  # noqa: BLE001 - as an interpreter ends
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def measure_raises(result: Result, count: int) -> None:
    chance, in_time, with_text = random.Random(1), 0, 0
    seconds = []
    for number in range(count):
        world_size, folder = chance.choice((2, 3)), tempfile.mkdtemp()
        kind, where = chance.choice(("replicated", "sharded")), _PLACES[number % len(_PLACES)]
        who, step = chance.randrange(world_size), chance.randrange(2 * _STEPS)
        run = partial(raising, folder=folder, kind=kind, where=where, who=who, step=step)
        children, ended = start_ranks(run, world_size), dict[int, float]()
        until = time.monotonic() + 60.0
        while len(ended) < world_size and time.monotonic() < until:
            for rank, child in enumerate(children):
                if rank not in ended and child.has_ended:
                    ended[rank] = time.monotonic()
            time.sleep(0.005)
        for child in children:
            child.finish(0.1)
        texts = [Path(folder, str(rank)).read_text(errors="replace") for rank in range(world_size)]
        late = max(ended.values()) - min(ended.values()) if len(ended) == world_size else 60.0
        seconds.append(late)
        in_time += late <= 5.0
        with_text += all("planted 4711" in text for text in texts)
        if late > 5.0 or not all("planted 4711" in text for text in texts):
            result.notes.append(
                f"raised in {where}, {kind}, step {step}, rank {who} of {world_size}: {late:.1f} s"
            )
    result.add_samples("a rank raises: until the last one has ended", "s", seconds)
    result.add_count("a rank raises: all have ended within 5 s", in_time, count, expected=count)
    result.add_count("a rank raises: its text on all ranks", with_text, count, expected=count)


# --- cost


def in_turns(
    _: int, folder: str, kind: str, size: int, pairs: int, seed: int, sharded: bool
) -> tuple[list[Any], list[Any]]:
    """Return the CPU seconds of a step, bare and guarded, of the first steps and of the warm
    ones.
    """
    runs: dict[str, Callable[[Any], Any]] = {}
    batches: dict[str, Iterator[Any]] = {}
    for name in ("bare", "guarded") if seed % 2 else ("guarded", "bare"):
        job = Job(kind, size)
        loader = [job.batch] * 100_000
        if sharded:
            for layer in job.model.children():
                if [*layer.parameters()]:
                    fully_shard(layer)
            fully_shard(job.model)
            job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
        else:
            job.model = DistributedDataParallel(job.model)
        if name == "bare":
            runs[name], batches[name] = job.bare_step, iter(loader)
        else:
            guard = Guard(
                folder,
                model=job.model,
                optimizer=job.optimizer,
                loader=loader,
                max_grad_norm=MAX_GRAD_NORM,
            )
            runs[name], batches[name] = (
                partial(guard.step, loss_fn=job.loss),
                guard.batches(max_steps=100_000),
            )
    chance, found = random.Random(seed), []
    for _ in range(max(_FIRST, _WARM_AFTER) // _BLOCK + pairs):
        pair = {}
        for name in chance.sample(("bare", "guarded"), 2):
            started = time.process_time()
            for _ in range(_BLOCK):
                runs[name](next(batches[name]))
            pair[name] = (time.process_time() - started) / _BLOCK
        found.append((pair["bare"], pair["guarded"]))
    return found[: _FIRST // _BLOCK], found[_WARM_AFTER // _BLOCK :]


def measure_cost(result: Result, *, quick: bool) -> None:
    cases = (
        ("mlp512", 10.0, 1.02, False),
        ("conv", 50.0, 1.01, False),
        ("mlp512", 10.0, 1.02, True),
    )
    for kind, milliseconds, most, sharded in cases:
        size = value_in_a_fork(partial(find_batch_size, kind, milliseconds), kind).batch_size
        first, warm, bare = [], [], []
        for seed in range(1 if quick or sharded else 2):
            run = partial(
                in_turns,
                folder=tempfile.mkdtemp(),
                kind=kind,
                size=size,
                pairs=3 if quick else 20,
                seed=seed,
                sharded=sharded,
            )
            fates = on_ranks(run, 2, 600.0)
            if any(fate.value is None for fate in fates):
                raise RuntimeError(f"{kind}: {[fate.error or fate.how for fate in fates]}")
            of_first, of_warm = (
                list(zip(*(fate.value[when] for fate in fates), strict=True)) for when in (0, 1)
            )
            sums = [sum(pair[which] for ranks in of_first for pair in ranks) for which in (0, 1)]
            first.append(sums[1] / sums[0])
            warm += [
                sum(pair[1] for pair in ranks) / sum(pair[0] for pair in ranks) for ranks in of_warm
            ]
            bare += [1000 * pair[0] for ranks in of_warm for pair in ranks]
        name = (
            f"{kind}{', sharded' if sharded else ''}, two ranks, {statistics.median(bare):.1f} ms a"
            " step of a rank"
        )
        result.add_samples(
            f"{name}, first 400 steps: CPU time of guarded over bare", "ratio", first
        )
        result.add_samples(
            f"{name}, warm: CPU time of guarded over bare", "ratio", warm, at_most=most
        )


def main() -> None:
    single_threaded()
    options = read_options("ranks", __doc__ or "")
    result = Result(options=options, parameters={"steps": _STEPS, "block": _BLOCK})
    measure_recovery(result, 20 if options.quick else 200)
    measure_raises(result, 5 if options.quick else 50)
    measure_cost(result, quick=options.quick)
    result.write()


if __name__ == "__main__":
    main()
