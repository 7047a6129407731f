"""Accumulation: how far the gradient of a split batch is from that of the whole, for ragged data
and coupled losses.

How: `Guard.step` with a micro-batch size, on a recurrent language model whose mean is over tokens,
in batches of 32 sequences of four kinds of length, in 2 to 32 parts; the optimizer notes the
gradient that it is given. The figure is the L2 norm of the difference, relative to the gradient of
one plain pass. The loss is declared, by ``Loss(mean, items)``, or bare, so that the split check has
to find out what it is a mean over. Beside it the usual loop: each part's mean, divided by the
number of parts. Then losses that compare samples, as `TwoPass`, beside the same usual loop.

To reach: <= 1e-12 in fp64, <= 1e-5 in fp32, in every case.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.forks import single_threaded
from benchmarks.results_file import Result, read_options
from holdfast import Guard, Loss
from holdfast.guard.splitting.two_pass import TwoPass

_SAMPLES, _LONGEST, _WORDS, _WIDTH = 32, 64, 50, 24
_LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


class Noting(torch.optim.SGD):
    """Notes the gradient that it is given, and moves nothing."""

    noted: torch.Tensor | None = None

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as torch calls it
        """Note the gradient."""
        self.noted = flat(p for group in self.param_groups for p in group["params"])


class LanguageModel(nn.Module):
    """Predicts a word from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.cell = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.out = nn.Linear(_WIDTH, _WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.out(self.cell(self.words(words))[0])


class Encoder(nn.Module):
    """Embeds samples; its scale is used by one loss only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 8))
        self.log_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.body(x)


def lengths_of(kind: str, generator: torch.Generator) -> torch.Tensor:
    """Return the lengths of 32 sequences, at most 64."""
    if kind == "equal":
        return torch.full((_SAMPLES,), _LONGEST // 2)
    if kind == "log-normal":
        return torch.randn(_SAMPLES, generator=generator).add(2.5).exp().clamp(1, _LONGEST).long()
    found = torch.randint(1, _LONGEST + 1, (_SAMPLES,), generator=generator)
    if kind == "2 of 32 empty":
        found[[5, 20]] = 0
    return found


def token_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).mT, batch[1])


def contrast(model: Any, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    left, right = functional.normalize(outputs, dim=1), functional.normalize(batch[1], dim=1)
    return functional.cross_entropy(left @ right.T * model.log_scale.exp(), torch.arange(len(left)))


def root_of_mean(_: Any, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[1]).square().mean().sqrt()


def soft_dice(_: Any, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    found, wanted = outputs.sigmoid(), (batch[1] > 0).to(outputs.dtype)
    return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


def variance(_: Any, outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return functional.relu(1 - (outputs.var(dim=0) + 1e-4).sqrt()).mean()


def balance_of_experts(_: Any, outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    chances = outputs.softmax(dim=1)
    share = functional.one_hot(chances.argmax(dim=1), 8).to(outputs.dtype).mean(dim=0)
    return 8 * (share * chances.mean(dim=0)).sum()


def hard_triplets(_: Any, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    kinds = (batch[2]).unsqueeze(0)
    same, apart = kinds == kinds.T, torch.cdist(outputs, outputs)
    return functional.relu(
        apart.where(same, -1.0).amax(1) - apart.where(~same, 1e9).amin(1) + 0.5
    ).mean()


COUPLED = [contrast, root_of_mean, soft_dice, variance, balance_of_experts, hard_triplets]


def flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
    )


def split_gradient(
    model: nn.Module, batch: Any, loss: Callable[[Any], Any], parts: int
) -> torch.Tensor:
    """Return the gradient that the optimizer is given when `Guard.step` cuts a batch into so
    many parts.
    """
    optimizer = Noting(model.parameters(), lr=0.1)
    model.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        guard = Guard(
            Path(folder) / "run",
            model=model,
            optimizer=optimizer,
            save_interval_steps=None,
            micro_batch_size=math.ceil(_SAMPLES / parts),
        )
        with guard:
            guard.step(batch, loss)
    assert optimizer.noted is not None
    return optimizer.noted


def usual_gradient(
    model: nn.Module, batch: Any, loss: Callable[[Any], Any], parts: int
) -> torch.Tensor:
    """Return the mean of the gradients of the parts."""
    model.zero_grad()
    pieces = list(
        zip(*(tensor.split(math.ceil(_SAMPLES / parts)) for tensor in batch), strict=True)
    )
    for piece in pieces:
        (loss(piece) / len(pieces)).backward()
    return flat(model.parameters())


def away(found: torch.Tensor, whole: torch.Tensor) -> float:
    return float((found - whole).norm() / whole.norm())


Losses = dict[str, Callable[[Any], Any]]
Case = tuple[nn.Module, Any, Losses]


def ragged(dtype: torch.dtype, kind: str) -> Case:
    """Return a model, a batch with one distribution of lengths, and its losses."""
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(1)
    model = LanguageModel().to(dtype)
    lengths = lengths_of(kind, generator)
    words = torch.randint(1, _WORDS, (_SAMPLES, _LONGEST), generator=generator)
    targets = torch.randint(1, _WORDS, (_SAMPLES, _LONGEST), generator=generator)
    batch = words, targets.masked_fill(torch.arange(_LONGEST) >= lengths.unsqueeze(1), -100)
    return (
        model,
        batch,
        {
            f"{kind}, bare": lambda part: token_mean(model, part),
            f"{kind}, declared": lambda part: Loss(
                token_mean(model, part), (part[1] != -100).sum()
            ),
        },
    )


def coupled(dtype: torch.dtype, loss: Callable[..., torch.Tensor]) -> Case:
    """Return a model, a batch, and one loss that compares samples."""
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(1)
    model = Encoder().to(dtype)
    features = torch.randn(_SAMPLES, 12, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randn(_SAMPLES, 8, generator=generator, dtype=torch.float64).to(dtype)
    batch = features, targets, torch.arange(_SAMPLES) % 4
    two_pass = TwoPass(lambda part: model(part[0]), lambda found, given: loss(model, found, given))
    return model, batch, {loss.__name__.replace("_", " "): two_pass}


def measure(result: Result, parts: list[int], dtype: torch.dtype, case: Case) -> list[bool]:
    """Add the errors of splits and of the usual loop.

    Return for each split whether it is within the limit.
    """
    model, batch, losses = case
    plain = next(iter(losses.values()))
    model.zero_grad()
    plain(batch).backward()
    whole, within = flat(model.parameters()), []
    usual = [away(usual_gradient(model, batch, plain, number), whole) for number in parts]
    for name, loss in losses.items():
        errors = [away(split_gradient(model, batch, loss, number), whole) for number in parts]
        within += [error <= _LIMITS[dtype] for error in errors]  # NaN is beyond
        named = f"{name}, {str(dtype).removeprefix('torch.')}"
        result.add_samples(f"{named}: split", "relative L2 error", errors, digits=20)
        finite = [error for error in usual if math.isfinite(error)]
        if dtype == torch.float64:
            result.add_samples(f"{named}: mean of means", "relative L2 error", finite, digits=4)
            if len(finite) < len(usual):
                result.notes.append(
                    f"{named}: mean of means: NaN in {len(usual) - len(finite)} of {len(usual)}"
                )
    return within


def main() -> None:
    single_threaded()
    options = read_options("accumulation", __doc__ or "")
    parts = [2, 8, 32] if options.quick else [2, 3, 4, 5, 6, 7, 8, 11, 16, 32]
    parameters = {
        "samples": _SAMPLES,
        "longest": _LONGEST,
        "parts": parts,
        "parts_in_fp32": [2, 8, 32],
        "seed": 7,
    }
    result = Result(options=options, parameters=parameters)
    for dtype, numbers in ((torch.float64, parts), (torch.float32, [2, 8, 32])):
        cases = [
            ragged(dtype, kind) for kind in ("equal", "uniform 1-64", "log-normal", "2 of 32 empty")
        ]
        cases += [coupled(dtype, loss) for loss in COUPLED]
        within = [good for case in cases for good in measure(result, numbers, dtype, case)]
        what = (
            f"splits in {str(dtype).removeprefix('torch.')} with an error of at most"
            f" {_LIMITS[dtype]:g}"
        )
        result.add_count(what, sum(within), len(within), expected=len(within))
    result.notes.append("samples are in the order of the numbers of parts; no timings")
    result.write()


if __name__ == "__main__":
    main()
