"""Healthy programs of the set: sequences, representation."""

# ruff: noqa: D101, D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, healthy, sgd, update


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
        return (self.out(hidden), state)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = parts.mlp(width, 2 * width, width, act=nn.GELU)

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


class HealthySequences(Programs):
    """Language models, recurrent nets, attention, alignment-free speech-like losses."""

    @healthy
    def char_lm_lstm(self) -> None:
        ids, characters = data.text()
        model = CharLSTM(characters)
        criterion = nn.CrossEntropyLoss()
        optimizer = adam(model, 0.005)
        for _ in self.watched(range(300), model, optimizer):
            x, y = data.windows(ids, 24, 16)
            optimizer.zero_grad()
            logits, _ = model(x)
            loss = criterion(logits.reshape(-1, characters), y.reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    @healthy
    def truncated_backpropagation(self) -> None:
        """Neighbouring pieces of the text in order; the state is carried on and detached."""
        ids, characters = data.text()
        rows = ids[: len(ids) // 12 * 12].view(12, -1)
        model = CharLSTM(characters, hidden=48)
        optimizer = optim.RMSprop(model.parameters(), lr=0.003)
        with self.watch(model, optimizer):
            state = None
            for start in range(0, 280 * 16, 16):
                x, y = rows[:, start : start + 16], rows[:, start + 1 : start + 17]
                if state is not None:
                    state = tuple(part.detach() for part in state)
                logits, state = model(x, state)
                update(optimizer, F.cross_entropy(logits.transpose(1, 2), y), clip=0.5)

    @healthy
    def transformer_tied_weights(self) -> None:
        ids, characters = data.text()
        model = TinyGPT(characters, 24)
        optimizer = adamw(model, 0.003, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                optim.lr_scheduler.LinearLR(optimizer, 0.001, 1.0, total_iters=30),
                optim.lr_scheduler.CosineAnnealingLR(optimizer, 270),
            ],
            milestones=[30],
        )
        for _ in self.watched(range(300), model, optimizer, scheduler=scheduler, total_steps=300):
            x, y = data.windows(ids, 24, 12)
            logits = model(x)
            update(optimizer, F.cross_entropy(logits.view(-1, characters), y.flatten()), clip=1.0)
            scheduler.step()

    @healthy
    def masked_lm(self) -> None:
        """BERT-like: 15 % of the characters are masked, all other targets are ignored."""
        ids, characters = data.text()
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
        loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
        for _ in self.watched(range(350), model, adam(model, 0.002)):
            x, _ = data.windows(ids, 20, 16)
            hidden = torch.rand(x.shape) < 0.15
            labels = x.masked_fill(~hidden, -100)
            inputs = x.masked_fill(hidden, mask_id)
            states = model["encoder"](model["embed"](inputs) + model["place"].weight)
            self.update(loss_fn(model["head"](states).view(-1, characters), labels.view(-1)))

    @healthy
    def gru_counts_ones(self) -> None:
        """Whether a sequence of bits holds more ones than zeros, read from the last state."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gru = nn.GRU(1, 32)
                self.fc = nn.Linear(32, 2)

            def forward(self, x: Tensor) -> Tensor:
                _, last = self.gru(x)
                return self.fc(last[-1])

        net = Net()
        for _ in self.watched(range(350), net, adam(net, 0.003)):
            bits = torch.randint(0, 2, (15, 64, 1))
            labels = (bits.sum(0)[:, 0] > 7).long()
            out = net(bits.float())
            self.update(F.cross_entropy(out, labels))

    @healthy
    def seq2seq_reverses(self) -> None:
        """Encoder and decoder with teacher forcing; one optimizer each."""
        embedding = nn.Embedding(12, 24)
        encoder = nn.GRU(24, 64, batch_first=True)
        decoder = nn.GRU(24, 64, batch_first=True)
        project = nn.Linear(64, 12)
        encoder_parts = nn.ModuleDict({"embedding": embedding, "rnn": encoder})
        decoder_parts = nn.ModuleDict({"rnn": decoder, "project": project})
        encoder_optimizer = adam(encoder_parts, 0.005)
        decoder_optimizer = adam(decoder_parts, 0.005)
        start = torch.full((32, 1), 10)
        for _ in self.watched(
            range(400),
            {"encoder": encoder_parts, "decoder": decoder_parts},
            {"encoder": encoder_optimizer, "decoder": decoder_optimizer},
        ):
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

    @healthy
    def ctc_noisy_tones(self) -> None:
        """Each symbol lasts some frames; the alignment is unknown. The loss starts far above its end."""
        codes = torch.randn(6, 10)
        model = nn.Sequential(nn.Conv1d(10, 48, 3, padding=1), nn.ReLU(), nn.Conv1d(48, 7, 3, padding=1))
        ctc = nn.CTCLoss(blank=0, zero_infinity=True)
        for _ in self.watched(range(300), model, adam(model, 0.003)):
            labels = torch.randint(1, 7, (16, 5))
            frames = codes[labels - 1].repeat_interleave(5, dim=1) + 0.3 * torch.randn(16, 25, 10)
            log_probs = model(frames.transpose(1, 2)).permute(2, 0, 1).log_softmax(2)
            self.update(ctc(log_probs, labels, torch.full((16,), 25), torch.full((16,), 5)))

    @healthy
    def conv1d_audio_events(self) -> None:
        """Raw waves at full 16-bit scale go through a BatchNorm first, so their size does not matter."""
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
        time = torch.arange(256) / 256
        for _ in self.watched(range(400), net, sgd(net, 0.05, momentum=0.9)):
            kinds = torch.randint(0, 4, (32,))
            phase = torch.rand(32, 1) * 2 * torch.pi
            waves = torch.sin(2 * torch.pi * (4 + 6 * kinds[:, None]) * time + phase) + torch.randn(32, 256)
            logits = net(waves[:, None] * 8000)
            self.update(F.cross_entropy(logits, kinds))

    @healthy
    def sparse_embeddings(self) -> None:
        """Matrix factorisation with sparse gradients; most rows get none in a step."""
        users, items = 800, 400
        true_users, true_items = torch.randn(users, 3), torch.randn(items, 3)
        tables = nn.ModuleDict(
            {"user": nn.Embedding(users, 8, sparse=True), "item": nn.Embedding(items, 8, sparse=True)}
        )
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.1)
        optimizer = optim.SparseAdam(list(tables.parameters()), lr=0.02)
        for _ in self.watched(range(900), tables, optimizer):
            u, i = torch.randint(0, users, (256,)), torch.randint(0, items, (256,))
            rating = (true_users[u] * true_items[i]).sum(1)
            predicted = (tables["user"](u) * tables["item"](i)).sum(1)
            update(optimizer, F.mse_loss(predicted, rating))

    @healthy
    def word_vectors_negative_sampling(self) -> None:
        """word2vec over characters, the loss written by hand with logsigmoid."""
        ids, characters = data.text()
        centre, context = nn.Embedding(characters, 16), nn.Embedding(characters, 16)
        nn.init.zeros_(context.weight)
        optimizer = optim.Adam([*centre.parameters(), *context.parameters()], lr=0.01)
        for _ in self.watched(range(700), {"centre": centre, "context": context}, optimizer):
            at = torch.randint(2, len(ids) - 2, (128,))
            near = ids[at + torch.randint(1, 3, (128,))]
            random = torch.randint(0, characters, (128, 5))
            vector = centre(ids[at])
            good = F.logsigmoid((vector * context(near)).sum(-1))
            bad = F.logsigmoid(-(context(random) @ vector[:, :, None]).squeeze(-1)).sum(-1)
            update(optimizer, -(good + bad).mean())

    @healthy
    def variable_lengths_packed(self) -> None:
        lstm = nn.LSTM(4, 32, bidirectional=True, batch_first=True)
        head = nn.Linear(64, 1)
        model = nn.ModuleList([lstm, head])
        for _ in self.watched(range(250), model, adam(model, 0.005)):
            lengths = torch.randint(2, 12, (32,))
            x = torch.randn(32, 12, 4) * (torch.arange(12) < lengths[:, None])[..., None]
            y = x[:, :, 0].sum(1) / lengths.sqrt()
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, (last, _) = lstm(packed)
            self.update(F.mse_loss(head(torch.cat([last[0], last[1]], 1)).squeeze(1), y))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc21 = nn.Linear(64, 6)
        self.fc22 = nn.Linear(64, 6)
        self.fc3 = nn.Linear(6, 64)
        self.fc4 = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return (torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar)


class ForwardForwardLayer(nn.Linear):
    """Trains itself, as in the published example; gradients of the other layers do not exist."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.optimizer = optim.Adam(self.parameters(), lr=0.03)

    def forward(self, x: Tensor) -> Tensor:
        direction = x / (x.norm(2, 1, keepdim=True) + 0.0001)
        return torch.relu(direction @ self.weight.T + self.bias)

    def train_once(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        good = self.forward(positive).pow(2).mean(1)
        bad = self.forward(negative).pow(2).mean(1)
        loss = F.softplus(torch.cat([2 - good, bad - 2])).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return (self.forward(positive).detach(), self.forward(negative).detach())


class HealthyRepresentation(Programs):
    """No labels, or losses whose level means little: generative, contrastive, adversarial."""

    @healthy
    def autoencoder(self) -> None:
        x, y, *_ = data.digits(self.seed)
        encoder = parts.mlp(64, 32, 8)
        decoder = nn.Sequential(*parts.mlp(8, 32, 64), nn.Sigmoid())
        model = nn.Sequential(encoder, decoder)
        optimizer = adam(model, 0.003)
        stream = data.batches((x, y), 64, 600)
        self.descend(model, optimizer, stream, lambda images, _: F.mse_loss(model(images), images))

    @healthy
    def vae(self) -> None:
        """As in the well-known example: summed binary cross-entropy plus divergence, in the thousands."""
        model = VAE()
        optimizer = adam(model, 0.001)
        model.train()
        for given, _ in self.watched(data.batches(data.digits(self.seed), 64, 600), model, optimizer):
            optimizer.zero_grad()
            recon, mu, logvar = model(given)
            bce = F.binary_cross_entropy(recon, given, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = bce + kld
            loss.backward()
            optimizer.step()

    @healthy
    def denoising_diffusion(self) -> None:
        x, y, *_ = data.digits(self.seed)
        net = parts.mlp(65, 128, 128, 64, act=nn.SiLU)
        kept = torch.linspace(0.999, 0.01, 50)
        for images, _ in self.watched(data.batches((2 * x - 1, y), 64, 600), net, adamw(net, 0.002)):
            t = torch.randint(0, 50, (len(images), 1))
            noise = torch.randn_like(images)
            noisy = kept[t].sqrt() * images + (1 - kept[t]).sqrt() * noise
            predicted = net(torch.cat([noisy, t / 50], dim=1))
            self.update(F.mse_loss(predicted, noise))

    @healthy
    def dcgan(self) -> None:
        """As in the tutorial: D is cleared before its own pass only, so G's pass leaves gradients in it."""
        x, y, *_ = data.digits(self.seed)
        generator = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(32, 1, 4, 2, 1),
            nn.Tanh(),
        )
        critic = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(16, 1, 4), nn.Flatten(0)
        )
        critic_optimizer = adam(critic, 0.001, betas=(0.5, 0.999))
        generator_optimizer = adam(generator, 0.001, betas=(0.5, 0.999))
        criterion = nn.BCEWithLogitsLoss()
        ones, zeros = torch.ones(32), torch.zeros(32)
        for real, _ in self.watched(
            data.batches((2 * x.view(-1, 1, 8, 8) - 1, y), 32, 300),
            {"G": generator, "D": critic},
            {"G": generator_optimizer, "D": critic_optimizer},
            objective="adversarial",
        ):
            critic.zero_grad()
            criterion(critic(real), ones).backward()
            fake = generator(torch.randn(32, 16, 1, 1))
            criterion(critic(fake.detach()), zeros).backward()
            critic_optimizer.step()
            generator.zero_grad()
            criterion(critic(fake), ones).backward()
            generator_optimizer.step()

    @healthy
    def wgan_clipping(self) -> None:
        """The critic's weights are clamped after each of its five steps for one of the generator."""
        generator = parts.mlp(4, 32, 2)
        critic = parts.mlp(2, 32, 1)
        optimizer_g = optim.RMSprop(generator.parameters(), lr=0.001)
        optimizer_c = optim.RMSprop(critic.parameters(), lr=0.001)
        models = {"generator": generator, "critic": critic}
        for _ in self.watched(
            range(150), models, {"generator": optimizer_g, "critic": optimizer_c}, objective="adversarial"
        ):
            for _ in range(5):
                angle = torch.rand(64) * 2 * torch.pi
                real = torch.stack([angle.cos(), angle.sin()], 1) + 1
                fake = generator(torch.randn(64, 4)).detach()
                update(optimizer_c, critic(fake).mean() - critic(real).mean())
                with torch.no_grad():
                    for weight in critic.parameters():
                        weight.clamp_(-0.1, 0.1)
            update(optimizer_g, -critic(generator(torch.randn(64, 4))).mean())

    @healthy
    def wgan_gradient_penalty(self) -> None:
        generator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
        critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        opt_g = adam(generator, 0.0005, betas=(0.0, 0.9))
        opt_c = adam(critic, 0.003, betas=(0.0, 0.9))
        models = {"generator": generator, "critic": critic}
        for step in self.watched(range(1000), models, {"generator": opt_g, "critic": opt_c}, objective="adversarial"):
            real = torch.randn(48, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.5]]) + 1
            fake = generator(torch.randn(48, 2))
            between = torch.lerp(real, fake.detach(), torch.rand(48, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = 2 * ((slope.norm(dim=1) - 1) ** 2).mean()
            update(opt_c, critic(fake.detach()).mean() - critic(real).mean() + penalty)
            if step % 3 == 0:
                update(opt_g, -critic(fake).mean())

    @healthy
    def contrastive_info_nce(self) -> None:
        """Two noisy views of each digit; the label of row i is i."""
        encoder = parts.mlp(64, 128, 32)
        optimizer = adam(encoder, 0.001)

        def view(images: Tensor) -> Tensor:
            return (images + 0.2 * torch.randn_like(images)) * (torch.rand_like(images) > 0.2)

        for images, _ in self.watched(data.batches(data.digits(self.seed), 64, 400), encoder, optimizer):
            first = F.normalize(encoder(view(images)), dim=1)
            second = F.normalize(encoder(view(images)), dim=1)
            similarity = first @ second.T / 0.2
            labels = torch.arange(len(images))
            update(optimizer, (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2)

    @healthy
    def triplet(self) -> None:
        """More and more triplets are satisfied, so that batches with a loss of 0 become normal."""
        x, y, *_ = data.digits(self.seed)
        of_class = [torch.nonzero(y == c).flatten() for c in range(10)]
        net = parts.mlp(64, 64, 16)
        criterion = nn.TripletMarginLoss(margin=1.0)
        for _ in self.watched(range(500), net, adam(net, 0.001)):
            classes = torch.rand(32, 10).argsort(1)[:, :2].tolist()
            pick = [of_class[a][torch.randint(len(of_class[a]), (2,))] for a, _ in classes]
            others = torch.stack([of_class[b][torch.randint(len(of_class[b]), ())] for _, b in classes])
            pairs = torch.stack(pick)
            self.update(criterion(net(x[pairs[:, 0]]), net(x[pairs[:, 1]]), net(x[others])))

    @healthy
    def byol_like(self) -> None:
        """The target network never has gradients and follows as an exponential average."""
        online = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32))
        predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        target = copy.deepcopy(online)
        model = nn.ModuleDict({"online": online, "predictor": predictor, "target": target})
        optimizer = optim.Adam([*online.parameters(), *predictor.parameters()], lr=0.001)
        for images, _ in self.watched(data.batches(data.digits(self.seed), 64, 400), model, optimizer):
            one, two = (images + 0.3 * torch.randn_like(images) for _ in range(2))
            with torch.no_grad():
                wanted = F.normalize(target(two), dim=1)
            update(optimizer, 2 - 2 * (F.normalize(predictor(online(one)), dim=1) * wanted).sum(1).mean())
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.mul_(0.99).add_(fast, alpha=0.01)

    @healthy
    def forward_forward(self) -> None:
        x, y, *_ = data.digits(self.seed)
        layers = nn.ModuleList([ForwardForwardLayer(74, 64), ForwardForwardLayer(64, 64)])
        for images, labels in self.watched(
            data.batches((x, y), 64, 300),
            layers,
            {f"layer{number}": layer.optimizer for number, layer in enumerate(layers)},
        ):
            wrong = (labels + torch.randint(1, 10, labels.shape)) % 10
            positive = torch.cat([4.0 * F.one_hot(labels, 10), images], 1)
            negative = torch.cat([4.0 * F.one_hot(wrong, 10), images], 1)
            for layer in layers:
                positive, negative = layer.train_once(positive, negative)

    @healthy
    def variance_invariance_covariance(self) -> None:
        net = parts.mlp(64, 64, 16)
        optimizer = sgd(net, 0.02, momentum=0.9)
        for images, _ in self.watched(data.batches(data.digits(self.seed), 128, 300), net, optimizer):
            a, b = (net(images + 0.1 * torch.randn_like(images)) for _ in range(2))
            spread = sum(F.relu(1 - z.std(0)).mean() for z in (a, b))
            off = sum((torch.cov(z.T) - torch.diag(z.var(0))).pow(2).sum() / 16 for z in (a, b))
            update(optimizer, 25 * F.mse_loss(a, b) + 25 * spread + off, clip=10.0)
