"""Healthy programs over sequences: language models, recurrent nets, attention, alignment-free speech-like losses."""

# ruff: noqa: D101, D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from benchmarks.not_learning.data import text, windows
from benchmarks.not_learning.program import Program, Watch


class CharLSTM(nn.Module):
    def __init__(self, characters: int, hidden: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.out = nn.Linear(hidden, characters)

    def forward(
        self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(self.embed(ids), state)
        return self.out(hidden), state


def char_lm_lstm(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    ids, characters = text()
    model = CharLSTM(characters)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(300):
            x, y = windows(ids, 24, 16)
            optimizer.zero_grad()
            logits, _ = model(x)
            loss = criterion(logits.reshape(-1, characters), y.reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()


def truncated_backpropagation(watch: Watch, seed: int) -> None:
    """Neighbouring pieces of the text in order; the state is carried on and detached."""
    torch.manual_seed(seed)
    ids, characters = text()
    rows = ids[: len(ids) // 12 * 12].view(12, -1)
    model = CharLSTM(characters, hidden=48)
    optimizer = optim.RMSprop(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        state = None
        for start in range(0, 280 * 16, 16):
            x, y = rows[:, start : start + 16], rows[:, start + 1 : start + 17]
            if state is not None:
                state = tuple(part.detach() for part in state)
            logits, state = model(x, state)
            loss = F.cross_entropy(logits.transpose(1, 2), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Decoder only; input and output embeddings share their weights."""

    def __init__(self, characters: int, length: int, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def transformer_tied_weights(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    ids, characters = text()
    model = TinyGPT(characters, 24)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, total_iters=30),
            optim.lr_scheduler.CosineAnnealingLR(optimizer, 270),
        ],
        milestones=[30],
    )
    with watch(model, optimizer, scheduler=scheduler, total_steps=300):
        for _ in range(300):
            x, y = windows(ids, 24, 12)
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, characters), y.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()


def masked_lm(watch: Watch, seed: int) -> None:
    """BERT-like: 15 % of the characters are masked, all other targets are ignored."""
    torch.manual_seed(seed)
    ids, characters = text()
    mask_id = characters
    encoder_layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(characters + 1, 48),
            "place": nn.Embedding(20, 48),
            "encoder": nn.TransformerEncoder(encoder_layer, 1, enable_nested_tensor=False),
            "head": nn.Linear(48, characters),
        }
    )
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
    with watch(model, optimizer):
        for _ in range(350):
            x, _ = windows(ids, 20, 16)
            hidden = torch.rand(x.shape) < 0.15
            labels = x.masked_fill(~hidden, -100)
            inputs = x.masked_fill(hidden, mask_id)
            states = model["encoder"](model["embed"](inputs) + model["place"].weight)
            loss = loss_fn(model["head"](states).view(-1, characters), labels.view(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def gru_counts_ones(watch: Watch, seed: int) -> None:
    """Whether a sequence of bits holds more ones than zeros, read from the last state."""
    torch.manual_seed(seed)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(1, 32)
            self.fc = nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            _, last = self.gru(x)
            return self.fc(last[-1])

    net = Net()
    opt = optim.Adam(net.parameters(), lr=3e-3)
    with watch(net, opt):
        for _ in range(350):
            bits = torch.randint(0, 2, (15, 64, 1))
            labels = (bits.sum(0)[:, 0] > 7).long()
            out = net(bits.float())
            loss = F.cross_entropy(out, labels)
            opt.zero_grad()
            loss.backward()
            opt.step()


def seq2seq_reverses(watch: Watch, seed: int) -> None:
    """Encoder and decoder with teacher forcing; one optimizer each."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(12, 24)
    encoder = nn.GRU(24, 64, batch_first=True)
    decoder = nn.GRU(24, 64, batch_first=True)
    project = nn.Linear(64, 12)
    encoder_parts = nn.ModuleDict({"embedding": embedding, "rnn": encoder})
    decoder_parts = nn.ModuleDict({"rnn": decoder, "project": project})
    encoder_optimizer = optim.Adam(encoder_parts.parameters(), lr=5e-3)
    decoder_optimizer = optim.Adam(decoder_parts.parameters(), lr=5e-3)
    start = torch.full((32, 1), 10)
    with watch(
        {"encoder": encoder_parts, "decoder": decoder_parts},
        {"encoder": encoder_optimizer, "decoder": decoder_optimizer},
    ):
        for _ in range(400):
            source = torch.randint(0, 10, (32, 5))
            target = source.flip(1)
            encoder_optimizer.zero_grad()
            decoder_optimizer.zero_grad()
            _, state = encoder(embedding(source))
            states, _ = decoder(embedding(torch.cat([start, target[:, :-1]], 1)), state)
            loss = F.cross_entropy(project(states).flatten(0, 1), target.flatten())
            loss.backward()
            encoder_optimizer.step()
            decoder_optimizer.step()


def ctc_noisy_tones(watch: Watch, seed: int) -> None:
    """Each symbol lasts some frames; the alignment is unknown. The loss starts far above its end."""
    torch.manual_seed(seed)
    codes = torch.randn(6, 10)
    model = nn.Sequential(nn.Conv1d(10, 48, 3, padding=1), nn.ReLU(), nn.Conv1d(48, 7, 3, padding=1))
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(300):
            labels = torch.randint(1, 7, (16, 5))
            frames = codes[labels - 1].repeat_interleave(5, dim=1) + 0.3 * torch.randn(16, 25, 10)
            log_probs = model(frames.transpose(1, 2)).permute(2, 0, 1).log_softmax(2)
            loss = ctc(log_probs, labels, torch.full((16,), 25), torch.full((16,), 5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def conv1d_audio_events(watch: Watch, seed: int) -> None:
    """Raw waves at full 16-bit scale go through a BatchNorm first, so their size does not matter."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.BatchNorm1d(1),
        nn.Conv1d(1, 16, 15, stride=4),
        nn.ReLU(),
        nn.Conv1d(16, 16, 7, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    optimizer = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    time = torch.arange(256) / 256
    with watch(net, optimizer):
        for _ in range(400):
            kinds = torch.randint(0, 4, (32,))
            phase = torch.rand(32, 1) * 2 * torch.pi
            waves = torch.sin(2 * torch.pi * (4 + 6 * kinds[:, None]) * time + phase) + torch.randn(32, 256)
            logits = net(waves[:, None] * 8000)
            loss = F.cross_entropy(logits, kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def sparse_embeddings(watch: Watch, seed: int) -> None:
    """Matrix factorisation with sparse gradients; most rows get none in a step."""
    torch.manual_seed(seed)
    users, items = 800, 400
    true_users, true_items = torch.randn(users, 3), torch.randn(items, 3)
    tables = nn.ModuleDict({"user": nn.Embedding(users, 8, sparse=True), "item": nn.Embedding(items, 8, sparse=True)})
    for table in tables.values():
        nn.init.normal_(table.weight, std=0.1)
    optimizer = optim.SparseAdam(list(tables.parameters()), lr=0.02)
    with watch(tables, optimizer):
        for _ in range(900):
            u, i = torch.randint(0, users, (256,)), torch.randint(0, items, (256,))
            rating = (true_users[u] * true_items[i]).sum(1)
            predicted = (tables["user"](u) * tables["item"](i)).sum(1)
            loss = F.mse_loss(predicted, rating)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def word_vectors_negative_sampling(watch: Watch, seed: int) -> None:
    """word2vec over characters, the loss written by hand with logsigmoid."""
    torch.manual_seed(seed)
    ids, characters = text()
    centre, context = nn.Embedding(characters, 16), nn.Embedding(characters, 16)
    nn.init.zeros_(context.weight)  # as the original does; the centres are random
    optimizer = optim.Adam([*centre.parameters(), *context.parameters()], lr=0.01)
    with watch({"centre": centre, "context": context}, optimizer):
        for _ in range(700):
            at = torch.randint(2, len(ids) - 2, (128,))
            near = ids[at + torch.randint(1, 3, (128,))]
            random = torch.randint(0, characters, (128, 5))
            vector = centre(ids[at])
            good = F.logsigmoid((vector * context(near)).sum(-1))
            bad = F.logsigmoid(-(context(random) @ vector[:, :, None]).squeeze(-1)).sum(-1)
            loss = -(good + bad).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def variable_lengths_packed(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    lstm = nn.LSTM(4, 32, bidirectional=True, batch_first=True)
    head = nn.Linear(64, 1)
    model = nn.ModuleList([lstm, head])
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(250):
            lengths = torch.randint(2, 12, (32,))
            x = torch.randn(32, 12, 4) * (torch.arange(12) < lengths[:, None])[..., None]
            y = x[:, :, 0].sum(1) / lengths.sqrt()
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, (last, _) = lstm(packed)
            loss = F.mse_loss(head(torch.cat([last[0], last[1]], 1)).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


PROGRAMS = [
    Program(name=train.__name__, healthy=True, train=train)
    for train in (
        char_lm_lstm,
        truncated_backpropagation,
        transformer_tied_weights,
        masked_lm,
        gru_counts_ones,
        seq2seq_reverses,
        ctc_noisy_tones,
        conv1d_audio_events,
        sparse_embeddings,
        word_vectors_negative_sampling,
        variable_lengths_packed,
    )
]
