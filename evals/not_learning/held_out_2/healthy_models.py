"""Healthy programs of the set: sequences, generative."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, healthy, update


class _Reader(nn.Module):
    """A GRU over packed sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.body = nn.GRU(16, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 3)

    def forward(self, texts: Tensor) -> Any:
        lengths = (texts > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(texts), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(torch.cat(list(self.body(packed)[1]), 1))


class _Language(nn.Module):
    """A causal transformer over characters, whose embedding is its last layer too."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, 32), nn.Embedding(32, 32)
        nn.init.normal_(self.embed.weight, std=0.18)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(
            layer, 1, norm=nn.LayerNorm(32), enable_nested_tensor=False
        )

    def forward(self, text: Tensor) -> Any:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.body(
            self.embed(text) + self.place(torch.arange(length)), mask=mask, is_causal=True
        )
        return hidden @ self.embed.weight.T


class _Reverser(nn.Module):
    """An encoder and a decoder with dot attention; 0 pads, 1 starts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 32, padding_idx=0)
        self.encoder, self.decoder = (nn.GRU(32, 48, batch_first=True) for _ in range(2))
        self.head = nn.Linear(96, 14)

    def forward(self, source: Tensor, given: Tensor) -> Any:
        memory, last = self.encoder(self.embed(source))
        hidden, _ = self.decoder(self.embed(given), last)
        match = (hidden @ memory.transpose(1, 2)).masked_fill((source == 0)[:, None], -torch.inf)
        return self.head(torch.cat([hidden, match.softmax(2) @ memory], 2))


def _reversals(count: int, length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.randint(3, length + 1, (count, 1))
    at = torch.arange(length)
    source = torch.randint(2, 14, (count, length)).masked_fill(at >= lengths, 0)
    target = source.gather(1, (lengths - 1 - at).clamp(min=0)).masked_fill(at >= lengths, 0)
    given = torch.cat([torch.ones(count, 1, dtype=torch.long), target[:, :-1]], 1)
    return (source, given, target)


class HealthySequences(Programs):
    """Healthy programs on sequences, sets and graphs.

    Recurrent, convolutional and attentive, padded and not.
    """

    @healthy
    def seasons_lstm_validated(self) -> None:
        """The next value of a series, with a plateau scheduler fed by a validation loss, and
        early stopping.
        """
        series = data.seasons(900, 31)[:, :, None]
        x, y = series[:, :30], series[:, 30]
        model = parts.Wired(
            lambda self, x: self.head(self.body(x)[0][:, -1]),
            body=nn.LSTM(1, 24, batch_first=True),
            head=nn.Linear(24, 1),
        )
        optimizer = adam(model, 0.005)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.5)
        best, waited = float("inf"), 0
        for _ in self.watched(range(14), model, optimizer, scheduler=scheduler):
            model.train()
            for a, b in data.loader(x[:600], y[:600], size=24):
                update(optimizer, F.mse_loss(model(a), b), clip=1.0)
            model.eval()
            with torch.no_grad():
                loss = float(F.mse_loss(model(x[600:750]), y[600:750]))
            self.watching.validated(loss)
            scheduler.step(loss)
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if waited > 4:
                break

    @healthy
    def keywords_packed_gru(self) -> None:
        """Sentences of different length, packed, read both ways."""
        texts, labels = data.keyword_texts(1500)
        model = _Reader()
        stream = data.stream((texts[:1200], labels[:1200]), 32, 350)
        self.fit(model, adam(model, 0.005), stream, F.cross_entropy)

    @healthy
    def characters_transformer_noam(self) -> None:
        """The next character with tied embeddings, warm-up and inverse square root, two
        micro-batches per step.
        """
        text, letters = data.library_text()
        model = _Language(letters)
        optimizer = adam(model, 0.01, betas=(0.9, 0.98))
        scheduler = optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 80, (80 / (step + 1)) ** 0.5)
        )
        for _ in self.watched(range(300), model, optimizer, scheduler=scheduler):
            for _ in range(2):
                a, b = data.text_windows(text, 12, 24)
                (F.cross_entropy(model(a).flatten(0, 1), b.flatten()) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    @healthy
    def reversal_sequence_to_sequence(self) -> None:
        """Reverses padded sequences with teacher forcing.

        Padding counts neither in attention nor in the loss.
        """
        model = _Reverser()
        for _ in self.watched(range(450), model, adam(model, 0.005)):
            source, given, target = _reversals(48)
            scores = model(source, given)
            self.update(
                F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=0), clip=1.0
            )

    @healthy
    def strokes_ctc(self) -> None:
        """Unaligned symbols by CTC: each symbol lasts some frames, with blanks between."""
        shapes = torch.randn(5, 6)
        model = nn.Sequential(
            nn.Conv1d(6, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 6, 3, padding=1)
        )

        def made(count: int) -> tuple[Tensor, Tensor]:
            symbols = torch.randint(5, (count, 4))
            frames = torch.zeros(count, 20, 6)
            for slot in range(4):
                frames[:, 5 * slot + 1 : 5 * slot + 4] = shapes[symbols[:, slot]][:, None]
            return ((frames + 0.3 * torch.randn_like(frames)).transpose(1, 2), symbols + 1)

        for _ in self.watched(range(300), model, adam(model, 0.005)):
            x, y = made(32)
            scores = model(x).permute(2, 0, 1).log_softmax(2)
            self.update(F.ctc_loss(scores, y, torch.full((32,), 20), torch.full((32,), 4)))

    @healthy
    def drift_dilated_convolutions(self) -> None:
        """A running sum with decay by causal dilated convolutions with weight norm, at every
        position.
        """
        x = torch.randn(800, 1, 40)
        kernel = 0.8 ** torch.arange(12).flip(0)
        y = F.conv1d(F.pad(x, (11, 0)), kernel[None, None])
        layers: list[nn.Module] = []
        for wide, dilation in ((1, 1), (16, 2), (16, 4)):
            layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(wide, 16, 3, dilation=dilation))
            layers += [nn.ConstantPad1d((2 * dilation, 0), 0.0), layer, nn.ReLU()]
        model = nn.Sequential(*layers, nn.Conv1d(16, 1, 1))
        optimizer = optim.NAdam(model.parameters(), lr=0.005)
        self.fit(model, optimizer, data.stream((x[:600], y[:600]), 32, 350), F.smooth_l1_loss)

    @healthy
    def words_by_negative_sampling(self) -> None:
        """Skip-gram embeddings of words of eight hidden topics, with five random negatives for
        each pair.
        """
        words, contexts = nn.Embedding(80, 12), nn.Embedding(80, 12)
        nn.init.zeros_(contexts.weight)
        model = nn.ModuleDict({"words": words, "contexts": contexts})
        optimizer = optim.Adagrad(model.parameters(), lr=0.3)
        for _ in self.watched(range(500), model, optimizer):
            topic = torch.randint(8, (128,))
            word, near = topic * 10 + data.picked(10, 128), topic * 10 + data.picked(10, 128)
            others = torch.cat([near[:, None], torch.randint(80, (128, 5))], 1)
            scores = (words(word)[:, None] * contexts(others)).sum(2)
            signs = torch.tensor([1.0, -1, -1, -1, -1, -1])
            update(optimizer, -F.logsigmoid(signs * scores).sum(1).mean())

    @healthy
    def latch_truncated_stream(self) -> None:
        """The last switch of an endless stream, the state carried on and detached between the
        steps.
        """
        body, head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 2)
        model = nn.ModuleDict({"body": body, "head": head})
        optimizer = adam(model, 0.01)
        state, latch = torch.zeros(1, 32, 16), torch.zeros(32, dtype=torch.long)

        def made(count: int, before: Tensor) -> tuple[Tensor, Tensor]:
            event = torch.multinomial(
                torch.tensor([0.8, 0.1, 0.1]), count * 6, replacement=True
            ).reshape(count, 6)
            right = [before]
            for at in range(6):
                right.append(torch.where(event[:, at] > 0, event[:, at] - 1, right[-1]))
            return (F.one_hot(event, 3).float(), torch.stack(right[1:], 1))

        for _ in self.watched(range(350), model, optimizer):
            flags, right = made(32, latch)
            hidden, state = body(flags, state.detach())
            latch = right[:, -1]
            optimizer.zero_grad()
            F.cross_entropy(head(hidden).flatten(0, 1), right.flatten()).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()

    @healthy
    def community_graph_network(self) -> None:
        """Full batch on one graph, where only a third of the nodes have labels."""
        adjacency, features, labels = data.community(self.seed)
        first, second = nn.Linear(16, 16), nn.Linear(16, 3)
        model = nn.ModuleList([first, second])
        known = torch.rand(180) < 0.33
        for _ in self.watched(range(300), model, adam(model, 0.01, weight_decay=0.0005)):
            hidden = F.dropout((adjacency @ first(features)).relu(), 0.3)
            scores = adjacency @ second(hidden)
            self.update(F.cross_entropy(scores[known], labels[known]))

    @healthy
    def two_towers_in_batch_softmax(self) -> None:
        """Pairs found again among all of a batch, in both directions, at a learnt temperature."""
        hidden = torch.randn(1500, 5)
        a, b = hidden @ torch.randn(5, 12), (hidden @ torch.randn(5, 20)).tanh()
        model = parts.Wired(
            lambda self, a, b: (
                self.scale.exp() * F.normalize(self.left(a)) @ F.normalize(self.right(b)).T
            ),
            left=parts.mlp(12, 32, 16),
            right=parts.mlp(20, 32, 16),
            scale=nn.Parameter(torch.tensor(1.0)),
        )
        for _ in self.watched(range(400), model, adam(model, 0.005)):
            at = data.picked(1200, 64)
            match = model(a[at], b[at])
            right = torch.arange(64)
            loss = F.cross_entropy(match, right) + F.cross_entropy(match.T, right)
            self.update(loss / 2)

    @healthy
    def largest_of_a_set(self) -> None:
        """Which row of a set is nearest to a hidden point.

        A softmax over the rows, sets of different size masked.
        """
        point = torch.randn(4)
        model = parts.mlp(4, 32, 32, 1, act=nn.Tanh)

        def made(count: int) -> tuple[Tensor, Tensor, Tensor]:
            rows = torch.randn(count, 8, 4)
            gone = torch.arange(8) >= torch.randint(3, 9, (count, 1))
            far = (rows - point).norm(dim=2).masked_fill(gone, torch.inf)
            return (rows, gone, far.argmin(1))

        for _ in self.watched(range(400), model, adam(model, 0.005)):
            rows, gone, best = made(64)
            chance = model(rows).squeeze(2).masked_fill(gone, -1000000000.0).log_softmax(1)
            self.update(-chance.gather(1, best[:, None]).mean())


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = parts.mlp(64, 64, 16), parts.mlp(8, 64, 64)

    def forward(self, x: Tensor) -> Any:
        mean, log_var = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        return (self.decoder(code), mean, log_var)


class _Coupling(nn.Module):
    """Affine couplings that start as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([parts.mlp(1, 32, 2, act=nn.Tanh) for _ in range(6)])
        for net in self.nets:
            nn.init.zeros_(net[-1].weight)

    def forward(self, x: Tensor) -> Any:
        volume = torch.zeros(len(x))
        for net in self.nets:
            scale, shift = net(x[:, :1]).chunk(2, 1)
            x = torch.cat([x[:, 1:] * scale.tanh().exp() + shift, x[:, :1]], 1)
            volume = volume + scale.tanh().squeeze(1)
        return (x, volume)


class HealthyGenerative(Programs):
    """Healthy programs that make things or act.

    Likelihoods, adversaries, diffusion, rewards, and equations.
    """

    @healthy
    def digits_variational(self) -> None:
        """A variational autoencoder whose divergence is phased in, so that its loss may rise for
        a while.
        """
        x = data.digit_images(self.seed)[0].flatten(1)
        model = _Variational()
        for step, (a,) in self.watched(
            enumerate(data.stream((x,), 64, 500)), model, adam(model, 0.002)
        ):
            scores, mean, log_var = model(a)
            fit = F.binary_cross_entropy_with_logits(scores, a, reduction="sum") / len(a)
            prior = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
            self.update(fit + min(1.0, step / 250) * prior)

    @healthy
    def ring_gan(self) -> None:
        """The usual two players on points of a ring; their losses do not fall."""
        maker, judge = parts.mlp(4, 32, 32, 2), parts.mlp(2, 32, 32, 1, act=nn.LeakyReLU)
        first = adam(maker, 0.001, betas=(0.5, 0.99))
        second = adam(judge, 0.001, betas=(0.5, 0.99))
        models, both = {"maker": maker, "judge": judge}, {"maker": first, "judge": second}
        loss = F.binary_cross_entropy_with_logits
        for _ in self.watched(range(700), models, both, objective="adversarial"):
            angle = 2 * torch.pi * torch.rand(64, 1)
            real = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            fake = maker(torch.randn(64, 4))
            second.zero_grad()
            told = judge(torch.cat([real, fake.detach()]))
            loss(told, torch.cat([torch.full((64, 1), 0.9), torch.zeros(64, 1)])).backward()
            second.step()
            update(first, loss(judge(fake), torch.ones(64, 1)))

    @healthy
    def moons_wgan_gradient_penalty(self) -> None:
        """Wasserstein critics, three steps each, with the gradient penalty and negative losses."""
        maker, critic = parts.mlp(2, 48, 48, 2), parts.mlp(2, 48, 48, 1, act=nn.SiLU)
        first = adam(maker, 0.002, betas=(0.0, 0.9))
        second = adam(critic, 0.002, betas=(0.0, 0.9))
        models, both = {"maker": maker, "critic": critic}, {"maker": first, "critic": second}
        for _ in self.watched(range(250), models, both, objective="adversarial"):
            for _ in range(3):
                real, fake = data.moons(64)[0], maker(torch.randn(64, 2)).detach()
                share = torch.rand(64, 1)
                mixed = (share * real + (1 - share) * fake).requires_grad_()
                slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
                update(
                    second,
                    critic(fake).mean()
                    - critic(real).mean()
                    + 5 * (slope.norm(dim=1) - 1).square().mean(),
                )
            update(first, -critic(maker(torch.randn(64, 2))).mean())

    @healthy
    def moons_diffusion(self) -> None:
        """Noise prediction at a random time, with a moving average of the weights.

        The loss has a high floor.
        """
        kept = torch.cumprod(1 - torch.linspace(0.001, 0.15, 40), 0)
        model = parts.mlp(3, 64, 64, 2, act=nn.SiLU)
        mean = optim.swa_utils.AveragedModel(
            model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.98)
        )

        def noised(count: int) -> tuple[Tensor, Tensor]:
            time, noise = torch.randint(40, (count, 1)), torch.randn(count, 2)
            point = kept[time].sqrt() * 1.5 * data.moons(count)[0] + (1 - kept[time]).sqrt() * noise
            return (torch.cat([point, time / 20 - 1], 1), noise)

        for _ in self.watched(range(700), model, adamw(model, 0.003)):
            a, noise = noised(128)
            self.update(F.mse_loss(model(a), noise))
            mean.update_parameters(model)

    @healthy
    def moons_normalising_flow(self) -> None:
        """The exact likelihood by couplings; the score counts the nats under the best Gaussian."""
        model = _Coupling()
        optimizer = adam(model, 0.005)

        def surprise(points: Tensor) -> Tensor:
            code, volume = model(points)
            result: Tensor = (0.5 * code.square().sum(1) + 1.838 - volume).mean()
            return result

        self.descend(model, optimizer, range(450), lambda _: surprise(data.moons(128)[0]), clip=3.0)

    @healthy
    def digits_quantised_codes(self) -> None:
        """A vector-quantised autoencoder: gradients pass straight through the choice of a code."""
        x = data.digit_images(self.seed)[0].flatten(1)
        encoder, decoder, codes = parts.mlp(64, 64, 32), parts.mlp(32, 64, 64), nn.Embedding(32, 8)
        model = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "codes": codes})

        def quantised(a: Tensor) -> tuple[Tensor, Tensor]:
            wanted = encoder(a).reshape(-1, 8)
            chosen = codes(torch.cdist(wanted, codes.weight).argmin(1))
            gap = F.mse_loss(chosen, wanted.detach()) + 0.25 * F.mse_loss(wanted, chosen.detach())
            out: Tensor = decoder((wanted + (chosen - wanted).detach()).reshape(-1, 32))
            return (out, gap)

        for (a,) in self.watched(data.stream((x,), 64, 500), model, adam(model, 0.002)):
            out, gap = quantised(a)
            self.update(10 * F.mse_loss(out, a) + gap)

    @healthy
    def corridor_deep_q(self) -> None:
        """Q-learning in a corridor with a target network, replay and fading exploration.

        The loss need not fall.
        """
        model = parts.mlp(10, 32, 2)
        target = copy.deepcopy(model).requires_grad_(False)
        here, seen = 5, []
        for step in self.watched(range(700), model, adam(model, 0.003), objective="reinforcement"):
            state = F.one_hot(torch.tensor(here), 10).float()
            explores = torch.rand(()) < max(0.2, 1 - step / 300)
            act = int(torch.randint(2, (1,))) if explores else int(model(state).argmax())
            there = here + 2 * act - 1
            ended = there in (0, 9)
            seen.append(
                (here, act, float(there == 9) + 0.1 * float(there == 0), there, float(ended))
            )
            here = int(torch.randint(1, 9, (1,))) if ended else there
            if step < 50:
                continue
            rows = torch.tensor([seen[int(row)] for row in data.picked(len(seen), 32)])
            before, after = (F.one_hot(rows[:, at].long(), 10).float() for at in (0, 3))
            wanted = rows[:, 2] + 0.9 * (1 - rows[:, 4]) * target(after).amax(1)
            value = model(before).gather(1, rows[:, 1:2].long()).squeeze(1)
            self.update(F.smooth_l1_loss(value, wanted))
            if step % 25 == 0:
                target.load_state_dict(model.state_dict())

    @healthy
    def bandit_policy_gradient(self) -> None:
        """REINFORCE with a running baseline and an entropy bonus on a bandit with context."""
        best = torch.randn(6, 4)
        policy = parts.mlp(6, 32, 4)
        baseline = 0.0
        for _ in self.watched(range(400), policy, adam(policy, 0.005), objective="reinforcement"):
            context = torch.randn(32, 6)
            choice = torch.distributions.Categorical(logits=policy(context))
            act = choice.sample()
            reward = (act == (context @ best).argmax(1)).float()
            chance = choice.log_prob(act)
            loss = -(chance * (reward - baseline)).mean() - 0.01 * choice.entropy().mean()
            baseline += 0.05 * (float(reward.mean()) - baseline)
            self.update(loss)

    @healthy
    def oscillator_physics_informed(self) -> None:
        """A differential equation.

        No targets but the equation itself, by second derivatives of the network.
        """
        model = parts.mlp(1, 32, 32, 1, act=nn.Tanh)
        for _ in self.watched(range(700), model, adam(model, 0.005)):
            time = (3 * torch.rand(64, 1)).requires_grad_()
            place = model(time)
            speed = torch.autograd.grad(place.sum(), time, create_graph=True)[0]
            pull = torch.autograd.grad(speed.sum(), time, create_graph=True)[0]
            zero = torch.zeros(1, 1, requires_grad=True)
            start = model(zero)
            rise = torch.autograd.grad(start.sum(), zero, create_graph=True)[0]
            self.update(
                (pull + place).square().mean()
                + 5 * (start - 1).square().mean()
                + 5 * rise.square().mean()
            )

    @healthy
    def painted_image(self) -> None:
        """An image is optimised until a frozen network sees in it what it sees in another one."""
        target = data.digit_images(self.seed)[0][:1]
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1)
        )
        net.requires_grad_(False)
        image = nn.Parameter(torch.rand(1, 1, 8, 8))
        optimizer = optim.Adam([image], lr=0.03)
        wanted = net(target)
        for _ in self.watched(range(300), net, optimizer):
            update(optimizer, F.mse_loss(net(image), wanted))
            with torch.no_grad():
                image.clamp_(0, 1)
