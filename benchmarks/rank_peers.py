"""One of two ranks runs out of memory.

What becomes of the training, in others' loops and under a guard.

How: two processes are forked and meet over gloo; they train a small model in
DistributedDataParallel for ten steps. In one step, random, one rank, random, asks for 2**50 bytes,
in forward, in backward or before the optimizer moves a weight, the first time that it comes there.
Loops: a plain one that catches the error, clears the gradients and goes on with the next batch, as
forums advise; the training function under Accelerate's ``find_executable_batch_size``, as its
documentation shows it; and a guard. Composer's automatic micro-batches need a GPU: for them there
is composer#2117.

*Right*: both ranks end with the weights of the undisturbed run, bit for bit. *Other weights*: both
end, with others. *Ranks differ*: both end, and their weights are not the same. *Hangs*: some rank
has not ended after 20 s.

To reach: every run under a guard is right.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.forks import single_threaded
from benchmarks.ranks import on_ranks, refused
from benchmarks.results_file import Result, read_options
from holdfast import Guard

_STEPS, _WIDTH, _SAMPLES, _LIMIT_SECONDS = 10, 16, 8, 20.0
_PHASES = ("forward", "backward", "optimizer")
_Loop = Callable[[int, "Fault", str], nn.Module]
_OUTCOMES = ("right", "other weights", "ranks differ", "ends with an error", "hangs")


class Fault:
    """Refuses memory once: on one rank, in one step, in one phase."""

    def __init__(self, rank: int, phase: str, at: tuple[int, int] | None) -> None:
        self._phase, self._step = phase, at[1] if at is not None and at[0] == rank else -1
        self.step = 0

    def meet(self, phase: str) -> None:
        """Fail if this is the place, the first time."""
        if phase == self._phase and self.step == self._step:
            self._step = -1
            refused()


class Net(nn.Module):
    """Three layers with the places of a fault in them."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self._fault = fault

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        for number, layer in enumerate(self.layers):
            values = torch.tanh(layer(values))
            if number == 1:
                self._fault.meet("forward")
                if values.requires_grad:
                    values.register_hook(lambda _: self._fault.meet("backward"))
        return values


def parts(fault: Fault) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    model = DistributedDataParallel(Net(fault), bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: fault.meet("optimizer"))
    return model, optimizer


def batch_of(rank: int, step: int, samples: int = _SAMPLES) -> torch.Tensor:
    """Return the samples of a rank in a step."""
    return torch.randn(samples, _WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    found: torch.Tensor = (model(batch) - batch.roll(1, 1)).square().mean()
    return found


def plain(rank: int, fault: Fault, _: str) -> nn.Module:
    """Skip the batch that does not fit."""
    model, optimizer = parts(fault)
    for fault.step in range(_STEPS):
        optimizer.zero_grad()
        try:
            loss_of(model, batch_of(rank, fault.step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            optimizer.zero_grad()
    return model


def accelerate(rank: int, fault: Fault, _: str) -> nn.Module:
    """Start the function again with a smaller batch."""
    from accelerate.utils import find_executable_batch_size

    def train(batch_size: int) -> nn.Module:
        model, optimizer = parts(fault)
        for fault.step in range(_STEPS):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank, fault.step, batch_size)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return model

    found: nn.Module = find_executable_batch_size(train, starting_batch_size=_SAMPLES)()
    return found


def guarded(rank: int, fault: Fault, folder: str) -> nn.Module:
    """Step under a guard."""
    model, optimizer = parts(fault)
    loader = [batch_of(rank, step) for step in range(_STEPS)]
    guard = Guard(
        folder, model=model, optimizer=optimizer, loader=loader, recompute=False, diagnose=False
    )
    for fault.step, batch in enumerate(guard.batches(max_epochs=1)):
        guard.step(batch, partial(loss_of, model))
    return model


_LOOPS: dict[str, _Loop] = {
    "plain, the batch skipped": plain,
    "Accelerate": accelerate,
    "holdfast": guarded,
}


def ended(rank: int, loop: _Loop, folder: str, phase: str, at: tuple[int, int] | None) -> Any:
    """Train, and return the weights as bytes."""
    model = loop(rank, Fault(rank, phase, at), folder)
    return b"".join(value.detach().numpy().tobytes() for value in model.parameters())


def outcome(loop: _Loop, phase: str, at: tuple[int, int], right: bytes) -> str:
    """Say what became of one run."""
    run = partial(ended, loop=loop, folder=tempfile.mkdtemp(), phase=phase, at=at)
    fates = on_ranks(run, 2, _LIMIT_SECONDS)
    if any(fate.timed_out for fate in fates):
        return "hangs"
    if any(fate.value is None for fate in fates):
        return "ends with an error"
    weights = {fate.value for fate in fates}
    if len(weights) > 1:
        return "ranks differ"
    return "right" if weights == {right} else "other weights"


def main() -> None:
    single_threaded()
    options = read_options("rank_peers", __doc__ or "")
    runs = 1 if options.quick else 6
    result = Result(options=options, parameters={"steps": _STEPS, "runs of each phase": runs})
    for name, loop in _LOOPS.items():
        for phase in _PHASES:
            chance = random.Random(phase)
            first, _ = on_ranks(
                partial(ended, loop=loop, folder=tempfile.mkdtemp(), phase=phase, at=None), 2
            )
            places = [(chance.randrange(2), chance.randrange(1, _STEPS)) for _ in range(runs)]
            seen = Counter(outcome(loop, phase, at, first.value) for at in places)
            for what in _OUTCOMES:
                if seen[what] or (name, what) == ("holdfast", "right"):
                    expected = runs if name == "holdfast" else None
                    result.add_count(
                        f"{name}, {phase}: {what}", seen[what], runs, expected=expected
                    )
    result.write()


if __name__ == "__main__":
    main()
