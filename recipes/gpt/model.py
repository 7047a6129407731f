"""A decoder as GPT-2's.

LayerNorm before attention and MLP, learnt positions, the embedding also as output.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name


class Block(nn.Module):
    """Causal attention and an MLP, each added to what comes in; shape ``(batch, time, width)``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next block is given."""
        batch, time, width = x.shape
        parts = self.attend(self.before_attention(x)).view(
            batch, time, 3, self.heads, width // self.heads
        )
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(
            self.project(seen.transpose(1, 2).reshape(x.shape)), self.dropout, self.training
        )
        return x + F.dropout(self.mlp(self.before_mlp(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Scores the next token at each place.

    Args:
        tokens: Size of the vocabulary.
        context: Most places.
        width: Of all layers; a multiple of ``heads``.
        heads: Of the attention.
        depth: Blocks.
        dropout: Probability.
    """

    def __init__(
        self, tokens: int, *, context: int, width: int, heads: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.last = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Of which 2 * depth are added up
                into_sum = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if into_sum else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores, shape ``(batch, time, tokens)``, of token numbers, shape ``(batch,
        time)``.
        """
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.last(x), self.tokens.weight)

    @torch.no_grad()
    def written(self, tokens: torch.Tensor, more: int) -> torch.Tensor:
        """Return tokens, shape ``(1, time)``, and so many more, drawn by their probabilities."""
        for _ in range(more):
            scores = self(tokens[:, -self.context :])[:, -1].float()
            tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1)], dim=1)
        return tokens


def next_token_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all tokens, shape ``()``."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
