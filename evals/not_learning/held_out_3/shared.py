"""What the programs of this set share: twins without the fault, scores, and some more data."""

# ruff: noqa: D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evals.not_learning import parts
from evals.not_learning.program import Programs, adam


class Twins(Programs):
    """Programs that leave a score behind, the higher the better.

    A faulty one can run without its fault.

    Attributes:
        broken: Whether to run with the fault.
        score: What the program reached, on data that it did not train on where the task has such.
    """

    broken = True
    score = need = math.nan

    def end(self, score: float, need: float) -> None:
        """Keep what was reached and what is needed."""
        self.score, self.need = score, need

    def learn_values(self, wrong_copy: bool = False, alias: bool = False) -> None:
        """Learn to walk along a corridor by Q-learning.

        The score is the number of steps, negated.
        """
        world, memory = Corridor(), []
        model = parts.mlp(8, 32, 2)
        target = copy.deepcopy(model)
        optimizer = adam(model, 0.005)
        state, total = world.reset(), 0
        for step in self.watched(range(1500), model, optimizer):
            chance = random.Random(self.seed * 10_000 + step).random()
            with torch.no_grad():
                action = (
                    torch.randint(2, ()).item() if chance < 0.5 else model(state).argmax().item()
                )
            before = state if alias else state.clone()
            state, reward, done = world.step(action)
            memory.append(
                (before, action, reward, state if alias else state.clone(), float(world.at == 7))
            )
            state = world.reset() if done else state
            if step < 200:
                continue
            a, took, gain, b, over = zip(*random.Random(step).sample(memory, 32), strict=True)
            with torch.no_grad():
                aim = torch.tensor(gain) + 0.9 * (1 - torch.tensor(over)) * target(
                    torch.stack(b)
                ).amax(1)
            found = model(torch.stack(a)).gather(1, torch.tensor(took)[:, None])[:, 0]
            self.update(F.smooth_l1_loss(found, aim))
            if step % 50 == 0:
                one, other = (model, target) if wrong_copy else (target, model)
                one.load_state_dict(other.state_dict())
        state, done = world.reset(), False
        while not done:
            with torch.no_grad():
                state, _, done = world.step(model(state).argmax().item())
            total += 1
        self.score = -total


@torch.no_grad()
def outputs(model: nn.Module, *x: Tensor) -> Tensor:
    """Return what a model makes of inputs when it is evaluated; its mode is kept."""
    training = model.training
    model.eval()
    out = model(*x)
    model.train(training)
    return out


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of right classes, which are the last dimension of the outputs."""
    return (outputs(model, x).argmax(-1) == y).float().mean().item()


def r2(found: Tensor, y: Tensor) -> float:
    """Return the share of the variance that predictions explain."""
    return (1 - (found.reshape(y.shape) - y).square().mean() / y.var()).item()


def overlap(found: Tensor, mask: Tensor) -> float:
    """Return the intersection over union of two boolean masks."""
    return ((found & mask).sum() / (found | mask).sum()).item()


def auc(scores: Tensor, y: Tensor) -> float:
    """Return how often a positive one is scored above a negative one."""
    return (scores[y == 1][:, None] > scores[y == 0][None]).float().mean().item()


def distance(a: Tensor, b: Tensor) -> float:
    """Return the energy distance of two samples, 0 if they are of one distribution."""
    return (
        2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()
    ).item()


def matched(model: nn.Module, x: Tensor) -> float:
    """Return how often, of two views of many inputs, those of the same are the most alike."""
    one, two = (outputs(model, x * (torch.rand_like(x) > 0.3)) for _ in range(2))
    one, two = (F.normalize(v - v.mean(0), dim=1) for v in (one, two))
    return ((one @ two.T).argmax(1) == torch.arange(len(x))).float().mean().item()


def rows(n: int, size: int, steps: int) -> Iterator[Tensor]:
    """Yield row numbers of shuffled batches, epoch after epoch."""
    given = 0
    while given < steps:
        for part in torch.randperm(n).split(size):
            if given < steps and (len(part) == size or size > n):
                given += 1
                yield part


def fresh(draw: Callable[[], Any], steps: int) -> Iterator[Any]:
    """Yield what is drawn anew for every step."""
    for _ in range(steps):
        yield draw()


def arrows(count: int, side: int = 10) -> tuple[Tensor, Tensor]:
    """Return noisy images ``(count, 1, side, side)`` of an arrow, and whether it points to the
    right.
    """
    x, y = 0.7 * torch.randn(count, 1, side, side), torch.randint(2, (count,))
    top, left = torch.randint(side - 5, (2, count))
    for i in range(count):
        for k, at in enumerate((0, 1, 2, 1, 0)):
            x[i, 0, top[i] + k, left[i] + (at if y[i] else 4 - at)] += 3
    return x, y


def boxes(count: int, side: int = 12) -> tuple[Tensor, Tensor]:
    """Return noisy images ``(count, side * side)`` of one rectangle and its corners ``(count,
    4)`` in [0, 1].
    """
    low = torch.rand(count, 2) * 0.5
    high = low + 0.2 + 0.3 * torch.rand(count, 2)
    grid = (torch.arange(side) + 0.5) / side
    inside = [(grid > low[:, i, None]) & (grid < high[:, i, None]) for i in (0, 1)]
    image = (inside[1][:, :, None] & inside[0][:, None]).float()
    return (image + 0.2 * torch.randn_like(image)).flatten(1), torch.cat([low, high], 1)


def graph(count: int = 200, groups: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return edges ``(2, e)`` of a graph of communities, weak features ``(count, 16)`` and the
    communities.
    """
    y = torch.randint(groups, (count,))
    edges = (torch.rand(count, count) < torch.where(y[:, None] == y, 0.1, 0.01)).nonzero().T
    return edges, 0.5 * torch.randn(groups, 16)[y] + torch.randn(count, 16), y


def adjacency(edges: Tensor, count: int) -> Tensor:
    """Return the normalised adjacency matrix of some edges, with loops."""
    a = torch.eye(count)
    a[edges[0], edges[1]] = a[edges[1], edges[0]] = 1
    degree = a.sum(1).rsqrt()
    return degree[:, None] * a * degree


def order_task(count: int, length: int = 12, words: int = 8) -> tuple[Tensor, Tensor]:
    """Return sequences in which the words 1 and 2 occur once, and whether 1 comes first."""
    x = torch.randint(3, words, (count, length))
    place = torch.rand(count, length).argsort(1)[:, :2]
    x[torch.arange(count), place[:, 0]], x[torch.arange(count), place[:, 1]] = 1, 2
    return x, (place[:, 0] < place[:, 1]).long()


def causal(length: int) -> Tensor:
    """Return the additive mask that hides what comes later."""
    return torch.full((length, length), float("-inf")).triu(1)


class Words(nn.Module):
    """A small transformer over ids; its head takes the mean over the words, or each of them."""

    def __init__(
        self,
        words: int,
        out: int,
        width: int = 32,
        *,
        pooled: bool = True,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        self.embed, self.place = (
            nn.Embedding(words, width),
            nn.Parameter(0.1 * torch.randn(64, width)),
        )
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=batch_first)
        self.body, self.head, self.pooled = (
            nn.TransformerEncoder(layer, 2),
            nn.Linear(width, out),
            pooled,
        )

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        h = self.body(
            self.embed(ids) + self.place[: ids.shape[1]], mask=mask, src_key_padding_mask=padding
        )
        if padding is not None:
            h = h.masked_fill(padding[..., None], 0.0)
        return self.head(h.mean(1) if self.pooled else h)


class Recurrent(nn.Module):
    """A recurrent network over ids or numbers, with a head on the last state or on each."""

    def __init__(self, body: nn.RNNBase, out: int, words: int = 0, *, last: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, body.input_size) if words else nn.Identity()
        self.body, self.head, self.last = body, nn.Linear(body.hidden_size, out), last

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.embed(x))[0]
        return self.head(h[:, -1] if self.last else h)


class Corridor:
    """A corridor with a reward at its end, at most 30 steps.

    What leads there is 1 in odd cells and 0 in others.
    """

    def __init__(self, cells: int = 8) -> None:
        self.cells, self.at, self.steps = cells, 0, 0
        self.state = torch.zeros(cells)

    def reset(self) -> Tensor:
        self.at = self.steps = 0
        self.state.zero_()[0] = 1
        return self.state

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.at, self.steps = (
            min(max(self.at + (1 if action == self.at % 2 else -1), 0), self.cells - 1),
            self.steps + 1,
        )
        self.state.zero_()[self.at] = 1
        done = self.at == self.cells - 1
        return self.state, float(done), done or self.steps == 30
