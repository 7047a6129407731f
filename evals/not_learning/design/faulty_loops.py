"""Faulty programs of the set: wiring, rates."""

# ruff: noqa: D101, D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, faulty, follow, sgd, update


def small_net(inputs: int = 64, outputs: int = 10) -> nn.Sequential:
    return parts.mlp(inputs, 48, 48, outputs)


class NoGradEncoder(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.out = nn.Linear(4, characters)

    @torch.no_grad()
    def encode(self, ids: Tensor) -> Tensor:
        return self.rnn(self.embed(ids))[0]

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.encode(ids))


class FaultyWiring(Programs):
    """Faulty programs in which gradients, parameters and optimizer are not joined as they should be."""

    @faulty("H811", shows="H801 H802 H804 H826 H827 H828 H832 H825 H847 H848")
    def forgotten_zero_grad(self) -> None:
        model = small_net()
        optimizer = sgd(model, 0.05, momentum=0.9)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 400), model, optimizer):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()

    @faulty("H811", shows="H801 H802 H804 H826 H827 H828 H832 H825 H847 H848")
    def zero_grad_once_an_epoch(self) -> None:
        x, y = data.curve(self.seed)
        net = parts.mlp(8, 64, 1, act=nn.Tanh)
        optimizer = sgd(net, 0.1, momentum=0.9)
        for _ in self.watched(range(25), net, optimizer):
            optimizer.zero_grad()
            for rows in torch.randperm(len(x)).split(50):
                loss = F.mse_loss(net(x[rows]), y[rows])
                loss.backward()
                optimizer.step()

    @faulty("H811", shows="H801 H802 H804 H826 H827 H828 H832 H825 H847 H848")
    def second_optimizer_never_cleared(self) -> None:
        """Encoder and head have an optimizer each; the zero_grad of the encoder's was forgotten."""
        ids, characters = data.text()
        encoder = nn.Sequential(nn.Embedding(characters, 24), nn.Flatten(), nn.Linear(8 * 24, 64), nn.Tanh())
        head = nn.Linear(64, characters)
        encoder_optimizer = sgd(encoder, 0.3)
        head_optimizer = sgd(head, 0.3)
        models = {"encoder": encoder, "head": head}
        for _ in self.watched(range(500), models, {"encoder": encoder_optimizer, "head": head_optimizer}):
            x, y = data.windows(ids, 8, 32)
            head_optimizer.zero_grad()
            loss = F.cross_entropy(head(encoder(x)), y[:, -1])
            loss.backward()
            encoder_optimizer.step()
            head_optimizer.step()

    @faulty("H812", shows="H823 H828 H832")
    def no_step(self) -> None:
        model = small_net()
        optimizer = adam(model, 0.001)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 400), model, optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()

    @faulty("H812", shows="H823 H828 H832")
    def accumulation_never_ends(self) -> None:
        """The remainder of a division by four never is four."""
        x, y = data.blobs(self.seed)
        model = small_net(20, 5)
        optimizer = sgd(model, 0.1)
        accumulate = 4
        for i, (xb, yb) in self.watched(enumerate(data.batches((x, y), 16, 800)), model, optimizer):
            (F.cross_entropy(model(xb), yb) / accumulate).backward()
            if i % accumulate == accumulate:
                optimizer.step()
                optimizer.zero_grad()

    @faulty("H809 H808", shows="H823 H828 H832 H811 H813")
    def optimizer_of_another_copy(self) -> None:
        """The optimizer was made before the model was copied to its place."""
        model = small_net()
        optimizer = adam(model, 0.001)
        model = copy.deepcopy(model)
        self.fit(model, optimizer, data.batches(data.digits(self.seed), 32, 400), F.cross_entropy)

    @faulty("H809 H808", shows="H823 H828 H832 H813")
    def average_is_trained_instead(self) -> None:
        """The optimizer holds the averaged copy, which the loss does not see."""
        model = parts.mlp(8, 32, 1, act=nn.Tanh)
        average = copy.deepcopy(model)
        optimizer = adamw(average, 0.003)
        for xb, yb in self.watched(data.batches(data.curve(self.seed), 50, 400), model, optimizer):
            model.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            follow(average, model, 0.01)

    @faulty("H809 H808", shows="H823 H828 H832 H813")
    def head_replaced_after_the_optimizer(self) -> None:
        """A frozen feature extractor gets a new head for ten classes, which nobody trains."""
        model = small_net(outputs=2)
        model[:4].requires_grad_(False)
        optimizer = optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        model[4] = nn.Linear(48, 10)
        self.fit(model, optimizer, data.batches(data.digits(self.seed), 32, 300), F.cross_entropy)

    @faulty("H810 H808", shows="H823 H828 H832 H813")
    def only_frozen_parameters_are_optimised(self) -> None:
        x, y, *_ = data.digits(self.seed)
        backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        head = nn.Linear(64, 10)
        backbone.requires_grad_(False)
        model = nn.Sequential(backbone, head)
        self.fit(model, sgd(backbone, 0.1, momentum=0.9), data.batches((x, y), 32, 300), F.cross_entropy)

    @faulty("H808", shows="H828 H832")
    def only_the_head_in_the_optimizer(self) -> None:
        net = parts.Wired(
            lambda self, x: self.head(self.body(x)),
            body=nn.Sequential(*parts.mlp(2, 48, 48, act=nn.Tanh), nn.Tanh()),
            head=nn.Linear(48, 2),
        )
        self.fit(net, adam(net.head, 0.01), data.batches(data.spirals(self.seed), 64, 400), F.cross_entropy)

    @faulty("H814", shows="H823 H828 H832")
    def features_through_numpy(self) -> None:
        """The bottleneck goes through numpy, so that everything before it stays as it was drawn."""
        encoder = parts.mlp(64, 32, 2)
        decoder = parts.mlp(2, 32, 10)
        model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 500), model, adam(model, 0.001)):
            code = torch.from_numpy(encoder(xb).detach().numpy())
            self.update(F.cross_entropy(decoder(code), yb))

    @faulty("H814", shows="H823 H828 H832")
    def no_grad_left_on_the_encoder(self) -> None:
        ids, characters = data.text()
        model = NoGradEncoder(characters)
        for _ in self.watched(range(300), model, adam(model, 0.003)):
            x, y = data.windows(ids, 16, 16)
            self.update(F.cross_entropy(model(x).transpose(1, 2), y))

    @faulty("H814", shows="H823 H828 H832")
    def threshold_in_the_path(self) -> None:
        """A hard decision between the layers: what lies before it never gets a gradient."""
        x, y, *_ = data.digits(self.seed)
        first, second = nn.Linear(64, 6), nn.Linear(6, 10)
        optimizer = optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)
        for xb, yb in self.watched(data.batches((x, y), 64, 500), {"first": first, "second": second}, optimizer):
            bits = (first(xb) > 0).float()
            update(optimizer, F.cross_entropy(second(bits), yb))

    @faulty("H815", shows="H823 H828 H832 H813 H814")
    def rounded_predictions(self) -> None:
        """Ratings are whole numbers, so the predictions were rounded before the loss."""
        x, y = data.curve(self.seed)
        y = (2 * y + 5).round()
        model = parts.mlp(8, 32, 1)
        optimizer = adam(model, 0.01)
        stream = data.batches((x, y), 32, 400)
        self.descend(model, optimizer, stream, lambda xb, yb: F.mse_loss(model(xb).round(), yb))

    @faulty("H813", shows="H823 H828 H832 H814")
    def loss_made_anew(self) -> None:
        """A complaint about a missing grad_fn was silenced with requires_grad=True."""
        model = small_net()
        optimizer = adam(model, 0.001)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 300), model, optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb).item()
            loss = torch.tensor(loss, requires_grad=True)
            loss.backward()
            optimizer.step()

    @faulty("H813", shows="H823 H828 H832 H814")
    def forgotten_backward(self) -> None:
        model = small_net(20, 5)
        optimizer = sgd(model, 0.1)
        losses = []
        for xb, yb in self.watched(data.batches(data.blobs(self.seed), 32, 400), model, optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            losses.append(loss.item())
            optimizer.step()

    @faulty("H813", shows="H823 H828 H832 H814 H815")
    def zero_grad_between_backward_and_step(self) -> None:
        model = parts.mlp(8, 32, 1)
        optimizer = adam(model, 0.01)
        for xb, yb in self.watched(data.batches(data.curve(self.seed), 32, 400), model, optimizer):
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()

    @faulty("H809 H808 H813", shows="H823 H828 H832 H814")
    def model_rebuilt_each_step(self) -> None:
        """The line that makes the model was moved into the loop; the optimizer still holds the first one."""
        model = small_net()
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 32, 300), model, sgd(model, 0.1)):
            model = small_net()
            self.update(F.cross_entropy(model(xb), yb))

    @faulty("H816 H817 H815", shows="H823 H828 H832 H818")
    def clipped_to_zero(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = small_net()
        self.fit(model, adam(model, 0.001), data.batches((x, y), 32, 400), F.cross_entropy, clip=0.0)

    @faulty("H816 H817", shows="H801 H802 H804 H826 H827 H828 H832 H825 H831 H818")
    def clipped_to_minus_one(self) -> None:
        """Minus one was meant as "off"; it turns the gradient round."""
        model = parts.mlp(8, 32, 1, act=nn.Tanh)
        self.fit(model, sgd(model, 0.01), data.batches(data.curve(self.seed), 32, 400), F.mse_loss, clip=-1.0)

    @faulty("H818", shows="H823 H828 H832 H824")
    def clipped_to_a_millionth(self) -> None:
        model = small_net()
        optimizer = sgd(model, 0.1, momentum=0.9)
        self.fit(model, optimizer, data.batches(data.digits(self.seed), 32, 500), F.cross_entropy, clip=1e-06)

    @faulty("H830 H814", shows="H828 H832")
    def output_ignores_input(self) -> None:
        """The features are computed, and the head is given something else."""
        x, y, *_ = data.digits(self.seed)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.features = nn.Linear(64, 32)
                self.token = nn.Parameter(torch.randn(1, 32))
                self.head = nn.Linear(32, 10)

            def forward(self, x: Tensor) -> Tensor:
                hidden = torch.relu(self.features(x))
                hidden = self.token.expand(len(x), -1)
                return self.head(hidden)

        net = Net()
        self.fit(net, adam(net, 0.001), data.batches((x, y), 64, 400), F.cross_entropy)


def fill_constant(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.05)
        nn.init.zeros_(module.bias)


class PlainRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(2, 32)
        self.again = nn.Linear(32, 32, bias=False)
        self.out = nn.Linear(32, 1)
        nn.init.normal_(self.again.weight, std=0.27)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        for step in range(x.size(1)):
            state = F.relu(self.into(x[:, step]) + self.again(state))
        return self.out(state)


class FaultyRates(Programs):
    """Faulty programs with wrong rates, schedules, initial weights or widths of numbers."""

    @faulty("H825", shows="H801 H802 H804 H826 H827 H828 H832 H847 H848 H815")
    def rate_of_ten(self) -> None:
        model = parts.mlp(64, 64, 64, 10)
        self.fit(model, sgd(model, 10), data.batches(data.digits(self.seed), 32, 400), F.cross_entropy)

    @faulty("H825", shows="H801 H802 H804 H826 H827 H828 H832 H847 H848")
    def adam_with_the_rate_of_sgd(self) -> None:
        net = parts.mlp(8, 64, 64, 1, act=nn.Tanh)
        self.fit(net, adam(net, 1.0), data.batches(data.curve(self.seed), 50, 500), F.mse_loss)

    @faulty("H825", shows="H801 H802 H804 H826 H827 H828 H832 H848")
    def regression_diverges(self) -> None:
        """Targets in the hundreds and a rate for targets of one: not a number after some steps."""
        model = parts.mlp(10, 32, 1)
        self.fit(model, sgd(model, 0.05), data.batches(data.diabetes(), 32, 300), F.mse_loss)

    @faulty("H825", shows="H801 H802 H804 H826 H827 H828 H832 H848 H847 H815")
    def summed_loss_with_the_rate_of_a_mean(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        criterion = nn.CrossEntropyLoss(reduction="sum")
        self.fit(model, sgd(model, 0.1, momentum=0.9), data.batches((x, y), 64, 400), criterion)

    @faulty("H825", shows="H801 H802 H804 H826 H827 H828 H832 H847 H848 H815")
    def momentum_of_0999(self) -> None:
        x, y = data.blobs(self.seed)
        model = parts.mlp(20, 48, 48, 5)
        self.fit(model, sgd(model, 0.3, momentum=0.999), data.batches((x, y), 32, 500), F.cross_entropy)

    @faulty("H824", shows="H823 H828 H832")
    def rate_of_a_billionth(self) -> None:
        model = parts.mlp(64, 64, 10)
        self.fit(model, adam(model, 1e-09), data.batches(data.digits(self.seed), 32, 500), F.cross_entropy)

    @faulty("H824", shows="H823 H828 H832")
    def sgd_with_a_rate_far_too_low(self) -> None:
        x, y = data.curve(self.seed)
        model = parts.mlp(8, 32, 1)
        self.fit(model, sgd(model, 1e-06), data.batches((x, y), 32, 600), F.l1_loss, total_steps=600)

    @faulty("H819", shows="H823 H828 H832 H824")
    def schedule_ends_early(self) -> None:
        """The schedule was made for 60 steps, the run has 800."""
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        optimizer = sgd(model, 0.05)
        scheduler = optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=60)
        stream = data.batches((x, y), 32, 800)
        self.fit(model, optimizer, stream, F.cross_entropy, scheduler=scheduler, total_steps=800)

    @faulty("H819 H820", shows="H823 H828 H832 H824")
    def step_decay_by_batch_instead_of_epoch(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        optimizer = sgd(model, 0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
        self.fit(model, optimizer, data.epochs((x, y), 40, 15), F.cross_entropy, scheduler=scheduler)

    @faulty("H820 H819", shows="H823 H828 H832 H824")
    def schedule_steps_with_each_micro_batch(self) -> None:
        """Eight scheduler steps for each update: the rate is 0 after an eighth of the run."""
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 48, 10, act=nn.Tanh)
        updates = 150
        optimizer = sgd(model, 0.4)
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / updates))
        for i, (xb, yb) in self.watched(
            enumerate(data.batches((x, y), 8, 8 * updates)),
            model,
            optimizer,
            scheduler=scheduler,
            total_steps=updates,
        ):
            (F.cross_entropy(model(xb), yb) / 8).backward()
            if i % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    @faulty("H854", shows="H823 H828 H832 H819 H820 H824")
    def plateau_fed_with_batch_losses(self) -> None:
        x, y, *_ = data.digits(self.seed)
        model = parts.mlp(64, 64, 10)
        optimizer = sgd(model, 0.05)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        for xb, yb in self.watched(data.batches((x, y), 16, 800), model, optimizer, scheduler=scheduler):
            loss = update(optimizer, F.cross_entropy(model(xb), yb))
            scheduler.step(loss.item())

    @faulty("H822", shows="H823 H828 H832 H814 H815")
    def all_zero_init(self) -> None:
        model = parts.mlp(64, 64, 10)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        self.fit(model, adam(model, 0.001), data.batches(data.digits(self.seed), 32, 400), F.cross_entropy)

    @faulty("H822", shows="H828 H832")
    def symmetric_init(self) -> None:
        """All units of a layer are equal and stay equal."""
        net = parts.mlp(8, 64, 64, 1, act=nn.Tanh).apply(fill_constant)
        self.fit(net, sgd(net, 0.02, momentum=0.9), data.batches(data.curve(self.seed), 50, 600), F.mse_loss)

    @faulty("H848", shows="H823 H828 H832")
    def deep_sigmoid_net(self) -> None:
        x, y, *_ = data.digits(self.seed)
        layers: list[nn.Module] = [nn.Linear(64, 32), nn.Sigmoid()]
        for _ in range(6):
            layers += [nn.Linear(32, 32), nn.Sigmoid()]
        model = nn.Sequential(*layers, nn.Linear(32, 10))
        self.fit(model, sgd(model, 0.1, momentum=0.9), data.batches((x, y), 32, 500), F.cross_entropy)

    @faulty("H848", shows="H828 H832 H847")
    def saturated_tanh(self) -> None:
        """Normal weights of deviation one in wide layers: every unit sits at plus or minus one."""
        model = parts.mlp(64, 256, 256, 10, act=nn.Tanh)
        for layer in (model[0], model[2]):
            nn.init.normal_(layer.weight, std=3.0)
        nn.init.normal_(model[4].weight, std=1.0)
        self.fit(model, sgd(model, 0.01), data.batches(data.digits(self.seed), 32, 300), F.cross_entropy)

    @faulty("H847", shows="H823 H828 H832 H814 H815 H848")
    def dead_relu(self) -> None:
        model = parts.mlp(64, 64, 64, 10)
        for layer in (model[0], model[2]):
            nn.init.constant_(layer.bias, -10.0)
        self.fit(model, sgd(model, 0.1), data.batches(data.digits(self.seed), 32, 400), F.cross_entropy)

    @faulty("H848", shows="H801 H802 H804 H826 H827 H828 H832 H825 H847 H815")
    def exploding_rnn(self) -> None:
        """The adding problem with rectified units, large recurrent weights, and no clipping."""
        rnn = PlainRNN()
        for _ in self.watched(range(300), rnn, sgd(rnn, 0.01)):
            values = torch.rand(32, 25)
            marks = torch.zeros(32, 25).scatter_(1, torch.rand(32, 25).argsort(1)[:, :2], 1.0)
            wanted = (values * marks).sum(1, keepdim=True)
            self.update(F.mse_loss(rnn(torch.stack([values, marks], 2)), wanted))

    @faulty("H858", shows="H828 H832 H848 H847")
    def weight_decay_of_ten(self) -> None:
        """Taken for a rate: each step takes a tenth of the weights away."""
        model = parts.mlp(64, 64, 64, 10)
        optimizer = adamw(model, 0.01, weight_decay=10.0)
        self.fit(model, optimizer, data.batches(data.digits(self.seed), 32, 400), F.cross_entropy)

    @faulty("H857", shows="H828 H832 H848")
    def dropout_of_095_everywhere(self) -> None:
        model = nn.Sequential(
            nn.Dropout(0.95),
            nn.Linear(8, 32),
            nn.ReLU(),
            nn.Dropout(0.95),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Dropout(0.95),
            nn.Linear(32, 1),
        )
        optimizer = adam(model, 0.001)
        model.train()
        self.fit(model, optimizer, data.batches(data.curve(self.seed), 50, 500), F.mse_loss)

    @faulty("H802", shows="H801 H804")
    def root_of_zero_backwards(self) -> None:
        """The loss is finite; the slope of the distance of a vector to itself is not."""
        net = parts.mlp(64, 32, 8)
        for xb, yb in self.watched(data.batches(data.digits(self.seed), 16, 200), net, adam(net, 0.001)):
            z = net(xb)
            distance = (z[:, None] - z[None]).pow(2).sum(-1).sqrt()
            same = (yb[:, None] == yb[None]).float()
            self.update((same * distance + (1 - same) * F.relu(2 - distance)).mean())

    @faulty("H801", shows="H802 H804 H825")
    def logarithm_of_zero(self) -> None:
        """Probabilities are formed first and logarithms after, and soon one of them is exactly 0."""
        model = parts.mlp(20, 64, 5)
        for xb, yb in self.watched(data.batches(data.blobs(self.seed), 64, 300), model, adam(model, 0.1)):
            probability = torch.softmax(model(xb), dim=1)
            self.update(-(F.one_hot(yb, 5) * torch.log(probability)).sum(1).mean())

    @faulty("H853", shows="H823 H824 H848 H828")
    def discriminator_wins(self) -> None:
        """The minimax form of the loss and a far faster discriminator: nothing comes back to the generator."""
        x, y, *_ = data.digits(self.seed)
        generator = nn.Sequential(*parts.mlp(8, 32, 64), nn.Sigmoid())
        discriminator = nn.Sequential(*parts.mlp(64, 128, 1), nn.Flatten(0))
        optimizer_g = sgd(generator, 0.01)
        optimizer_d = adam(discriminator, 0.01)
        models = {"generator": generator, "discriminator": discriminator}
        for real, _ in self.watched(
            data.batches((x, y), 32, 600),
            models,
            {"generator": optimizer_g, "discriminator": optimizer_d},
            objective="adversarial",
        ):
            fake = generator(torch.randn(32, 8))
            update(
                optimizer_d, F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
            )
            update(optimizer_g, (-F.softplus(discriminator(fake))).mean())
