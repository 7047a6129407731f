"""Programs that read and write text."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evals.not_learning.data import keyword_texts, library_text, text_windows
from evals.not_learning.program import Programs, faulty, healthy


class CausalAttention(nn.Module):
    """Multi-head attention to the present and the past."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors of the same shape."""
        count, length, width = x.shape
        qkv = self.qkv(x).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(count, length, width))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and with a shortcut."""

    def __init__(self, width: int, *, causal: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, 2, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors of the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A decoder-only transformer whose output layer is its embedding."""

    def __init__(
        self, vocabulary: int, width: int = 32, length: int = 32, *, causal: bool = True
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, causal=causal) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.05)
        nn.init.normal_(self.positions.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of the next character at each place."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CharacterGRU(nn.Module):
    """An embedding, a GRU and a linear layer."""

    def __init__(self, vocabulary: int, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24)
        self.gru = nn.GRU(24, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return scores at each place, and the state behind the last one."""
        hidden, state = self.gru(self.embedding(ids), state)
        return self.head(hidden), state


class LowRankLinear(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.base(x) + self.scale * (x @ self.down.T @ self.up.T)


class Windows(Dataset):
    """All windows of a text, with the text one character later."""

    def __init__(self, ids: Tensor, length: int) -> None:
        self.ids = ids
        self.length = length

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        return (
            self.ids[start : start + self.length],
            self.ids[start + 1 : start + self.length + 1],
        )


def pretrained_gru(ids: Tensor, vocabulary: int, steps: int = 100) -> CharacterGRU:
    """Return a language model that has seen the text for some steps."""
    model = CharacterGRU(vocabulary)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x, y = text_windows(ids, 16, 20)
        optimizer.zero_grad()
        functional.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model


def order_pairs(count: int, length: int = 10, words: int = 12) -> tuple[Tensor, Tensor]:
    """Return sentences, and whether word 1 stands before word 2 in each."""
    texts = torch.randint(3, words, (count, length))
    places = torch.stack([torch.randperm(length)[:2] for _ in range(count)])
    rows = torch.arange(count)
    texts[rows, places[:, 0]] = 1
    texts[rows, places[:, 1]] = 2
    return texts, (places[:, 0] < places[:, 1]).long()


class Language(Programs):
    """Language models, classifiers of text, and their fine-tuning."""

    @healthy
    def gpt_with_tied_embeddings(self) -> None:
        """A small GPT with tied embeddings, decay groups, warm-up, cosine decay and clipping."""
        ids, vocabulary = library_text()
        model = TinyGPT(vocabulary)
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
        steps = 120
        warm_up = 20

        def learning_rate(step: int) -> float:
            if step < warm_up:
                return 4e-3 * step / warm_up
            progress = (step - warm_up) / (steps - warm_up)
            return 4e-4 + 3.6e-3 * 0.5 * (1 + math.cos(math.pi * progress))

        with self.watch(model, optimizer, total_steps=steps):
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step)
                x, y = text_windows(ids, 12, 32)
                logits = model(x)
                loss = functional.cross_entropy(logits.view(-1, vocabulary), y.view(-1))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

    @healthy
    def state_carried_between_windows(self) -> None:
        """Truncated backpropagation: the state of a GRU is kept, and cut from its graph."""
        ids, vocabulary = library_text()
        lanes = 8
        length = 25
        rows = ids[: len(ids) // lanes * lanes].view(lanes, -1)
        model = CharacterGRU(vocabulary)
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            state = None
            for start in range(0, rows.shape[1] - length - 1, length):
                x = rows[:, start : start + length]
                y = rows[:, start + 1 : start + length + 1]
                if state is not None:
                    state = state.detach()
                scores, state = model(x, state)
                loss = functional.cross_entropy(scores.reshape(-1, vocabulary), y.reshape(-1))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()

    @healthy
    def masked_symbols(self) -> None:
        """One symbol in seven is hidden, and only those count in the loss (target -100)."""
        hidden = 16
        model = TinyGPT(17, length=16, causal=False)
        optimizer = optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
        with self.watch(model, optimizer):
            for _ in range(200):
                x = torch.randint(16, (24, 4)).repeat(1, 4)
                mask = torch.rand(x.shape) < 0.15
                labels = x.masked_fill(~mask, -100)
                scores = model(x.masked_fill(mask, hidden))
                loss = functional.cross_entropy(
                    scores.flatten(0, 1), labels.flatten(), ignore_index=-100
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def skip_gram_with_sparse_gradients(self) -> None:
        """Word vectors by negative sampling: sparse embeddings, `SparseAdam`, many rare rows."""
        ids, vocabulary = library_text()
        words = ids[:-1] * vocabulary + ids[1:]
        _, words = words.unique(return_inverse=True)
        size = int(words.max()) + 1
        model = nn.ModuleDict(
            {
                "centre": nn.Embedding(size, 16, sparse=True),
                "context": nn.Embedding(size, 16, sparse=True),
            }
        )
        nn.init.uniform_(model["centre"].weight, -1 / 16, 1 / 16)
        nn.init.zeros_(model["context"].weight)
        optimizer = optim.SparseAdam(list(model.parameters()), lr=0.02)
        with self.watch(model, optimizer):
            for _ in range(300):
                place = torch.randint(2, len(words) - 2, (128,))
                shift = torch.tensor([-2, -1, 1, 2])[torch.randint(4, (128,))]
                centre = model["centre"](words[place])
                context = model["context"](words[place + shift])
                noise = model["context"](words[torch.randint(len(words), (128, 5))])
                positive = functional.logsigmoid((centre * context).sum(dim=1))
                negative = functional.logsigmoid(-(noise @ centre[:, :, None]).squeeze(2))
                loss = -(positive + negative.sum(dim=1)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def low_rank_adapter(self) -> None:
        """A frozen language model is adapted to another alphabet through two thin matrices."""
        ids, vocabulary = library_text()
        model = pretrained_gru(ids, vocabulary)
        model.requires_grad_(False)
        model.head = LowRankLinear(model.head)
        swap = torch.randperm(vocabulary)
        optimizer = optim.AdamW([model.head.down, model.head.up], lr=1e-2, weight_decay=0.0)
        with self.watch(model, optimizer):
            for _ in range(150):
                x, y = text_windows(ids, 16, 20)
                scores, _ = model(x)
                loss = functional.cross_entropy(scores.flatten(0, 1), swap[y].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def full_fine_tuning_at_a_small_rate(self) -> None:
        """A language model goes on at a hundredth of the rate: the loss hardly falls any more."""
        ids, vocabulary = library_text()
        model = pretrained_gru(ids, vocabulary, steps=120)
        loader = DataLoader(Windows(ids, 24), batch_size=16, shuffle=True)
        optimizer = optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
        with self.watch(model, optimizer):
            for x, y in loader:
                scores, _ = model(x)
                loss = functional.cross_entropy(scores.flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

    @healthy
    def bag_of_words_with_heavy_dropout(self) -> None:
        """A bag of embeddings with four fifths dropped finds keywords in padded texts."""
        texts, labels = keyword_texts(1500)
        loader = DataLoader(TensorDataset(texts, labels), batch_size=64, shuffle=True)
        model = nn.Sequential(
            nn.EmbeddingBag(40, 48, mode="sum", padding_idx=0),
            nn.Dropout(0.8),
            nn.Linear(48, 32),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(32, 3),
        )
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(10):
                model.train()
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                model.eval()

    @healthy
    def preferences_against_a_reference(self) -> None:
        """Direct preference optimisation: policy and reference start equal, the loss at log 2."""
        ids, vocabulary = library_text()
        policy = pretrained_gru(ids, vocabulary)
        reference = copy.deepcopy(policy)
        reference.requires_grad_(False)
        reference.eval()
        optimizer = optim.RMSprop(policy.parameters(), lr=2e-4)
        beta = 0.5

        def log_probability(model: CharacterGRU, x: Tensor, y: Tensor) -> Tensor:
            scores, _ = model(x)
            chosen = functional.log_softmax(scores, dim=-1).gather(2, y[:, :, None])
            return chosen.sum(dim=(1, 2))

        with self.watch(policy, optimizer):
            for _ in range(70):
                x, preferred = text_windows(ids, 16, 12)
                refused = preferred.clone()
                refused[:, ::3] = preferred[:, torch.randperm(12)[:4]]
                better = log_probability(policy, x, preferred)
                worse = log_probability(policy, x, refused)
                with torch.no_grad():
                    better_before = log_probability(reference, x, preferred)
                    worse_before = log_probability(reference, x, refused)
                margin = (better - better_before) - (worse - worse_before)
                loss = -functional.logsigmoid(beta * margin).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def reward_model_of_comparisons(self) -> None:
        """A reward model learns from pairs which of two texts holds more of the wanted words."""
        model = nn.Sequential(
            nn.Embedding(30, 16),
            nn.Flatten(),
            nn.LayerNorm(160),
            nn.Linear(160, 32),
            nn.Tanh(),
            nn.Linear(32, 1),
        )
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                first = torch.randint(30, (64, 10))
                second = torch.randint(30, (64, 10))
                wanted = (first < 8).sum(dim=1) >= (second < 8).sum(dim=1)
                chosen = torch.where(wanted[:, None], first, second)
                refused = torch.where(wanted[:, None], second, first)
                difference = model(chosen).squeeze(1) - model(refused).squeeze(1)
                loss = -functional.logsigmoid(difference).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def mixture_of_experts(self) -> None:
        """Four experts, of which a router picks one for each word, with a balancing loss."""

        class Experts(nn.Module):
            """A router and its experts over embedded words."""

            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(64, 16)
                self.router = nn.Linear(16, 4)
                self.experts = nn.ModuleList(
                    nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64)) for _ in range(4)
                )

            def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
                """Return the scores of the next word, and the balancing loss."""
                x = self.embedding(words)
                gate = self.router(x).softmax(dim=1)
                weight, expert = gate.max(dim=1)
                scores = torch.zeros(len(words), 64)
                for number, network in enumerate(self.experts):
                    rows = (expert == number).nonzero().squeeze(1)
                    if len(rows) > 0:
                        scores = scores.index_add(0, rows, network(x[rows]))
                share = functional.one_hot(expert, 4).float().mean(dim=0)
                balance = 4 * (share * gate.mean(dim=0)).sum()
                return weight[:, None] * scores, balance

        follower = torch.randperm(64)
        model = Experts()
        optimizer = optim.AdamW(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                words = torch.randint(64, (128,))
                scores, balance = model(words)
                loss = functional.cross_entropy(scores, follower[words]) + 0.01 * balance
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def curriculum_of_longer_texts(self) -> None:
        """Reversal of words that get longer: the loss rises with each stage."""
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(12, 24),
                "encoder": nn.GRU(24, 64, batch_first=True),
                "decoder": nn.GRU(24, 64, batch_first=True),
                "head": nn.Linear(64, 10),
            }
        )
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for length in (2, 3, 4, 5):
                for _ in range(60):
                    words = torch.randint(10, (64, length))
                    target = words.flip(1)
                    start = torch.full((64, 1), 10)
                    given = torch.cat([start, target[:, :-1]], dim=1)
                    _, state = model["encoder"](model["embedding"](words))
                    hidden, _ = model["decoder"](model["embedding"](given), state)
                    scores = model["head"](hidden)
                    loss = functional.cross_entropy(scores.flatten(0, 1), target.flatten())
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()

    @healthy
    def classifier_with_an_unused_pooler(self) -> None:
        """An encoder came with a pooler that this task has no use for; it is named as frozen."""

        class Encoder(nn.Module):
            """An encoder whose pooler is part of its checkpoint."""

            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(40, 16, padding_idx=0)
                self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
                self.pooler = nn.Linear(48, 48)
                self.classifier = nn.Linear(48, 3)

            def forward(self, ids: Tensor) -> Tensor:
                """Return the scores of the classes."""
                hidden, _ = self.lstm(self.embedding(ids))
                hidden = hidden.masked_fill((ids == 0)[:, :, None], -1e4)
                return self.classifier(hidden.amax(dim=1))

        texts, labels = keyword_texts(1000)
        loader = DataLoader(TensorDataset(texts, labels), batch_size=50, shuffle=True)
        model = Encoder()
        optimizer = optim.AdamW(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer, frozen=("pooler.*",)):
            for _ in range(5):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("")
    def attention_sees_the_future(self) -> None:
        """A language model without a causal mask reads the answer from its input."""
        ids, vocabulary = library_text()
        model = TinyGPT(vocabulary, causal=False)
        optimizer = optim.AdamW(model.parameters(), lr=8e-3)
        with self.watch(model, optimizer):
            for _ in range(180):
                x, y = text_windows(ids, 12, 24)
                loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("")
    def boolean_mask_the_wrong_way_round(self) -> None:
        """`TransformerEncoder` is given a mask of what may be seen, where it hides what is true."""

        class Continuation(nn.Module):
            """A transformer that continues sequences."""

            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(16, 32)
                self.positions = nn.Parameter(0.5 * torch.randn(18, 32))
                layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
                self.encoder = nn.TransformerEncoder(layer, 1)
                self.head = nn.Linear(32, 16)
                visible = torch.tril(torch.ones(18, 18)).bool()
                self.register_buffer("visible", visible)

            def forward(self, ids: Tensor) -> Tensor:
                """Return the scores of the next symbol at each place."""
                hidden = self.embedding(ids) + self.positions
                return self.head(self.encoder(hidden, mask=self.visible))

        model = Continuation()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(200):
                sequence = torch.randint(16, (32, 5)).repeat(1, 4)
                x = sequence[:, :18]
                y = sequence[:, 1:19]
                scores = model(x)
                loss = functional.cross_entropy(scores.flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("")
    def batch_and_time_exchanged_in_the_encoder(self) -> None:
        """The encoder lacks `batch_first=True`, so that words attend to other sentences."""
        texts, labels = order_pairs(1000)
        loader = DataLoader(TensorDataset(texts, labels), batch_size=50, shuffle=True)

        class Classifier(nn.Module):
            """A transformer that asks for the order of two words."""

            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(12, 32)
                self.positions = nn.Parameter(0.5 * torch.randn(10, 32))
                layer = nn.TransformerEncoderLayer(
                    32,
                    4,
                    64,
                    dropout=0.0,
                )
                self.encoder = nn.TransformerEncoder(layer, 1)
                self.head = nn.Linear(32, 2)

            def forward(self, ids: Tensor) -> Tensor:
                """Return the scores of both orders."""
                hidden = self.encoder(self.embedding(ids) + self.positions)
                return self.head(hidden[:, 0])

        model = Classifier()
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(9):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H814")
    def embeddings_taken_as_data(self) -> None:
        """The layer reads `embedding.weight.data`, and the random vectors stay as they are."""

        class Classifier(nn.Module):
            """The mean of word vectors, and a linear layer."""

            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(150, 4)
                self.head = nn.Linear(4, 3)

            def forward(self, ids: Tensor) -> Tensor:
                """Return the scores of the classes."""
                vectors = self.embedding.weight.data[ids]
                return self.head(vectors.sum(dim=1))

        texts, labels = keyword_texts(1000, words=150)
        loader = DataLoader(TensorDataset(texts, labels), batch_size=50, shuffle=True)
        model = Classifier()
        optimizer = optim.Adam(model.parameters(), lr=2e-2)
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H842")
    def log_softmax_over_the_batch(self) -> None:
        """The last layer is `LogSoftmax(dim=0)`, which normalises over the texts of the batch."""
        texts, labels = keyword_texts(1000)
        labels[(labels == 1) & (torch.rand(1000) < 0.8)] = 0
        loader = DataLoader(TensorDataset(texts, labels), batch_size=50, shuffle=True)
        model = nn.Sequential(
            nn.EmbeddingBag(40, 16, mode="sum", padding_idx=0),
            nn.Linear(16, 16),
            nn.ReLU(),
            nn.Linear(16, 3),
            nn.LogSoftmax(dim=0),
        )
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        criterion = nn.NLLLoss()
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = criterion(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H856", shows="H828")
    def word_numbers_as_magnitudes(self) -> None:
        """The ids of words go into a linear layer as they are, instead of into an embedding."""
        texts, labels = keyword_texts(1000, words=400)
        loader = DataLoader(TensorDataset(texts, labels), batch_size=50, shuffle=True)
        model = nn.Sequential(
            nn.Linear(16, 64),
            nn.ReLU(),
            nn.Linear(64, 3),
        )
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    x = x.float()
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H814 H815 H822 H828")
    def adapter_with_two_zero_matrices(self) -> None:
        """Both matrices of a low-rank adapter start at zero, so that neither gets a gradient."""
        ids, vocabulary = library_text()
        model = pretrained_gru(ids, vocabulary)
        model.requires_grad_(False)
        model.head = LowRankLinear(model.head)
        nn.init.zeros_(model.head.down)
        swap = torch.randperm(vocabulary)
        optimizer = optim.AdamW([model.head.down, model.head.up], lr=1e-2, weight_decay=0.0)
        with self.watch(model, optimizer):
            for _ in range(150):
                x, y = text_windows(ids, 16, 20)
                scores, _ = model(x)
                loss = functional.cross_entropy(scores.flatten(0, 1), swap[y].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("")
    def targets_that_are_not_shifted(self) -> None:
        """The target of a language model is its input, so that it learns to copy."""
        ids, vocabulary = library_text()
        loader = DataLoader(Windows(ids, 24), batch_size=16, shuffle=True)
        model = CharacterGRU(vocabulary)
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(2):
                for x, y in loader:
                    y = x
                    scores, _ = model(x)
                    loss = functional.cross_entropy(scores.flatten(0, 1), y.flatten())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("")
    def padding_counts_in_the_loss(self) -> None:
        """Most of a tagged batch is padding, a class of its own that the loss does not ignore."""
        count = 600
        words = torch.randint(1, 30, (count, 40))
        lengths = torch.randint(2, 5, (count,))
        padding = torch.arange(40) >= lengths[:, None]
        words[padding] = 0
        tags = torch.where(padding, 0, 1 + words % 4)
        loader = DataLoader(TensorDataset(words, tags), batch_size=50, shuffle=True)
        model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        criterion = nn.CrossEntropyLoss()
        with self.watch(model, optimizer):
            for _ in range(12):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = criterion(model(x).flatten(0, 1), y.flatten())
                    loss.backward()
                    optimizer.step()
