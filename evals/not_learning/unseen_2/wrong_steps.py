"""Faulty programs whose mistake is in the steps: gradients, optimizers, rates and loops."""

from __future__ import annotations

import copy

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional

from evals.not_learning.data import (
    batches,
    blobs,
    curve,
    digit_images,
    digits,
    friedman,
    library_text,
    loader,
    moons,
    scaled_diabetes,
    seasons,
    table,
    text_windows,
)
from evals.not_learning.parts import Wired, mlp, small_cnn
from evals.not_learning.program import Programs, adam, adamw, faulty, follow, sgd


class WrongSteps(Programs):
    """Faulty programs whose mistake is in the steps."""

    # The gradients are never cleared, so each step repeats all those before it.
    @faulty("H811", shows="H801 H802 H804 H825 H826 H828")
    def gradients_that_pile_up(self) -> None:
        """The loss oscillates with growing swings."""
        x, y = friedman(1500)
        model = mlp(10, 48, 1)
        optimizer = sgd(model, 0.02, momentum=0.5)
        with self.watch(model, optimizer):
            for _ in range(12):
                for inputs, target in loader(x, y, size=50):
                    loss = functional.mse_loss(model(inputs).squeeze(1), target)
                    loss.backward()
                    optimizer.step()

    # `zero_grad` stands between backward and step, so every step sees no gradient.
    @faulty("H817 H813", shows="H828")
    def cleared_before_the_step(self) -> None:
        """Nothing changes: the weights at the end are those of the beginning."""
        x, y = digits(self.seed)[:2]
        model = mlp(64, 32, 10)
        optimizer = adam(model, 1e-2)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 250):
                loss = functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.zero_grad()
                optimizer.step()

    # The head was replaced after the optimizer was made: the new head is not in it.
    @faulty("H808 H809", shows="H811 H814")
    def optimizer_made_before_the_new_head(self) -> None:
        """The new head keeps its random weights, and the trunk has to adapt to it."""
        images, labels = digit_images(self.seed)[:2]
        model = small_cnn(classes=100, width=8)
        optimizer = sgd(model, 0.02, momentum=0.9)
        model[-1] = nn.Linear(64, 10)
        with self.watch(model, optimizer):
            for inputs, target in batches((images, labels), 64, 150):
                loss = functional.cross_entropy(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The optimizer holds the parameters of a copy of the model, not of the trained one.
    @faulty("H808 H809", shows="H813 H814 H828")
    def optimizer_of_a_copy(self) -> None:
        """The gradients are there, but the steps change another model; the loss stays."""
        x, y = table("breast_cancer", self.seed)[:2]
        model = mlp(30, 16, 2)
        optimizer = adam(copy.deepcopy(model), 3e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 32, 250):
                loss = functional.cross_entropy(model(inputs), labels)
                model.zero_grad()
                loss.backward()
                optimizer.step()

    # The learning rate is a thousand times too high for SGD.
    @faulty("H825", shows="H801 H802 H804 H826 H828 H848")
    def rate_far_too_high(self) -> None:
        """The loss explodes within a few steps and comes back as a flat line or not at all."""
        x, y = blobs(self.seed)
        model = mlp(20, 64, 64, 5)
        optimizer = sgd(model, 30.0)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 200):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The learning rate of Adam is far too low: 1e-7.
    @faulty("H824", shows="H828")
    def rate_far_too_low(self) -> None:
        """The loss falls in the fourth digit; with 1e-3 it would be nothing by the end."""
        series = seasons(300, 32)
        model = Wired(
            lambda net, window: net.out(net.gru(window[:, :, None])[0][:, -1]),
            gru=nn.GRU(1, 24, batch_first=True),
            out=nn.Linear(24, 1),
        )
        optimizer = adam(model, 1e-7)
        with self.watch(model, optimizer):
            for _ in range(200):
                rows = torch.randint(300, (32,))
                loss = functional.mse_loss(model(series[rows, :-1]), series[rows, -1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # A decay of 0.9 meant per epoch is applied per batch: the rate soon is nothing.
    @faulty("H820 H819")
    def epoch_schedule_stepped_per_batch(self) -> None:
        """The loss falls for two dozen steps and then stands still, far from converged."""
        x, y = digits(self.seed)[:2]
        model = mlp(64, 64, 10)
        optimizer = sgd(model, 0.05, momentum=0.9)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(12):
                for inputs, labels in loader(x, y, size=64):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    scheduler.step()

    # The warm-up is counted in steps, but the scheduler is stepped once per epoch.
    @faulty("H820", shows="H824 H828")
    def warmup_that_never_ends(self) -> None:
        """The rate is still at a few thousandths of its goal when training ends."""
        x, y = blobs(self.seed, classes=6)
        model = mlp(20, 32, 6)
        optimizer = sgd(model, 0.1)
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 1000))
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(10):
                for inputs, labels in loader(x, y, size=64):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                scheduler.step()

    # The norm of the gradients is clipped to 1e-5, which leaves SGD no steps.
    @faulty("H824", shows="H828")
    def clipped_to_nothing(self) -> None:
        """Gradients are large before they are clipped; the loss goes down imperceptibly."""
        x, y = curve(self.seed)
        model = mlp(8, 32, 32, 1)
        optimizer = sgd(model, 0.05, momentum=0.9)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 64, 300):
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e-5)
                optimizer.step()

    # Weight decay of 50 in AdamW pulls all weights to zero faster than they learn.
    @faulty("H858", shows="H828 H848")
    def decay_that_eats_the_weights(self) -> None:
        """The norm of the weights shrinks to nothing; the loss goes to the entropy of labels."""
        x, y = digits(self.seed)[:2]
        model = mlp(64, 48, 10)
        optimizer = adamw(model, 2e-3, weight_decay=50.0)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 300):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The features go through numpy on the way to the head, so the encoder gets no gradient.
    @faulty("H814")
    def encoder_cut_off_by_numpy(self) -> None:
        """The encoder remains as it was initialized; only the head learns."""
        images, labels = digit_images(self.seed)[:2]
        encoder = nn.Sequential(nn.Conv2d(1, 6, 5, stride=3), nn.ReLU(), nn.Flatten())
        head = nn.Linear(24, 10)
        model = nn.ModuleDict({"encoder": encoder, "head": head})
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((images, labels), 64, 250):
                features = torch.tensor(encoder(inputs).detach().numpy())
                loss = functional.cross_entropy(head(features), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # A new optimizer is made at every step, so Adam's averages are always empty.
    @faulty("")
    def optimizer_made_anew_each_step(self) -> None:
        """Each step is the rate times the sign of a gradient; the loss stops at a noisy level."""
        x, y = scaled_diabetes(self.seed)[:2]
        model = mlp(10, 32, 1)
        optimizer = adam(model, 2e-2)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y[:, None]), 16, 300):
                optimizer = adam(model, 2e-2)
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The model is created again in every epoch, while the optimizer holds the first one.
    @faulty("H808 H809", shows="H811 H813 H814 H828")
    def model_made_anew_each_epoch(self) -> None:
        """In the second epoch the loss is back at its start and no longer falls."""
        x, y = blobs(self.seed, classes=4)
        model = mlp(20, 32, 4)
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for epoch in range(8):
                if epoch > 0:
                    model = mlp(20, 32, 4)
                for inputs, labels in loader(x, y, size=64):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # The trunk was frozen for the first epochs and is never unfrozen, though it is random.
    @faulty("H814")
    def trunk_that_is_never_unfrozen(self) -> None:
        """A random, narrow trunk limits what the head can learn; the loss stops high."""
        x, y = wavy_rings(self.seed)
        trunk = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        head = nn.Linear(6, 2)
        model = nn.Sequential(trunk, head)
        trunk.requires_grad_(False)
        optimizer = adam(model, 5e-3)
        with self.watch(model, optimizer):
            for epoch in range(12):
                if epoch == 2:
                    trunk.requires_grad = True
                for inputs, labels in loader(x, y, size=64):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # The slow average is copied back into the model after each step and undoes it.
    @faulty("", shows="H824 H828")
    def average_copied_back_into_the_model(self) -> None:
        """Only a thousandth of each update survives, and the loss falls as slowly."""
        x, y = digits(self.seed)[:2]
        model = mlp(64, 64, 10)
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 300):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                follow(average, model, 0.001)
                model.load_state_dict(average.state_dict())

    # The optimizer was told to maximize, and it maximizes the loss.
    @faulty("H831", shows="H801 H802 H804 H826 H828")
    def optimizer_that_climbs(self) -> None:
        """The loss rises steadily from the first step on."""
        x, y = table("wine", self.seed)[:2]
        model = mlp(13, 16, 3)
        optimizer = sgd(model, 0.01, maximize=True)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 32, 200):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Weights in bfloat16 are too coarse for the small updates, which round to nothing.
    @faulty("", shows="H824 H828")
    def updates_lost_to_rounding(self) -> None:
        """Gradients and rate are as they should be, but most weights stay exactly the same."""
        x, y = digits(self.seed)[:2]
        model = mlp(64, 64, 10).to(torch.bfloat16)
        optimizer = adam(model, 1e-4)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x.to(torch.bfloat16), y), 64, 400):
                loss = functional.cross_entropy(model(inputs).float(), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The state of the recurrent net is zeroed inside the loop over time.
    @faulty("", shows="H814")
    def state_reset_at_each_character(self) -> None:
        """A recurrent model that remembers nothing; the loss stops at that of pairs."""
        ids, symbols = library_text()
        model = nn.ModuleDict(
            {
                "embed": nn.Embedding(symbols, 24),
                "cell": nn.GRUCell(24, 48),
                "out": nn.Linear(48, symbols),
            }
        )
        optimizer = adam(model, 4e-3)
        with self.watch(model, optimizer):
            for _ in range(200):
                source, target = text_windows(ids, 24, 12)
                outputs = []
                for place in range(12):
                    state = torch.zeros(24, 48)
                    state = model["cell"](model["embed"](source[:, place]), state)
                    outputs.append(model["out"](state))
                loss = functional.cross_entropy(torch.stack(outputs, dim=2), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The generator's samples are detached in its own loss, so it gets no gradient.
    @faulty("H813 H814", shows="H853")
    def generator_behind_a_detach(self) -> None:
        """The discriminator wins at once; the generator's weights never change."""
        generator = mlp(4, 32, 2)
        discriminator = mlp(2, 32, 1)
        optimizer_g = adam(generator, 1e-3)
        optimizer_d = adam(discriminator, 1e-3)
        criterion = nn.BCEWithLogitsLoss()
        ones = torch.ones(64, 1)
        zeros = torch.zeros(64, 1)
        with self.watch(
            {"generator": generator, "discriminator": discriminator},
            {"generator": optimizer_g, "discriminator": optimizer_d},
            objective="adversarial",
        ):
            for _ in range(250):
                real = moons(64)[0] + 2
                fake = generator(torch.randn(64, 4)).detach()
                loss_d = criterion(discriminator(real), ones)
                loss_d = loss_d + criterion(discriminator(fake), zeros)
                optimizer_d.zero_grad()
                loss_d.backward()
                optimizer_d.step()
                loss_g = criterion(discriminator(fake), ones)
                optimizer_g.zero_grad()
                loss_g.backward()
                optimizer_g.step()

    # The advantage has the wrong sign: good actions become less likely.
    @faulty("H831")
    def policy_that_avoids_rewards(self) -> None:
        """The mean reward falls from a quarter to zero."""
        best = torch.randint(4, (6,))
        policy = nn.Linear(6, 4)
        optimizer = adam(policy, 0.02)
        with self.watch(policy, optimizer, objective="reinforcement"):
            for _ in range(300):
                context = torch.randint(6, (32,))
                inputs = functional.one_hot(context, 6).float()
                chosen = Categorical(logits=policy(inputs))
                action = chosen.sample()
                reward = (action == best[context]).float()
                advantage = reward.mean() - reward
                loss = -(chosen.log_prob(action) * advantage).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.score = reward.mean().item()

    # The target net is never updated, so the values of a random net are learned.
    @faulty("")
    def target_net_that_is_never_updated(self) -> None:
        """The loss falls to nothing, yet the values of far places never include the reward."""
        online = mlp(10, 32, 2)
        target_net = copy.deepcopy(online).requires_grad_(False)
        optimizer = adam(online, 2e-3)
        with self.watch(online, optimizer, objective="reinforcement"):
            for _ in range(300):
                place = torch.randint(9, (64,))
                action = torch.randint(2, (64,))
                following = (place + 2 * action - 1).clamp(min=0)
                reward = (following == 9).float()
                with torch.no_grad():
                    future = target_net(functional.one_hot(following, 10).float()).amax(dim=1)
                goal = reward + 0.95 * future * (following != 9)
                value = online(functional.one_hot(place, 10).float())
                value = value.gather(1, action[:, None]).squeeze(1)
                loss = functional.mse_loss(value, goal)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.score = online(torch.eye(10)).amax(dim=1)[7].item()


def wavy_rings(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points on two wavy rings, and which ring each is on."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (1200,), generator=generator)
    angle = 6.283 * torch.rand(1200, generator=generator)
    radius = 0.5 + 0.6 * labels + 0.1 * torch.randn(1200, generator=generator)
    wave = 0.4 * (5 * angle).sin()
    points = (radius + wave)[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points, labels
