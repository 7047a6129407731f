"""Advice that is passed on about training, and what comes of it when it is measured.

How: each claim is tried as it is given, beside what it is said to be better than or equal to, on
small models with several seeds. The verdict follows from the figures: nobody types it. Memory is
the peak that the kernel counts in a forked child; times are CPU times of both sides in turns, but
for the loaders, which wait by design.

A full run also writes the table of docs/folklore.md.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import timeit
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from benchmarks.clipping import METHODS, is_clipped_right, overflows
from benchmarks.forks import Child, single_threaded
from benchmarks.process_memory import peak_bytes, reset_peak, resident_bytes
from benchmarks.results_file import Result, read_options
from holdfast.memory.host_memory import set_malloc_threshold

PAGE = Path(__file__).parent.parent / "docs" / "folklore.md"
_BLOCK = re.compile(r"(?<=<!-- table -->\n).*?(?=\n<!-- end of table -->)", re.DOTALL)
_K = 4  # accumulation is doubled twice
_REPEATS = 8  # of the same batch
_WORKERS = (0, 1, 2, 4, 8)

Figures = dict[str, dict[str, Any]]


_RULES = {"rate / 4": 1 / _K, "same rate": 1.0, "rate x 2": _K**0.5, "rate x 4": float(_K)}
_OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "SGD": lambda parameters, factor: torch.optim.SGD(parameters, lr=0.05 * factor),
    "Adam": lambda parameters, factor: torch.optim.Adam(parameters, lr=1e-3 * factor),
}


def _classes(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 2048 points, shape ``(2048, 16)``, and their noisy labels among 4."""
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2048, 16, generator=chance)
    labels = (inputs @ torch.randn(16, 4, generator=chance)).argmax(dim=1)
    wrong = torch.rand(2048, generator=chance) < 0.1
    return inputs, torch.where(wrong, torch.randint(4, (2048,), generator=chance), labels)


def final_loss(name: str, factor: float, accumulate: int, seed: int) -> float:
    """Train on the same samples in the same order, and return the loss over all of them."""
    torch.manual_seed(seed)
    inputs, labels = _classes(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = _OPTIMIZERS[name](model.parameters(), factor)
    order = torch.split(torch.cat([torch.randperm(2048) for _ in range(3)]), 8)
    for number, chosen in enumerate(order, start=1):
        (F.cross_entropy(model(inputs[chosen]), labels[chosen]) / accumulate).backward()  # type: ignore[no-untyped-call]
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float(F.cross_entropy(model(inputs), labels))


def measure_rates(result: Result, seeds: int) -> None:
    for name in _OPTIMIZERS:
        before = [final_loss(name, 1.0, 1, seed) for seed in range(seeds)]
        for rule, factor in _RULES.items():
            after = [final_loss(name, factor, _K, seed) for seed in range(seeds)]
            ratios = [new / old for new, old in zip(after, before, strict=True)]
            result.add_samples(
                f"{name}, 4 x the accumulation, {rule}: final loss, before = 1", "ratio", ratios
            )


def _plain(model: nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()  # type: ignore[no-any-return]


def _around_everything(model: nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(partial(_plain, model), inputs, use_reentrant=False)  # type: ignore[no-any-return]


def _around_each_block(model: nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
    for block in model:
        inputs = checkpoint(block, inputs, use_reentrant=False)
    return inputs.square().mean()


_CHECKPOINTS = {"no": _plain, "one": _around_everything, "one for each block": _around_each_block}


def peak_of_step(kind: str) -> tuple[int, float]:
    """Return the bytes that a forward and backward add at their peak, and their CPU seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    inputs = torch.randn(100_000, 64)
    _CHECKPOINTS[kind](model, inputs[:10]).backward()  # type: ignore[no-untyped-call]
    reset_peak()
    before, started = resident_bytes(), time.process_time()
    _CHECKPOINTS[kind](model, inputs).backward()  # type: ignore[no-untyped-call]
    return peak_bytes() - before, time.process_time() - started


def measure_checkpoints(result: Result, repeats: int) -> None:
    found: dict[str, list[tuple[int, float]]] = {kind: [] for kind in _CHECKPOINTS}
    for _ in range(repeats):
        for kind in _CHECKPOINTS:
            fate = Child(partial(peak_of_step, kind)).finish()
            if fate.value is None:
                raise RuntimeError(f"checkpoint {kind}: {fate.error or fate.how}")
            found[kind].append(fate.value)
    for kind, rows in found.items():
        peaks = [peak / plain for (peak, _), (plain, _) in zip(rows, found["no"], strict=True)]
        times = [
            seconds / plain for (_, seconds), (_, plain) in zip(rows, found["no"], strict=True)
        ]
        if kind == "no":
            result.add_samples(
                "no checkpoint: peak memory of a step", "MiB", [peak / 2**20 for peak, _ in rows]
            )
        else:
            result.add_samples(f"{kind} checkpoint: peak memory, without = 1", "ratio", peaks)
            result.add_samples(f"{kind} checkpoint: CPU time, without = 1", "ratio", times)


def measure_same_batch(result: Result, seeds: int) -> None:
    same_noise, true_noise, difference, cost = [], [], [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        inputs, labels = _classes(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        whole = _gradient(model, [(inputs, labels)])
        batches = [
            (inputs[chosen], labels[chosen])
            for chosen in torch.split(torch.randperm(2048), 16)[:_REPEATS]
        ]
        first = _gradient(model, batches[:1])
        repeated = _gradient(model, batches[:1] * _REPEATS)
        difference.append(float((repeated - first).norm() / first.norm()))
        same_noise.append(float((repeated - whole).square().sum()))
        true_noise.append(float((_gradient(model, batches) - whole).square().sum()))
        cost.append(_cpu_seconds(model, batches[:1] * _REPEATS) / _cpu_seconds(model, batches[:1]))
    name = f"the same batch {_REPEATS} times"
    result.add_samples(f"{name}: difference from running it once", "relative", difference, digits=9)
    noise = [statistics.fmean(same_noise) / statistics.fmean(true_noise)]
    result.add_samples(f"{name}: noise of the gradient, {_REPEATS} batches = 1", "ratio", noise)
    result.add_samples(f"{name}: CPU time, once = 1", "ratio", cost)


def _gradient(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the accumulated gradient of the mean over the batches, flat."""
    model.zero_grad()
    for inputs, labels in batches:
        (F.cross_entropy(model(inputs), labels) / len(batches)).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _cpu_seconds(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return timeit.timeit(lambda: _gradient(model, batches), timer=time.process_time, number=20)


class Samples(Dataset[torch.Tensor]):
    """Samples that lie in memory, or for which one waits 2 ms, as for a disk or a network."""

    def __init__(self, kind: str, count: int) -> None:
        self._kind, self._count = kind, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._kind == "waiting":
            time.sleep(0.002)
        return torch.full((16,), float(index))


def _epoch_seconds(kind: str, workers: int) -> float:
    started = time.perf_counter()
    sum(1 for _ in DataLoader(Samples(kind, 512), batch_size=16, num_workers=workers))
    return time.perf_counter() - started


def measure_workers(result: Result, repeats: int) -> None:
    # More workers than cores: on purpose
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    (inside,) = DataLoader(
        Samples("in memory", 1), num_workers=1, collate_fn=lambda _: torch.get_num_threads()
    )
    code = "import torch; print(torch.get_num_threads())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun starts its own
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True
    )
    counts = [int(run.stdout), inside]
    result.add_samples("get_num_threads() under torchrun, and in a worker", "workers", counts)
    for kind in ("in memory", "waiting"):
        seconds: dict[int, list[float]] = {workers: [] for workers in _WORKERS}
        for _ in range(repeats):
            for workers in random.Random(1).sample(_WORKERS, len(_WORKERS)):
                seconds[workers].append(_epoch_seconds(kind, workers))
        medians = {workers: statistics.median(found) for workers, found in seconds.items()}
        best = min(medians, key=medians.__getitem__)
        result.samples[f"{kind} data: seconds of an epoch by num_workers"] = seconds
        result.add_samples(f"{kind} data: best num_workers of {_WORKERS}", "workers", [best])
        asked = [one / least for one, least in zip(seconds[1], seconds[best], strict=True)]
        result.add_samples(f"{kind} data: time with num_workers=1, best = 1", "ratio", asked)


def loss_after_clipping(limit: float | None, seed: int) -> float:
    """Return the loss of a regression after 30 clipped steps, at the start = 1."""
    torch.manual_seed(seed)
    model = nn.Linear(8, 1)
    inputs = torch.randn(64, 8)
    targets = inputs @ torch.randn(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(31):
        loss = F.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    return losses[-1] / losses[0]


def measure_clipping(result: Result, seeds: int) -> None:
    sets = overflows()
    for method in METHODS:
        right = sum(is_clipped_right(gradients, method) for gradients in sets.values())
        result.add_count(f"{method}: finite overflows that are clipped right", right, len(sets))
    for limit in (None, 5.0, -1.0, 0.0):
        ratios = [loss_after_clipping(limit, seed) for seed in range(seeds)]
        shown = "off" if limit is None else f"limit {limit:g}"
        result.add_samples(f"{shown}: loss after 30 steps, start = 1", "ratio", ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A piece of advice, the figures beside it with their names in the table, its test, and what
    to do instead.
    """

    claim: str
    shown: tuple[tuple[str, str], ...]
    holds: Callable[[Figures], bool] | None
    instead: str


def _value(figures: Figures, what: str) -> float:
    value: float = figures[what]["value"]
    return value


def _halving_is_closest(figures: Figures) -> bool:
    def distance(name: str, rule: str) -> float:
        return abs(
            _value(figures, f"{name}, 4 x the accumulation, {rule}: final loss, before = 1") - 1
        )

    return all(min(_RULES, key=partial(distance, name)) == "rate / 4" for name in _OPTIMIZERS)


def _rule_finds_the_best(figures: Figures) -> bool:
    asked = _value(figures, _THREADS)
    return all(
        _value(figures, f"{kind} data: best num_workers of {_WORKERS}") == asked for kind in _DATA
    )


_DATA = ("in memory", "waiting")
_ONE = "time with 1 worker beside the best"
_THREADS = "get_num_threads() under torchrun, and in a worker"
_SAME = f"the same batch {_REPEATS} times"
_RIGHT = "finite overflows that are clipped right"
_AFTER = "loss after 30 steps, start = 1"

CLAIMS = (
    Claim(
        claim="Halve the learning rate when accumulation doubles",
        shown=tuple(
            (
                f"{name}, 4 x the accumulation, {rule}: final loss, before = 1",
                f"{name} with {rule}: final loss x",
            )
            for name in _OPTIMIZERS
            for rule in _RULES
        ),
        holds=_halving_is_closest,
        instead=(
            "With a mean loss: linear for SGD, square root for Adam, and no change where only the"
            " pieces change (`holdfast.advise_learning_rate`)"
        ),
    ),
    Claim(
        claim="`torch.cuda.empty_cache()` prevents out-of-memory",
        shown=(),
        holds=None,
        instead="Let go of the tensors: the cache that it gives back is used by PyTorch anyway",
    ),
    Claim(
        claim="One `checkpoint()` around the whole loss saves memory",
        shown=(
            ("one checkpoint: peak memory, without = 1", "one: peak memory x"),
            ("one checkpoint: CPU time, without = 1", "one: CPU time x"),
            (
                "one for each block checkpoint: peak memory, without = 1",
                "one for each block: peak memory x",
            ),
            (
                "one for each block checkpoint: CPU time, without = 1",
                "one for each block: CPU time x",
            ),
        ),
        holds=lambda figures: _value(figures, "one checkpoint: peak memory, without = 1") < 0.9,
        instead="One for each block: the backward of a segment needs all its activations at once",
    ),
    Claim(
        claim="Accumulate by running the same batch N times",
        shown=(
            (f"{_SAME}: difference from running it once", "gradient differs from one pass by"),
            (f"{_SAME}: noise of the gradient, {_REPEATS} batches = 1", "noise beside N batches x"),
            (f"{_SAME}: CPU time, once = 1", "CPU time beside one pass x"),
        ),
        holds=lambda figures: (
            _value(figures, f"{_SAME}: noise of the gradient, {_REPEATS} batches = 1") < 1.5
        ),
        instead="Run N batches, or split one",
    ),
    Claim(
        claim="`num_workers = torch.get_num_threads()`",
        shown=(
            (_THREADS, "the rule gives"),
            *(
                (f"{kind} data: best num_workers of {_WORKERS}", f"best for {kind} data")
                for kind in _DATA
            ),
            *(
                (f"{kind} data: time with num_workers=1, best = 1", f"{_ONE}, {kind} data, x")
                for kind in _DATA
            ),
        ),
        holds=_rule_finds_the_best,
        instead=(
            "Measure with your own data; the cores that the process may use are a limit for data"
            " that computes"
        ),
    ),
    Claim(
        claim="Clip each parameter group by itself to avoid overflow",
        shown=tuple((f"{method}: {_RIGHT}", f"{method}: right in") for method in METHODS),
        holds=lambda figures: _value(figures, f"torch for each group: {_RIGHT}") == 7,
        instead="A norm that does not overflow; clip by group only if you want another algorithm",
    ),
    Claim(
        claim="Clip to a negative number to turn clipping off",
        shown=tuple(
            (f"{each}: {_AFTER}", f"{each}: loss x")
            for each in ("off", "limit 5", "limit -1", "limit 0")
        ),
        holds=lambda figures: (
            _value(figures, f"limit -1: {_AFTER}") < 1.1 * _value(figures, f"off: {_AFTER}")
        ),
        instead="`max_grad_norm=None`; a negative limit climbs the gradient, and 0 stops training",
    ),
)


def table(result: dict[str, Any]) -> str:
    """Return the Markdown table of a result file's content."""
    figures: Figures = {figure["what"]: figure for figure in result["figures"]}
    lines = ["| claim | verdict | measured | instead |", "|---|---|---|---|"]
    for claim in CLAIMS:
        if claim.holds is None:
            verdict, measured = (
                "not measured here",
                "needs a CUDA device; see below for what is documented",
            )
        else:
            verdict = "true" if claim.holds(figures) else "false"
            measured = "; ".join(f"{name} {_shown(figures[what])}" for what, name in claim.shown)
        lines.append(f"| {claim.claim} | {verdict} | {measured} | {claim.instead} |")
    return "\n".join(lines)


def _shown(figure: dict[str, Any]) -> str:
    forms = {"count": "{value:g} of {samples}", "workers": "{value:g}"}
    return forms.get(figure["unit"], "{value:#.3g}").format(**figure)


def main() -> None:
    single_threaded()
    # What is freed is given back, so that the kernel counts what is used
    set_malloc_threshold(4 * 2**20)
    options = read_options("folklore", __doc__ or "")
    seeds, repeats = (2, 1) if options.quick else (10, 5)
    parameters = {"seeds": seeds, "repeats": repeats, "accumulation": _K, "same_batch": _REPEATS}
    result = Result(options=options, parameters=parameters)
    measure_rates(result, seeds)
    measure_checkpoints(result, repeats)
    measure_same_batch(result, seeds)
    measure_workers(result, repeats)
    measure_clipping(result, seeds)
    result.write()
    found = table(json.loads(options.out.read_text()))
    if options.quick:
        print(found)
    else:
        PAGE.write_text(_BLOCK.sub(lambda _: found, PAGE.read_text()))


if __name__ == "__main__":
    main()
