"""What a program of the corpus is, and the loop that most of them share.

A set of programs is a class, a program is one of its methods: it builds data and model, trains them
under the watch, and is nothing but what is wrong with it, or unusual about it. It takes some four
seconds of one core at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

Watch = Callable[..., Any]
"""`holdfast.watch`, or what stands in for it."""
Train = Callable[[Any], None]


def healthy(train: Train) -> Train:
    """Mark a method as a program with which nothing is wrong."""
    train.causes = train.shows = None  # type: ignore[attr-defined]
    return train


def faulty(causes: str, shows: str = "") -> Callable[[Train], Train]:
    """Mark a method as a program with a planted fault.

    Args:
        causes: Ids of the rules that name what is wrong, such as ``"H836 H838"``; empty where no
            rule can.
        shows: Ids of its legitimate symptoms; empty where training shows nothing of it.
    """

    def mark(train: Train) -> Train:
        train.causes, train.shows = tuple(causes.split()), tuple(shows.split())  # type: ignore[attr-defined]
        return train

    return mark


class Programs:
    """Some programs; made anew for each run of one.

    Args:
        watch: What observes the loop.
        seed: Of the data, and of torch's generator, which is seeded before a program starts.
    """

    def __init__(self, watch: Watch, seed: int) -> None:
        self.watch, self.seed = watch, seed
        self.watching: Any = None
        self.optimizer: Any = None

    def watched(
        self, steps: Iterable[Any], model: Any, optimizer: Any, **options: Any
    ) -> Iterator[Any]:
        """Yield from an iterable inside ``watch(model, optimizer, **options)``."""
        self.optimizer, self.watching = optimizer, self.watch(model, optimizer, **options)
        with self.watching:
            yield from steps

    def update(self, loss: Tensor, *, clip: float | None = None) -> Tensor:
        """Make a step of the watched optimizer, and return the loss."""
        return update(self.optimizer, loss, clip=clip)

    def descend(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        batches: Iterable[Any],
        loss: Callable[..., Tensor],
        *,
        clip: float | None = None,
        **options: Any,
    ) -> None:
        """Watch an ordinary loop.

        A step for each batch, whose parts are the arguments of the loss.
        """
        for batch in self.watched(batches, model, optimizer, **options):
            self.update(loss(*batch) if isinstance(batch, tuple | list) else loss(batch), clip=clip)
            if "scheduler" in options:
                options["scheduler"].step()

    def fit(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        batches: Iterable[Any],
        loss: Callable[..., Tensor],
        **options: Any,
    ) -> None:
        """Watch an ordinary loop over pairs of input and target."""
        self.descend(model, optimizer, batches, lambda x, y: loss(model(x), y), **options)


def update(optimizer: optim.Optimizer, loss: Tensor, *, clip: float | None = None) -> Tensor:
    """Clear the gradients, go back from a loss, clip the norm if asked, and step.

    Return the loss.
    """
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], clip
        )
    optimizer.step()
    return loss


def sgd(model: nn.Module, lr: float, **options: Any) -> optim.SGD:
    """Return SGD for all parameters of a model."""
    return optim.SGD(model.parameters(), lr=lr, **options)


def adam(model: nn.Module, lr: float, **options: Any) -> optim.Adam:
    """Return Adam for all parameters of a model."""
    return optim.Adam(model.parameters(), lr=lr, **options)


def adamw(model: nn.Module, lr: float, **options: Any) -> optim.AdamW:
    """Return AdamW for all parameters of a model."""
    return optim.AdamW(model.parameters(), lr=lr, **options)


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, rate: float) -> None:
    """Pull the weights of a slow copy towards those of a model."""
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program, with what is wrong with it.

    Args:
        name: Of the program, unique in its set.
        of: The class whose method it is.
        healthy: Whether nothing is wrong with it.
        causes: Ids of the rules that name what is wrong.
        detects: Ids of the rules that are right here: the causes and their legitimate symptoms.
    """

    name: str
    of: type[Programs]
    healthy: bool
    causes: tuple[str, ...]
    detects: tuple[str, ...]

    def train(self, watch: Watch, seed: int) -> None:
        """Run it once."""
        torch.manual_seed(seed)
        getattr(self.of(watch, seed), self.name)()


def programs_in(sets: Iterable[type[Programs]]) -> list[Program]:
    """Return the programs of some classes, the healthy ones first.

    Raises:
        ValueError: If a name occurs twice.
    """
    found: dict[str, Program] = {}
    for of in sets:
        for name, train in vars(of).items():
            if hasattr(train, "causes"):
                causes, shows = train.causes or (), train.shows or ()
                program = Program(
                    name=name,
                    of=of,
                    healthy=train.causes is None,
                    causes=causes,
                    detects=(*causes, *shows),
                )
                if name in found:
                    raise ValueError(f"{name} occurs twice")
                found[name] = program
    return sorted(found.values(), key=lambda program: not program.healthy)
