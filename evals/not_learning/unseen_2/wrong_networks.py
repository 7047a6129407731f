"""Faulty programs whose mistake is in the network: layers, initial values, masks, modes."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from evals.not_learning.data import (
    batches,
    blobs,
    curve,
    digit_images,
    digits,
    library_text,
    loader,
    scaled_diabetes,
    spirals,
    table,
    text_windows,
)
from evals.not_learning.parts import Wired, mlp, small_cnn
from evals.not_learning.program import Programs, adam, adamw, faulty, sgd


class HiddenList(nn.Module):
    """A net that keeps its hidden layers in a plain list, where no optimizer finds them."""

    def __init__(self, features: int, width: int, classes: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.hidden = [nn.Linear(width, width) for _ in range(depth)]
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.first(x).relu()
        for layer in self.hidden:
            x = layer(x).relu()
        return self.last(x)


class WrongNetworks(Programs):
    """Faulty programs whose mistake is in the network."""

    # A rectifier after the last layer makes negative outputs of a regression impossible.
    @faulty("H837 H855", shows="H815 H828")
    def rectifier_on_the_output(self) -> None:
        """Half of the standardised targets are negative; for them the output is stuck at zero."""
        x, y = scaled_diabetes(self.seed)[:2]
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.ReLU())
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y[:, None]), 32, 350):
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # A sigmoid limits the outputs to 0 to 1, but the targets lie between 25 and 346.
    @faulty("H855", shows="H815 H828 H848")
    def sigmoid_for_unbounded_targets(self) -> None:
        """The outputs saturate at one; the loss stays in the tens of thousands."""
        x, y = table("diabetes", self.seed)[:2]
        model = nn.Sequential(mlp(10, 32, 1), nn.Sigmoid())
        optimizer = adam(model, 1e-2)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y[:, None]), 32, 300):
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Six sigmoid layers: the gradient vanishes before it reaches the first ones.
    @faulty("H848", shows="H828")
    def deep_stack_of_sigmoids(self) -> None:
        """The first layers do not move, and the loss stays at that of guessing."""
        x, y = digits(self.seed)[:2]
        model = mlp(64, *[32] * 6, 10, act=nn.Sigmoid)
        optimizer = sgd(model, 0.05, momentum=0.9)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 300):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # All weights and biases start at zero, so nothing passes through the hidden layers.
    @faulty("H822", shows="H814 H828 H848")
    def all_weights_at_zero(self) -> None:
        """Only the last bias receives a gradient; the loss stays at the entropy of the labels."""
        images, labels = digit_images(self.seed)[:2]
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), mlp(288, 32, 10))
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = sgd(model, 0.1)
        with self.watch(model, optimizer):
            for inputs, target in batches((images, labels), 64, 200):
                loss = functional.cross_entropy(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # All weights of a layer have one value, so its units stay copies of each other.
    @faulty("H822", shows="H828")
    def units_that_stay_equal(self) -> None:
        """A hidden layer of 48 units learns no more than a single one could."""
        x, y = blobs(self.seed, classes=6)
        model = mlp(20, 48, 6)
        nn.init.constant_(model[0].weight, 0.05)
        nn.init.constant_(model[2].weight, 0.05)
        nn.init.zeros_(model[0].bias)
        optimizer = adam(model, 5e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 300):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The hidden weights have standard deviation 1, eight times too much for tanh units.
    @faulty("H848", shows="H828")
    def saturated_from_the_start(self) -> None:
        """The hidden units are at plus or minus one from the first step and stay there."""
        x, y = curve(self.seed, samples=8000, features=16)
        model = mlp(16, *[64] * 5, 1, act=nn.Tanh)
        for module in model[:-1]:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.0)
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 64, 250):
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Dropout drops 95 % where 5 % was meant: the probability is that of dropping.
    @faulty("", shows="H828")
    def dropout_of_nearly_everything(self) -> None:
        """The training loss stays high and noisy, though the classes are easy to separate."""
        x, y = digits(self.seed)[:2]
        model = nn.Sequential(
            nn.Linear(64, 48),
            nn.ReLU(),
            nn.Dropout(0.95),
            nn.Linear(48, 48),
            nn.ReLU(),
            nn.Dropout(0.95),
            nn.Linear(48, 10),
        )
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 300):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Dropout on the logits zeroes the outputs themselves, also those of the true class.
    @faulty("")
    def dropout_on_the_logits(self) -> None:
        """The loss has a floor that no weights can lower, and jumps from batch to batch."""
        x, y = table("wine", self.seed)[:2]
        model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3), nn.Dropout(0.5))
        optimizer = adamw(model, 5e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 32, 250):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # A bias of -8 kills all rectified units of the first layer for every input.
    @faulty("", shows="H814 H828 H848")
    def rectifiers_dead_at_birth(self) -> None:
        """No unit is ever active: outputs are constant, gradients before the last layer zero."""
        x, y = table("breast_cancer", self.seed)[:2]
        model = mlp(30, 24, 24, 2)
        nn.init.constant_(model[0].bias, -8.0)
        nn.init.normal_(model[0].weight, std=0.02)
        nn.init.constant_(model[2].bias, 0.0)
        optimizer = sgd(model, 0.05)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 32, 250):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The hidden layers are in a plain list: the model has no such parameters to train.
    @faulty("H808", shows="H811 H828")
    def layers_in_a_plain_list(self) -> None:
        """The unregistered layers stay random; the outer two learn around them, if slowly."""
        x, y = blobs(self.seed, classes=5)
        model = HiddenList(20, 32, 5, depth=6)
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 300):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # There is no activation between the layers, so the net is a single linear map.
    @faulty("", shows="H828")
    def no_activation_between_layers(self) -> None:
        """Spirals cannot be separated linearly; the loss stops just below log 2."""
        x, y = spirals(self.seed)
        model = nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 2))
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 64, 350):
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The language model reads in both directions, so it sees the character to predict.
    @faulty("")
    def language_model_that_sees_the_future(self) -> None:
        """The loss falls far below what the text allows, as the answer is in the input."""
        ids, symbols = library_text()
        model = Wired(
            lambda net, text: net.out(net.gru(net.embed(text))[0]),
            embed=nn.Embedding(symbols, 32),
            gru=nn.GRU(32, 48, batch_first=True, bidirectional=True),
            out=nn.Linear(96, symbols),
        )
        optimizer = adam(model, 1e-2)
        with self.watch(model, optimizer):
            for _ in range(200):
                source, target = text_windows(ids, 24, 16)
                loss = functional.cross_entropy(model(source).transpose(1, 2), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The padding mask is inverted: attention reads the padding and hides the words.
    @faulty("", shows="H828")
    def attention_to_the_padding_only(self) -> None:
        """Outputs do not depend on the words; the loss stays at the logarithm of the classes."""
        model = Wired(
            lambda net, words, mask: net.out(
                net.attention(
                    net.query.expand(len(words), 1, -1),
                    net.embed(words),
                    net.embed(words),
                    key_padding_mask=mask,
                )[0].squeeze(1)
            ),
            embed=nn.Embedding(31, 24),
            query=nn.Parameter(torch.randn(1, 1, 24)),
            attention=nn.MultiheadAttention(24, 2, batch_first=True),
            out=nn.Linear(24, 3),
        )
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                labels = torch.randint(3, (48,))
                words = torch.randint(4, 31, (48, 12))
                words[:, 2] = labels + 1
                lengths = torch.randint(4, 11, (48,))
                padding = torch.arange(12) >= lengths[:, None]
                words = words.masked_fill(padding, 0)
                loss = functional.cross_entropy(model(words, ~padding), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # `padding_idx` is the id of a real and frequent user, whose vector stays zero.
    @faulty("")
    def padding_index_of_a_real_user(self) -> None:
        """For user 0, who gave half of the ratings, the match is always zero; the loss stops."""
        taste = torch.randn(20, 3)
        film = torch.randn(30, 3)
        model = Wired(
            lambda net, user, item: (net.user(user) * net.item(item)).sum(dim=1),
            user=nn.Embedding(20, 6, padding_idx=0),
            item=nn.Embedding(30, 6),
        )
        optimizer = adam(model, 2e-2)
        with self.watch(model, optimizer):
            for _ in range(350):
                user = torch.where(torch.rand(128) < 0.5, 0, torch.randint(20, (128,)))
                item = torch.randint(30, (128,))
                score = (taste[user] * film[item]).sum(dim=1)
                loss = functional.mse_loss(model(user, item), score)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Batch norm over batches of two rows erases what distinguishes them.
    @faulty("", shows="H828")
    def batch_norm_over_two_rows(self) -> None:
        """Each feature becomes plus or minus one; the loss of the regression hardly falls."""
        x, y = curve(self.seed)
        model = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 2, 500):
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # A layer norm over a single output makes every prediction the same constant.
    @faulty("", shows="H814 H828 H848")
    def normalized_single_output(self) -> None:
        """The normalized output is always zero times its scale; only its bias can learn."""
        x, y = curve(self.seed)
        model = nn.Sequential(mlp(8, 32, 1), nn.LayerNorm(1))
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 50, 250):
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The model stays in eval mode after the first validation: batch norm never adapts.
    @faulty("H834")
    def eval_mode_after_validation(self) -> None:
        """From the second epoch on, dropout is off and running statistics no longer change."""
        images, labels, held_images, held_labels = digit_images(self.seed)
        model = nn.Sequential(small_cnn(width=8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(10, 10))
        optimizer = sgd(model, 0.05, momentum=0.9)
        model.train()
        with self.watch(model, optimizer):
            for _ in range(6):
                for batch, target in loader(images, labels, size=64):
                    loss = functional.cross_entropy(model(batch), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                model.eval()
                with torch.no_grad():
                    self.score = functional.cross_entropy(model(held_images), held_labels).item()

    # Global pooling comes before the convolutions, so every position is averaged away.
    @faulty("", shows="H828")
    def pooled_before_the_convolutions(self) -> None:
        """Only the mean brightness of an image remains; the loss falls a little and stops."""
        images, labels = digit_images(self.seed)[:2]
        model = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(1, 16, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((images, labels), 64, 250):
                loss = functional.cross_entropy(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
