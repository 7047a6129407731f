"""Faulty programs of the set: layers, paths, losses."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, faulty, sgd, update


def _constant(module: nn.Module) -> None:
    if isinstance(module, nn.Conv1d | nn.Linear):
        nn.init.constant_(module.weight, 0.05)
        nn.init.zeros_(module.bias)


class _Adapter(nn.Module):
    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(frozen.in_features, 8))
        self.up = nn.Parameter(torch.zeros(8, frozen.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.down @ self.up


class FaultyLayers(Programs):
    """Faulty programs whose layers cannot learn as they stand: starting weights, depth, modes, normalisation."""

    @faulty("H822", shows="H814 H815 H823 H828 H830 H847")
    def weights_all_zero(self) -> None:
        """A network by hand whose weight matrices all start at 0."""
        w1, b1 = nn.Parameter(torch.zeros(64, 32)), nn.Parameter(torch.zeros(32))
        w2, b2 = nn.Parameter(torch.zeros(32, 10)), nn.Parameter(torch.zeros(10))
        params = nn.ParameterList([w1, b1, w2, b2])
        x, y, *_ = data.table("digits", self.seed)
        opt = optim.SGD(params, lr=0.1, momentum=0.9)
        stream = data.draws((x, y), 32, 400)
        self.descend(params, opt, stream, lambda a, b: F.cross_entropy((a @ w1 + b1).relu() @ w2 + b2, b))

    @faulty("H822", shows="H828 H823 H848")
    def weights_all_alike(self) -> None:
        """constant_ for every layer of a classifier of sounds: all filters are one filter for ever."""

        def sample(count: int) -> tuple[Tensor, Tensor]:
            kind = torch.randint(5, (count,))
            t = torch.arange(96) / 96 + torch.rand(count, 1)
            return (((15 + 14 * kind[:, None]) * t).sin()[:, None] + 0.2 * torch.randn(count, 1, 96), kind)

        model = nn.Sequential(
            nn.Conv1d(1, 12, 9, 2),
            nn.ReLU(),
            nn.Conv1d(12, 16, 5, 2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            *parts.mlp(16, 16, 5),
        )
        model.apply(_constant)
        for _ in self.watched(range(400), model, adam(model, 0.005)):
            x, y = sample(32)
            self.update(F.cross_entropy(model(x), y))

    @faulty("H822 H815", shows="H814 H823 H828")
    def adapters_both_zero(self) -> None:
        """Low-rank adapters with both factors at 0: each one's gradient holds the other as a factor."""
        model = nn.Sequential(nn.Flatten(), _Adapter(nn.Linear(64, 64)), nn.ReLU(), _Adapter(nn.Linear(64, 10)))
        optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.005, weight_decay=0.0)
        self.fit(model, optimizer, data.draws(data.digit_images(self.seed), 32, 300), F.cross_entropy)

    @faulty("H848", shows="H828 H830 H823 H824 H847")
    def twelve_sigmoids_deep(self) -> None:
        """Twelve sigmoid layers in a row: nothing of the gradient arrives at the first ones."""
        act: type[nn.Module] = nn.Sigmoid
        layers: list[nn.Module] = [nn.Linear(2, 32)]
        for _ in range(11):
            layers += [act(), nn.Linear(32, 32)]
        net = nn.Sequential(*layers, act(), nn.Linear(32, 2))
        for _ in self.watched(range(400), net, adam(net, 0.001)):
            x, y = data.moons(64)
            self.update(F.cross_entropy(net(x), y))

    @faulty("H847", shows="H815 H823 H828 H830 H848")
    def biases_far_below_zero(self) -> None:
        """A "sparse" start with biases of -20 leaves every rectified unit silent for good."""
        x = torch.randn(600, 5)
        y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3].abs()
        net = parts.mlp(5, 48, 48, 1)
        start = -20.0
        for layer in net:
            if isinstance(layer, nn.Linear) and layer.out_features > 1:
                nn.init.constant_(layer.bias, start)
        for _ in self.watched(range(400), net, adam(net, 0.003)):
            i = torch.randint(500, (50,))
            self.update(F.mse_loss(net(x[i]), y[i]))

    @faulty("H801 H802 H848", shows="H804 H803 H825 H826 H827 H828")
    def recurrence_that_explodes(self) -> None:
        """A linear recurrence whose matrix is 1.6 times a rotation, over 200 steps: overflow in the first batches."""
        gain = 1.6
        inside, matrix = nn.Linear(1, 16), nn.Parameter(gain * torch.linalg.qr(torch.randn(16, 16)).Q)
        head = nn.Linear(16, 1)
        model = nn.ModuleDict({"inside": inside, "head": head})
        model.register_parameter("matrix", matrix)

        def forward(x: Tensor) -> Tensor:
            h = torch.zeros(len(x), 16)
            for t in range(x.shape[1]):
                h = h @ matrix + inside(x[:, t : t + 1])
            return head(h)

        def sample(count: int) -> tuple[Tensor, Tensor]:
            x = torch.randn(count, 200)
            return (x, x[:, -1:] - x[:, -2:-1])

        for _ in self.watched(range(100), model, sgd(model, 0.001)):
            x, y = sample(16)
            self.update(F.mse_loss(forward(x), y))

    @faulty("H834 H828", shows="H824 H830 H847")
    def dropout_keeps_one_in_twenty(self) -> None:
        """Dropout(0.95), in the belief that 0.95 is what is kept, in each of four layers."""
        x, y, held_x, held_y = data.table("digits", self.seed)
        p = 0.95
        layers: list[nn.Module] = []
        for a, b in ((64, 32), (32, 32), (32, 32), (32, 32)):
            layers += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(p)]
        net = nn.Sequential(*layers, nn.Linear(32, 10))
        for _ in self.watched(range(12), net, adam(net, 0.003)):
            net.train()
            for i in torch.randperm(len(x)).split(32):
                self.update(F.cross_entropy(net(x[i]), y[i]))
            net.eval()
            self.watching.validated(F.cross_entropy(net(held_x), held_y).item())

    @faulty("H834", shows="H801 H802 H804 H825 H826 H827 H828 H847 H848")
    def evaluated_and_never_back(self) -> None:
        """eval() for a first look at the loss, no train() after: BatchNorm uses statistics it never took."""
        x, y, held_x, held_y = data.digit_images(self.seed)
        x, held_x = 255 * x, 255 * held_x
        layers: list[nn.Module] = []
        for k in range(3):
            layers += [nn.Conv2d(1 if k == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
        optimizer = sgd(model, 0.02, momentum=0.9)

        def look() -> float:
            model.eval()
            with torch.no_grad():
                return F.cross_entropy(model(held_x), held_y).item()

        with self.watch(model, optimizer) as watching:
            watching.validated(look())
            for _ in range(4):
                for i in torch.randperm(len(x)).split(32):
                    update(optimizer, F.cross_entropy(model(x[i]), y[i]))
                watching.validated(look())

    @faulty("H835", shows="H834 H828")
    def batch_norm_on_pairs(self) -> None:
        """BatchNorm1d with batches of two: after it each unit is +1 or -1 and says only which row was larger."""
        x = torch.randn(800, 6) * 2
        y = x[:, 0] + 2 * x[:, 1].sin() - x[:, 2].abs()
        y = (y - y.mean()) / y.std()
        batch_size = 2
        net = nn.Sequential(
            nn.Linear(6, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )
        opt = adam(net, 0.004)
        with self.watch(net, opt) as watching:
            for _ in range(600):
                net.train()
                i = torch.randperm(600)[:batch_size]
                update(opt, F.mse_loss(net(x[i])[:, 0], y[i]))
            net.eval()
            watching.validated(F.mse_loss(net(x[600:])[:, 0], y[600:]).item())

    @faulty("H834", shows="H833")
    def validated_in_training_mode(self) -> None:
        """Validation without eval(): what is reported, and here scored, is the network with half its units gone."""
        x, y, held_x, held_y = data.table("digits", self.seed)
        net = nn.Sequential(
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Dropout(0.7),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Dropout(0.7),
            nn.Linear(64, 10),
        )
        for _ in self.watched(range(12), net, adam(net, 0.002)):
            net.train()
            for i in torch.randperm(len(x)).split(32):
                self.update(F.cross_entropy(net(x[i]), y[i]))
            with torch.no_grad():
                out = net(held_x)
                self.watching.validated(F.cross_entropy(out, held_y).item())


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
        for p in self.features.parameters():
            p.requires_grad = False
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


class _Waves(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = [nn.Linear(1 if k == 0 else 24, 24) for k in range(depth)]
        self.last = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(120, 6), nn.Embedding(80, 6)
        self.mix = nn.Linear(12, 1)

    @torch.no_grad()
    def embed(self, user: Tensor, film: Tensor) -> Tensor:
        return torch.cat([self.users(user) * self.films(film), self.users(user)], 1)

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return self.mix(self.embed(user, film))[:, 0]


class FaultyPaths(Programs):
    """Faulty programs in which no gradient or no update reaches the weights: cut graphs, wrong parameters."""

    @faulty("H808 H809 H810", shows="H823 H828 H824 H813")
    def head_replaced_after_the_optimizer(self) -> None:
        """Fine-tuning: the optimizer is made, and then the last layer is replaced by one for the new classes."""
        x, y, *_ = data.digit_images(self.seed)
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), *parts.mlp(288, 24, 5))
        pretrain = adam(model, 0.005)
        for _ in range(150):
            i = torch.randint(len(x), (32,))
            update(pretrain, F.cross_entropy(model(x[i]), y[i] // 2))
        optimizer = sgd(model, 0.01, momentum=0.9)
        model[:5].requires_grad_(False)
        model[5] = nn.Linear(24, 10)
        self.fit(model, optimizer, data.draws((x, y), 32, 300), F.cross_entropy)

    @faulty("H810 H808", shows="H823 H828 H813")
    def optimizer_holds_the_frozen_part(self) -> None:
        """A frozen backbone with a new head, and the optimizer is given the backbone."""
        net = _Backbone()
        opt = adam(net.features, 0.001)
        self.fit(net, opt, data.epochs(data.digit_images(self.seed), 64, 10), F.cross_entropy, frozen=("features",))

    @faulty("H808", shows="H828 H824 H823")
    def layers_in_a_python_list(self) -> None:
        """Layers kept in a plain list: parameters() does not see them, only the last layer learns."""
        x = torch.rand(500, 1) * 6 - 3
        y = (3 * x).sin()
        model = _Waves()
        for _ in self.watched(range(900), model, adam(model, 0.005)):
            i = torch.randint(500, (64,))
            self.update(F.mse_loss(model(x[i]), y[i]))

    @faulty("H814", shows="H823 H828 H813")
    def features_through_numpy(self) -> None:
        """Features pass through numpy on their way, so the convolutions never get a gradient."""

        def sample(count: int) -> tuple[Tensor, Tensor]:
            kind = torch.randint(4, (count,))
            t = torch.arange(96) / 96 + torch.rand(count, 1)
            return (((20 + 4 * kind[:, None]) * t).sin()[:, None] + 0.3 * torch.randn(count, 1, 96), kind)

        model = parts.Wired(
            lambda self, x: self.fc(
                self.rnn(torch.from_numpy(self.conv(x).detach().numpy()).transpose(1, 2))[0][:, -1]
            ),
            conv=nn.Sequential(nn.Conv1d(1, 4, 9, stride=2), nn.ReLU(), nn.Conv1d(4, 4, 9, stride=2), nn.ReLU()),
            rnn=nn.GRU(4, 8, batch_first=True),
            fc=nn.Linear(8, 4),
        )
        for _ in self.watched(range(300), model, adam(model, 0.01)):
            x, y = sample(32)
            self.update(F.cross_entropy(model(x), y))

    @faulty("H813 H814", shows="H823 H828 H815")
    def loss_rebuilt_from_its_value(self) -> None:
        """The complaint that element 0 does not require grad was silenced by a new tensor that does."""
        x, y, *_ = data.table("wine", self.seed)
        net = parts.mlp(13, 32, 3)
        opt = adam(net, 0.01)
        for _ in self.watched(range(250), net, opt):
            i = torch.randint(len(x), (16,))
            opt.zero_grad()
            total = 0.0
            for row in i.split(4):
                total += F.cross_entropy(net(x[row]), y[row]).item() / 4
            loss = torch.tensor(total, requires_grad=True)
            loss.backward()
            opt.step()

    @faulty("H814", shows="H823 H828 H813")
    def embeddings_under_no_grad(self) -> None:
        """A recommender whose look-up was decorated with no_grad for inference and is used for training too."""
        user, film, score = data.ratings(self.seed)
        score = score - score.mean()
        model = _Towers()
        for _ in self.watched(range(12), model, adam(model, 0.02)):
            for i in torch.randperm(5000).split(64):
                self.update(F.mse_loss(model(user[i], film[i]), score[i]))

    @faulty("H814", shows="H823 H815 H813")
    def codes_by_threshold(self) -> None:
        """An autoencoder with binary codes: the threshold has no gradient and nothing carries one past it."""
        x, _, held, _ = data.digit_images(self.seed)
        x, held = x.flatten(1), held.flatten(1)
        enc, dec = nn.Linear(64, 12), parts.mlp(12, 64, 64)
        model = nn.ModuleDict({"enc": enc, "dec": dec})

        def code(batch: Tensor) -> Tensor:
            soft = torch.sigmoid(enc(batch))
            return (soft > 0.5).float()

        for _ in self.watched(range(700), model, adam(model, 0.005)):
            batch = x[torch.randint(len(x), (64,))]
            self.update(F.binary_cross_entropy_with_logits(dec(code(batch)), batch))

    @faulty("H815", shows="H823 H828 H814")
    def prediction_rounded_to_whole_stars(self) -> None:
        """Stars are whole numbers, so the prediction is rounded before the loss: gradients of exactly 0."""
        x = torch.randn(800, 6)
        stars = (3 + x[:, 0] + x[:, 1] * x[:, 2]).round().clamp(1, 5)
        model = parts.mlp(6, 32, 1)
        for _ in self.watched(range(400), model, adamw(model, 0.01)):
            i = torch.randint(700, (50,))
            guess = torch.round(model(x[i]).squeeze(1))
            self.update(F.l1_loss(guess, stars[i]))


class FaultyLosses(Programs):
    """Faulty programs that minimise the wrong thing: wrong signs, or activations that the loss does not want."""

    @faulty("H836", shows="H828 H848 H824")
    def softmax_layer_then_cross_entropy(self) -> None:
        """The class ends in a softmax layer, the criterion takes logits."""
        x, y, *_ = data.table("digits", self.seed)
        model = parts.Wired(
            lambda self, x: self.softmax(self.output(torch.sigmoid(self.hidden2(torch.sigmoid(self.hidden1(x)))))),
            hidden1=nn.Linear(64, 40),
            hidden2=nn.Linear(40, 40),
            output=nn.Linear(40, 10),
            softmax=nn.Softmax(dim=1),
        )
        criterion = nn.CrossEntropyLoss()
        self.fit(model, sgd(model, 0.1, momentum=0.9), data.epochs((x, y), 32, 12), criterion)

    @faulty("H855", shows="H840 H828")
    def probabilities_into_kl_div(self) -> None:
        """Distillation that gives kl_div probabilities where it wants their logarithms."""
        x = torch.randn(800, 10)
        teacher = parts.mlp(10, 32, 6, act=nn.Tanh)
        student = parts.mlp(10, 24, 6)
        with torch.no_grad():
            soft = (3 * teacher(x)).softmax(-1)
        for _ in self.watched(range(400), student, adam(student, 0.01)):
            i = torch.randint(700, (50,))
            probs = F.softmax(student(x[i]), dim=-1)
            self.update(F.kl_div(probs, soft[i], reduction="batchmean"))

    @faulty("H838", shows="H828")
    def sigmoid_twice_in_segmentation(self) -> None:
        """The segmenter returns probabilities, the loss is binary cross-entropy with logits."""
        images, masks = data.discs(120)
        net = parts.Wired(
            lambda self, x: torch.sigmoid(self.head(self.body(x))),
            body=nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()),
            head=nn.Conv2d(12, 1, 1),
        )
        bce = nn.BCEWithLogitsLoss()
        for _ in self.watched(range(8), net, sgd(net, 0.1, momentum=0.9)):
            for i in torch.randperm(100).split(5):
                self.update(bce(net(images[i]), masks[i]))

    @faulty("H839", shows="H855 H840 H828")
    def nll_of_plain_softmax(self) -> None:
        """A language model by two characters of context: softmax where log_softmax belongs."""
        text, vocab = data.library_text()
        model = parts.Wired(
            lambda self, pair: F.softmax(
                self.linear2(F.relu(self.linear1(self.embed(pair).view(len(pair), -1)))), dim=1
            ),
            embed=nn.Embedding(vocab, 24),
            linear1=nn.Linear(48, 64),
            linear2=nn.Linear(64, vocab),
        )
        optimizer = adam(model, 0.003)
        loss_function = nn.NLLLoss()
        for _ in self.watched(range(600), model, optimizer):
            x, y = data.text_windows(text, 64, 2)
            model.zero_grad()
            loss = loss_function(model(x), y[:, 1])
            loss.backward()
            optimizer.step()

    @faulty("H839", shows="H855 H840 H828 H826 H825")
    def nll_of_raw_scores(self) -> None:
        """The log_softmax was lost when the model was tidied up: nll_loss on unbounded scores of moons."""
        w1, w2 = nn.Parameter(torch.randn(2, 32)), nn.Parameter(torch.randn(32, 2) * 0.1)
        params = nn.ParameterList([w1, w2])
        opt = optim.SGD(params, lr=0.1)

        def logits(x: Tensor) -> Tensor:
            return torch.einsum("nh,hc->nc", torch.einsum("nd,dh->nh", x, w1).tanh(), w2)

        for _ in self.watched(range(500), params, opt):
            x, y = data.moons(64)
            scores = logits(3 * x)
            update(opt, F.nll_loss(scores, y))

    @faulty("H831", shows="H828 H826")
    def policy_gradient_downhill(self) -> None:
        """REINFORCE that minimises the weighted log-probability: the minus sign is missing."""
        rule = torch.randn(4, 4)
        policy = parts.mlp(4, 32, 4)
        rewards = []
        for _ in self.watched(range(400), policy, adam(policy, 0.005), objective="reinforcement"):
            state = torch.randn(32, 4)
            m = torch.distributions.Categorical(F.softmax(policy(state), dim=1))
            action = m.sample()
            reward = ((state @ rule).argmax(1) == action).float()
            advantage = (reward - reward.mean()) / (reward.std() + 1e-06)
            self.update((m.log_prob(action) * advantage).mean())
            rewards.append(reward.mean().item())

    @faulty("H831", shows="H826 H828 H840 H825")
    def signal_to_noise_minimised(self) -> None:
        """A denoiser whose loss is the signal-to-noise ratio itself, not its negative."""
        clean = data.seasons(200, 64)[:, None]
        net = nn.Sequential(nn.Conv1d(1, 16, 7, padding=3), nn.ReLU(), nn.Conv1d(16, 1, 7, padding=3))

        def snr(estimate: Tensor, target: Tensor) -> Tensor:
            noise = F.mse_loss(estimate, target)
            return 10 * torch.log10(target.pow(2).mean() / (noise + 1e-08))

        for _ in self.watched(range(300), net, adam(net, 0.002)):
            x = clean[torch.randint(200, (16,))]
            self.update(snr(net(x + 0.5 * torch.randn_like(x)), x))

    @faulty("H831", shows="H840 H826 H825 H828 H801 H802 H804")
    def divergence_with_the_wrong_sign(self) -> None:
        """A VAE whose KL term lost its minus: the loss pays for a posterior far away from the prior."""
        x, _, held, _ = data.digit_images(self.seed)
        x, held = x.flatten(1), held.flatten(1)
        enc, dec = nn.Linear(64, 12), parts.mlp(6, 64, 64)
        model = nn.ModuleDict({"enc": enc, "dec": dec})
        optimizer = adam(model, 0.003)

        def kl(mu: Tensor, logvar: Tensor) -> Tensor:
            return 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()

        def run(batch: Tensor) -> Tensor:
            mu, logvar = enc(batch).chunk(2, 1)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return F.mse_loss(dec(z), batch, reduction="sum") / len(batch) + kl(mu, logvar)

        self.descend(model, optimizer, range(900), lambda _: run(x[torch.randint(len(x), (64,))]))
