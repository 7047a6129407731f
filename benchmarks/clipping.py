"""Clipping: finite gradients whose norm overflows, false alarms in healthy steps, and what clipping
by group changes.

How: seven known sets of finite gradients in two or four groups are clipped to 1 by torch over
everything, by torch for each group, and by holdfast. It is right where each norm that was above the
limit is 1 afterwards, within 1 %. Then random healthy gradients of four types and many sizes go
through `inspect`; each step that it calls overflowed or non-finite would be a false alarm. At last
a small transformer is trained, and at each step the gradient clipped by groups (embedding, blocks,
head) is compared with the one clipped by one norm.

To reach: 7 of 7; no alarm in 100,000 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

from benchmarks.results_file import Result, read_options
from holdfast.numerics.gradients import Group, clip, inspect

_LIMIT = 1.0
_VOCABULARY, _WIDTH, _LENGTH = 32, 32, 24
# All three groups are above the first, and one or two above the second
_TRANSFORMER_LIMITS = (0.05, 0.5)
# Powers of ten of healthy gradients: whose squares fit, and, for fp16, which fit themselves.
_EXPONENTS = {
    torch.float32: (-30, 16),
    torch.bfloat16: (-30, 16),
    torch.float16: (-7, 4),
    torch.float64: (-150, 150),
}


def overflows() -> dict[str, list[list[torch.Tensor]]]:
    """Return sets of finite gradients by name, each as groups of tensors."""
    half, brain = torch.float16, torch.bfloat16
    return {
        "fp32, one element of 2e19": [[torch.tensor([2e19, 1.0])], [torch.ones(100)]],
        "fp32, 1e20 beside ones": [[torch.tensor([1e20, 1.0])], [torch.ones(100)]],
        "fp32, four tensors of 1.8e19": [[torch.tensor([1.8e19])] for _ in range(4)],
        "fp16, 200 elements of 5000": [
            [torch.full((200,), 5000.0, dtype=half)],
            [torch.ones(100, dtype=half)],
        ],
        "fp16, four tensors of norm 4e4": [[torch.full((4,), 2e4, dtype=half)] for _ in range(4)],
        "fp16, 1e6 elements of 100": [
            [torch.full((500_000,), 100.0, dtype=half)] for _ in range(2)
        ],
        "bf16, 1e20 beside ones": [
            [torch.tensor([1e20], dtype=brain)],
            [torch.ones(100, dtype=brain)],
        ],
    }


def clip_as_torch(groups: list[Group]) -> None:
    """Clip by one norm over everything."""
    nn.utils.clip_grad_norm_([p for group in groups for p in group.parameters], _LIMIT)


def clip_each_group(groups: list[Group]) -> None:
    """Clip each group by its own norm."""
    for group in groups:
        nn.utils.clip_grad_norm_(group.parameters, _LIMIT)


def clip_as_holdfast(groups: list[Group]) -> None:
    """Clip by one norm over everything, found by `inspect`."""
    clip(groups, inspect(groups, torch.tensor(1.0))[1], _LIMIT, "global")


METHODS: dict[str, tuple[Callable[[list[Group]], None], bool]] = {
    "torch": (clip_as_torch, False),
    "torch for each group": (clip_each_group, True),
    "holdfast": (clip_as_holdfast, False),
}


def is_clipped_right(gradients: list[list[torch.Tensor]], method: str) -> bool:
    """Tell whether every norm that is clipped is the limit afterwards, within 1 %."""
    act, by_group = METHODS[method]
    groups = _groups(gradients)
    act(groups)
    norms = [_norm([p.grad for p in group.parameters if p.grad is not None]) for group in groups]
    before = [_norm(group) for group in gradients]
    if not by_group:
        norms, before = [math.hypot(*norms)], [math.hypot(*before)]
    return all(
        abs(now - min(was, _LIMIT)) <= 0.01 * _LIMIT for now, was in zip(norms, before, strict=True)
    )


def _groups(gradients: list[list[torch.Tensor]]) -> list[Group]:
    return [
        Group(str(number), "optimizer", [_parameter(g) for g in group])
        for number, group in enumerate(gradients)
    ]


def _parameter(gradient: torch.Tensor) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors))


def false_alarms(steps: int) -> dict[str, int]:
    """Return how many healthy steps of random gradients are called overflowed and non-finite."""
    chance = torch.Generator().manual_seed(1)
    shapes = [(16, 8), (16,), (5,), (4, 4, 3)]
    parameters = {
        kind: [nn.Parameter(torch.zeros(shape, dtype=kind)) for shape in shapes]
        for kind in _EXPONENTS
    }
    kinds = list(_EXPONENTS)
    alarms = {"overflowed": 0, "nonfinite": 0}
    loss = torch.tensor(0.5)
    for step in range(steps):
        # Every fifth step mixes the types.
        chosen = [
            kinds[(step + number * (step % 5 == 0)) % len(kinds)] for number in range(len(shapes))
        ]
        members = [parameters[kind][number] for number, kind in enumerate(chosen)]
        for parameter, share in zip(
            members, torch.rand(len(shapes), generator=chance).tolist(), strict=True
        ):
            least, most = _EXPONENTS[parameter.dtype]
            size = 10 ** (least + share * (most - least))
            values = (
                torch.randn(parameter.shape, generator=chance).clamp_(-6, 6).to(parameter.dtype)
            )
            parameter.grad = values.mul_(size)
        facts, _ = inspect([Group("a", "a", [*members[:2]]), Group("b", "b", [*members[2:]])], loss)
        alarms["overflowed"] += facts.overflowed
        alarms["nonfinite"] += facts.nonfinite
    return alarms


class Transformer(nn.Module):
    """A character model: embedding, two blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, shape ``(batch, length, vocabulary)``, of tokens, shape ``(batch,
        length)``.
        """
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: torch.Tensor = self.head(
            self.blocks(self.embedding(tokens), mask=mask, is_causal=True)
        )
        return logits


def turned_by_groups(steps: int, limit: float) -> tuple[list[float], list[float]]:
    """Return, for each step, the cosine between clipping by group and by one norm, and the ratio
    of the lengths.
    """
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"embedding": model.embedding, "blocks": model.blocks, "head": model.head}
    text = torch.randint(_VOCABULARY, (4096,)).cumsum(0) // 7 % _VOCABULARY  # half predictable
    cosines, lengths = [], []
    for _ in range(steps):
        starts = torch.randint(len(text) - _LENGTH - 1, (16,))
        tokens = torch.stack([text[start : start + _LENGTH + 1] for start in starts])
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        groups = [Group(name, "optimizer", [*part.parameters()]) for name, part in parts.items()]
        gradients = [[p.grad for p in group.parameters if p.grad is not None] for group in groups]
        by_group = _groups(gradients)
        clip(by_group, inspect(by_group, torch.tensor(1.0))[1], limit, "group")
        clip(groups, inspect(groups, torch.tensor(1.0))[1], limit, "global")
        one, other = _flat(groups), _flat(by_group)
        cosines.append(float(F.cosine_similarity(one, other, dim=0)))
        lengths.append(float(other.norm() / one.norm()))
        optimizer.step()
    return cosines, lengths


def _flat(groups: list[Group]) -> torch.Tensor:
    return torch.cat(
        [p.grad.flatten() for group in groups for p in group.parameters if p.grad is not None]
    )


def main() -> None:
    torch.set_num_threads(1)
    options = read_options("clipping", __doc__ or "")
    healthy, trained = (2_000, 20) if options.quick else (100_000, 300)
    parameters: dict[str, Any] = {
        "limit": _LIMIT,
        "healthy_steps": healthy,
        "transformer_steps": trained,
        "seed": 1,
    }
    parameters |= {"transformer_limits": list(_TRANSFORMER_LIMITS)}
    result = Result(options=options, parameters=parameters)
    sets = overflows()
    survived = {
        method: [name for name in sets if is_clipped_right(sets[name], method)]
        for method in METHODS
    }
    for method, names in survived.items():
        reached = len(sets) if method == "holdfast" else None
        result.add_count(
            f"{method}: finite overflows that are clipped right",
            len(names),
            len(sets),
            expected=reached,
        )
    result.samples["clipped right"] = survived
    for alarm, count in false_alarms(healthy).items():
        result.add_count(f"healthy steps that are called {alarm}", count, healthy, expected=0)
    for limit in _TRANSFORMER_LIMITS:
        cosines, lengths = turned_by_groups(trained, limit)
        result.add_samples(
            f"cosine between clipping by group and by one norm, limit {limit:g}", "cosine", cosines
        )
        result.add_samples(
            f"length of a step clipped by group, by one norm = 1, limit {limit:g}", "ratio", lengths
        )
    result.write()


if __name__ == "__main__":
    main()
