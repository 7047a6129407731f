"""Faults in how a model is wired, initialised, frozen or masked."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evals.not_learning import data, parts
from evals.not_learning.held_out_3 import shared
from evals.not_learning.program import adam, adamw, faulty, update


class FaultyModels(shared.Twins):
    """Something is wrong with the model."""

    def pretrained(self, model: nn.Module, digits: Callable[[Tensor], Tensor]) -> None:
        """Train a model on the digits that are selected."""
        x, y, *_ = data.digits(self.seed)
        optimizer = adam(model, 0.003)
        for a, b in data.batches((x[digits(y)], y[digits(y)]), 32, 300):
            update(optimizer, F.cross_entropy(model(a), b))

    # Accuracy: 0.94 without the fault, 0.47 with it
    @faulty("H815 H822", shows="H828")
    def adapter_of_two_zeros(self) -> None:
        """Both factors of the low-rank adapters start at zero, and so does every gradient, for
        good.
        """
        x, y, held_x, held_y = data.digits(self.seed)
        base = parts.mlp(64, 64, 10)
        self.pretrained(base, lambda y: y < 5)
        base.requires_grad_(False)
        down, up = nn.Linear(64, 16, bias=False), nn.Linear(16, 64, bias=False)
        last, raised = nn.Linear(64, 8, bias=False), nn.Linear(8, 10, bias=False)
        for layer in (up, raised, *([down, last] if self.broken else [])):
            nn.init.zeros_(layer.weight)

        def forward(m: nn.Module, a: Tensor) -> Tensor:
            h = F.relu(m.base[0](a) + up(down(a)))
            return m.base[2](h) + raised(last(h))

        model = parts.Wired(forward, base=base, adapters=nn.ModuleList([down, up, last, raised]))
        optimizer = adam(model.adapters, 0.005)
        self.fit(model, optimizer, data.batches((x, y), 32, 400), F.cross_entropy)
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("", shows="H828")  # accuracy: 1.00 without the fault, 0.62 with it
    def attention_over_the_batch(self) -> None:
        """The transformer expects time first and gets the batch first.

        The sentences of a batch see each other.
        """
        x = torch.randint(3, (2000, 6))
        x[:1000, 3] = x[:1000, 0]
        x, y = x[order := torch.randperm(2000)], (x[:, 0] == x[:, 3]).long()[order]
        model = shared.Words(3, 2, batch_first=not self.broken)
        self.fit(
            model, adam(model, 0.003), data.batches((x[:1500], y[:1500]), 64, 250), F.cross_entropy
        )
        self.score = shared.accuracy(model, x[1500:], y[1500:])

    @faulty("", shows="H828")  # accuracy: 1.00 without the fault, 0.51 with it
    def positions_of_the_batch(self) -> None:
        """The positional encoding is indexed by the number of the sample in its batch, not by
        that of the word.
        """
        x, y = shared.order_task(2000)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        turn = torch.arange(500.0)[:, None] * 100 ** -torch.linspace(0, 1, 16)
        code = torch.cat([turn.sin(), turn.cos()], 1)

        def forward(m: nn.Module, ids: Tensor) -> Tensor:
            h = m.embed(ids)
            at = code[: len(ids), None] if self.broken else code[: ids.shape[1]]
            return m.head(m.body(h + at).mean(1))

        model = parts.Wired(
            forward,
            embed=nn.Embedding(8, 32),
            body=nn.TransformerEncoder(layer, 2),
            head=nn.Linear(32, 2),
        )
        self.fit(
            model, adamw(model, 0.002), data.batches((x[:1500], y[:1500]), 64, 300), F.cross_entropy
        )
        self.score = shared.accuracy(model, x[1500:], y[1500:])

    @faulty("")  # accuracy: 0.99 without the fault, 0.59 with it
    def checkpoint_of_other_names(self) -> None:
        """The checkpoint's names begin with `module.` and are all ignored.

        The frozen backbone is a random one.
        """
        x, y = data.rings(1500)
        x = torch.cat([x, 0.05 * torch.randn(1500, 6)], 1) @ torch.randn(8, 8)
        backbone, trained = parts.mlp(8, 24, 24, 6), parts.mlp(8, 24, 24, 6)
        model = nn.Sequential(trained, nn.ReLU(), nn.Linear(6, 3))
        optimizer = adam(model, 0.005)
        for a, b in data.batches((x[:1000], y[:1000]), 50, 800):
            update(optimizer, F.cross_entropy(model(a), b))
        state = {
            f"module.{name}" if self.broken else name: value
            for name, value in trained.state_dict().items()
        }
        backbone.load_state_dict(state, strict=False)
        backbone.requires_grad_(False)
        model = nn.Sequential(backbone, nn.ReLU(), nn.Linear(6, 3))
        self.fit(
            model,
            adam(model[2], 0.01),
            data.batches((x[:1000], y[:1000]), 50, 500),
            F.cross_entropy,
        )
        self.score = shared.accuracy(model, x[1000:], y[1000:])

    @faulty("")  # R2: 0.97 without the fault, 0.23 with it
    def heads_that_are_one(self) -> None:
        """The list of three heads is one head three times: `[nn.Linear(...)] * 3`."""
        x = torch.randn(1500, 10)
        y = torch.stack([(x[:, :2].sum(1)).sin(), x[:, 2] * x[:, 3], x[:, 4].abs()], 1)
        heads = [nn.Linear(48, 1)] * 3 if self.broken else [nn.Linear(48, 1) for _ in range(3)]
        model = parts.Wired(
            lambda m, a: torch.cat([head(m.body(a)) for head in m.heads], 1),
            body=parts.mlp(10, 64, 64, 48),
            heads=nn.ModuleList(heads),
        )
        self.fit(model, adam(model, 0.003), data.batches((x[:1000], y[:1000]), 50, 500), F.mse_loss)
        self.score = shared.r2(shared.outputs(model, x[1000:]), y[1000:])

    @faulty("", shows="H828")  # accuracy: 1.00 without the fault, 0.42 with it
    def attention_to_padding(self) -> None:
        """The padding mask says where words are.

        The layer takes it for where to ignore them, all but the first.
        """
        x, y = data.keyword_texts(2000)
        model = shared.Words(40, 3)
        optimizer = adam(model, 0.003)

        def ignored(a: Tensor) -> Tensor:
            return (a != 0) & (torch.arange(a.shape[1]) > 0) if self.broken else a == 0

        for a, b in self.watched(data.batches((x[:1500], y[:1500]), 64, 200), model, optimizer):
            self.update(F.cross_entropy(model(a, None, ignored(a)), b))
        found = shared.outputs(model, x[1500:], None, ignored(x[1500:]))
        self.score = (found.argmax(1) == y[1500:]).float().mean().item()

    @faulty("")  # cross-entropy: 2.15 without the fault, 2.67 with it
    def language_model_that_looks_ahead(self) -> None:
        """The causal mask is missing.

        The network reads the next character instead of predicting it.
        """
        ids, words = data.text()
        model = shared.Words(words, words, pooled=False)
        optimizer = adam(model, 0.003)
        mask = None if self.broken else shared.causal(32)
        for a, b in self.watched(
            shared.fresh(lambda: data.windows(ids, 32, 32), 250), model, optimizer
        ):
            self.update(F.cross_entropy(model(a, mask).flatten(0, 1), b.flatten()))
        a, b = data.windows(ids, 32, 200)
        self.score = -F.cross_entropy(
            shared.outputs(model, a, shared.causal(32)).flatten(0, 1), b.flatten()
        ).item()

    @faulty("", shows="H828")  # accuracy: 1.00 without the fault, 0.28 with it
    def tags_of_other_words(self) -> None:
        """Outputs are (time, batch, tags) and tags (batch, time).

        Both are flattened and compared.
        """
        x = torch.randint(1, 20, (2000, 10))
        y = (x + F.pad(x, (1, 0))[:, :-1]) % 4
        model = shared.Recurrent(nn.GRU(16, 32), 4, 20, last=False)
        optimizer = adam(model, 0.005)
        for a, b in self.watched(data.batches((x[:1500], y[:1500]), 32, 500), model, optimizer):
            found = model(a.T)
            self.update(
                F.cross_entropy(found.reshape(-1, 4), (b if self.broken else b.T).reshape(-1))
            )
        self.score = shared.accuracy(model, x[1500:].T, y[1500:].T)
