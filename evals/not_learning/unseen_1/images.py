"""Programs that look at images."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from evals.not_learning.data import digit_images, discs
from evals.not_learning.program import Programs, faulty, healthy


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a shortcut around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return feature maps of the same shape."""
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return functional.relu(x + out)


class ResidualNetwork(nn.Module):
    """A stem, two residual blocks and a linear classifier."""

    def __init__(self, width: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.block1 = ResidualBlock(width)
        self.block2 = ResidualBlock(width)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """Return one vector for each image."""
        x = self.block1(self.stem(x))
        x = self.block2(functional.max_pool2d(x, 2))
        return x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return self.head(self.features(x))


class PatchTransformer(nn.Module):
    """A small vision transformer for 8x8 images, with patches of 2x2 pixels."""

    def __init__(self, width: int = 24, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(x), -1, -1)
        tokens = torch.cat([token, tokens], dim=1) + self.positions
        return self.head(self.norm(self.encoder(tokens)[:, 0]))


class LeNet(nn.Module):
    """Two convolutions and two linear layers, as in many tutorials."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 2 * 2, 32)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


class SmallUNet(nn.Module):
    """An encoder and a decoder with one skip connection."""

    def __init__(self, classes: int = 1) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each pixel and class."""
        skip = functional.relu(self.down(x))
        deep = functional.relu(self.middle(functional.max_pool2d(skip, 2)))
        return self.out(torch.cat([skip, self.up(deep)], dim=1))


class RotatedCopies(Dataset):
    """Arrows that point into one of four directions, each with some noise."""

    def __init__(self, count: int, *, turn: bool) -> None:
        self.labels = torch.randint(4, (count,))
        self.turn = turn
        arrow = torch.zeros(9, 9)
        arrow[4, 1:8] = 1.0
        arrow[2:7, 6] = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
        self.images = torch.stack([torch.rot90(arrow, int(label)) for label in self.labels])
        self.images = self.images + 0.4 * torch.randn(count, 9, 9)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.turn:
            image = torch.rot90(image, int(torch.randint(4, ())))
        return image[None], self.labels[index]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in evaluation mode, and leave the model in the mode it was in."""
    training = model.training
    model.eval()
    correct = (model(x).argmax(dim=1) == y).float().mean().item()
    model.train(training)
    return correct


def dice_loss(scores: Tensor, mask: Tensor) -> Tensor:
    """Return one minus the soft Dice coefficient of each image, averaged."""
    probability = scores.sigmoid().flatten(1)
    mask = mask.flatten(1)
    overlap = 2 * (probability * mask).sum(dim=1) + 1
    total = probability.sum(dim=1) + mask.sum(dim=1) + 1
    return (1 - overlap / total).mean()


def shifted(images: Tensor) -> Tensor:
    """Return images that are moved by up to a pixel, with noise and another brightness."""
    dx = int(torch.randint(-1, 2, ()))
    dy = int(torch.randint(-1, 2, ()))
    moved = torch.roll(images, (dy, dx), dims=(2, 3))
    brightness = 0.8 + 0.4 * torch.rand(len(images), 1, 1, 1)
    return moved * brightness + 0.1 * torch.randn_like(images)


class Images(Programs):
    """Classification, segmentation and self-supervision."""

    @healthy
    def residual_network_with_warm_up(self) -> None:
        """A residual network: warm-up from zero, cosine decay, label smoothing, decay groups."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)
        model = ResidualNetwork(width=8)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = optim.SGD(
            [
                {"params": decayed, "weight_decay": 5e-4},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=0.1,
            momentum=0.9,
            nesterov=True,
        )
        epochs = 4
        total = epochs * len(loader)
        warm_up = 15

        def factor(step: int) -> float:
            if step < warm_up:
                return step / warm_up
            progress = (step - warm_up) / (total - warm_up)
            return 0.5 * (1 + math.cos(math.pi * progress))

        scheduler = optim.lr_scheduler.LambdaLR(optimizer, factor)
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        history = []
        with self.watch(model, optimizer, scheduler=scheduler, total_steps=total):
            for _ in range(epochs):
                model.train()
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = criterion(model(x), y)
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                history.append(accuracy(model, split.held_x, split.held_y))

    @healthy
    def vision_transformer(self) -> None:
        """A vision transformer with dropout, AdamW, one cycle and clipping."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x - 0.3, split.y), batch_size=64, shuffle=True)
        model = PatchTransformer()
        optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        epochs = 5
        scheduler = optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=5e-3, total_steps=epochs * len(loader)
        )
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(epochs):
                for x, y in loader:
                    loss = functional.cross_entropy(model(x), y)
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()

    @healthy
    def new_head_on_a_frozen_backbone(self) -> None:
        """A new head on a backbone that is frozen and in evaluation mode, as its batch norm is."""
        split = digit_images(self.seed)
        backbone = ResidualNetwork(width=16, classes=5)
        known = split.y < 5
        source = optim.Adam(backbone.parameters(), lr=3e-3)
        for _ in range(25):
            rows = torch.randint(int(known.sum()), (64,))
            source.zero_grad()
            scores = backbone(split.x[known][rows])
            functional.cross_entropy(scores, split.y[known][rows]).backward()
            source.step()
        backbone.zero_grad(set_to_none=True)
        backbone.head = nn.Linear(16, 10)
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad = name.startswith("head")
        backbone.eval()
        optimizer = optim.Adam(
            [p for p in backbone.parameters() if p.requires_grad], lr=1e-2, weight_decay=1e-5
        )
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)
        with self.watch(backbone, optimizer):
            for _ in range(5):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(backbone(x), y)
                    loss.backward()
                    optimizer.step()

    @healthy
    def distilled_student(self) -> None:
        """A small student that learns from the softened scores of a teacher, and from labels."""
        split = digit_images(self.seed)
        teacher = LeNet()
        teacher_optimizer = optim.Adam(teacher.parameters(), lr=5e-3)
        for _ in range(120):
            rows = torch.randint(len(split.x), (64,))
            teacher_optimizer.zero_grad()
            functional.cross_entropy(teacher(split.x[rows]), split.y[rows]).backward()
            teacher_optimizer.step()
        teacher.eval()
        teacher.requires_grad_(False)
        student = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
        optimizer = optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
        temperature = 4.0
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=32, shuffle=True)
        with self.watch(student, optimizer):
            for _ in range(8):
                for x, y in loader:
                    with torch.no_grad():
                        soft = functional.softmax(teacher(x) / temperature, dim=1)
                    scores = student(x)
                    predicted = functional.log_softmax(scores / temperature, dim=1)
                    distance = functional.kl_div(predicted, soft, reduction="batchmean")
                    loss = 0.7 * temperature**2 * distance
                    loss = loss + 0.3 * functional.cross_entropy(scores, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def mixup(self) -> None:
        """Mixed images and mixed labels: the training loss stays high."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)
        model = LeNet()
        optimizer = optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-2)
        beta = torch.distributions.Beta(1.0, 1.0)
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    share = beta.sample()
                    order = torch.randperm(len(x))
                    scores = model(share * x + (1 - share) * x[order])
                    loss = share * functional.cross_entropy(scores, y)
                    loss = loss + (1 - share) * functional.cross_entropy(scores, y[order])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def half_of_the_labels_are_wrong(self) -> None:
        """Half of the labels are random, so that the training loss ends far above zero."""
        split = digit_images(self.seed)
        random = torch.rand(len(split.y)) < 0.5
        labels = torch.where(random, torch.randint(10, split.y.shape), split.y)
        loader = DataLoader(TensorDataset(split.x, labels), batch_size=64, shuffle=True)
        model = LeNet()
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @healthy
    def segmentation_with_dice(self) -> None:
        """Segmentation of a small foreground with the sum of Dice and cross-entropy."""
        images, masks = discs(256)
        loader = DataLoader(TensorDataset(images, masks), batch_size=16, shuffle=True)
        model = SmallUNet()
        optimizer = optim.RMSprop(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, mask in loader:
                    optimizer.zero_grad()
                    scores = model(x)
                    loss = functional.binary_cross_entropy_with_logits(scores, mask)
                    loss = loss + dice_loss(scores, mask)
                    loss.backward()
                    optimizer.step()

    @healthy
    def contrastive_views(self) -> None:
        """Two views of each image among those of all others: NT-Xent with a projection head."""
        split = digit_images(self.seed)
        encoder = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(192, 32),
        )
        projector = nn.Sequential(nn.ReLU(), nn.Linear(32, 16))
        model = nn.Sequential(encoder, projector)
        optimizer = optim.AdamW(model.parameters(), lr=5e-3)
        temperature = 0.2
        size = 64
        with self.watch(model, optimizer):
            for _ in range(200):
                x = split.x[torch.randint(len(split.x), (size,))]
                views = torch.cat([shifted(x), shifted(x)])
                z = functional.normalize(model(views), dim=1)
                similarity = z @ z.T / temperature
                similarity.fill_diagonal_(float("-inf"))
                partner = torch.arange(2 * size).roll(size)
                loss = functional.cross_entropy(similarity, partner)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def student_and_momentum_teacher(self) -> None:
        """A student predicts the teacher's vector of another view; the teacher is its average."""
        split = digit_images(self.seed)
        student = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 32),
        )
        predictor = nn.Sequential(
            nn.Linear(32, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 32),
        )
        teacher = copy.deepcopy(student)
        teacher.requires_grad_(False)
        online = nn.ModuleDict({"student": student, "predictor": predictor})
        optimizer = optim.Adam(online.parameters(), lr=2e-3, weight_decay=1e-6)
        with self.watch(online, optimizer):
            for _ in range(250):
                x = split.x[torch.randint(len(split.x), (64,))]
                first = shifted(x)
                second = shifted(x)
                with torch.no_grad():
                    target = functional.normalize(teacher(second), dim=1)
                guess = functional.normalize(predictor(student(first)), dim=1)
                loss = (2 - 2 * (guess * target).sum(dim=1)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                        slow.mul_(0.98).add_(fast, alpha=0.02)

    @healthy
    def gradual_pruning(self) -> None:
        """The smallest weights are set to zero, more of them in each epoch, and kept there."""
        split = digit_images(self.seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)
        masks = {}
        with self.watch(model, optimizer):
            for epoch in range(10):
                for name, parameter in model.named_parameters():
                    if parameter.ndim < 2:
                        continue
                    limit = parameter.detach().abs().quantile(0.08 * epoch)
                    masks[name] = (parameter.detach().abs() >= limit).float()
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    with torch.no_grad():
                        for name, parameter in model.named_parameters():
                            if name in masks:
                                parameter.mul_(masks[name])

    @healthy
    def rare_class_with_a_weighted_loss(self) -> None:
        """One image in thirty is positive: a weighted loss and scores with a prior bias."""
        split = digit_images(self.seed)
        keep = (split.y != 3) | (torch.rand(len(split.y)) < 0.25)
        x = split.x[keep]
        y = (split.y[keep] == 3).float()
        loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
        model = LeNet(classes=1)
        nn.init.constant_(model.fc2.bias, -3.0)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(10.0))
        with self.watch(model, optimizer):
            for _ in range(8):
                for images, labels in loader:
                    scores = model(images).squeeze(1)
                    loss = criterion(scores, labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def balanced_sampler_and_focal_loss(self) -> None:
        """Long-tailed classes with a weighted sampler and the focal loss."""
        split = digit_images(self.seed)
        keep = torch.rand(len(split.y)) < 0.65 ** split.y.float()
        x = split.x[keep]
        y = split.y[keep]
        frequency = torch.bincount(y, minlength=10).float()
        sampler = WeightedRandomSampler(1 / frequency[y].clamp(min=1), num_samples=len(y) * 3)
        loader = DataLoader(TensorDataset(x, y), batch_size=32, sampler=sampler)
        model = LeNet()
        optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(8):
                for images, labels in loader:
                    log_probability = functional.log_softmax(model(images), dim=1)
                    chosen = log_probability.gather(1, labels[:, None]).squeeze(1)
                    loss = -((1 - chosen.exp()) ** 2 * chosen).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()

    @healthy
    def bfloat16_autocast(self) -> None:
        """A convolutional network under autocast to bfloat16."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=128, shuffle=True)
        model = LeNet()
        optimizer = optim.AdamW(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    optimizer.zero_grad(set_to_none=True)
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H836", shows="H828")
    def softmax_in_the_model(self) -> None:
        """The model ends in a softmax, and the loss is `CrossEntropyLoss`."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)
        model = nn.Sequential(
            LeNet(),
            nn.Softmax(dim=1),
        )
        criterion = nn.CrossEntropyLoss()
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(10):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = criterion(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H828")
    def images_shuffled_without_their_labels(self) -> None:
        """The images are shuffled once, the labels are not."""
        split = digit_images(self.seed)
        order = torch.randperm(len(split.x))
        images = split.x[order]
        labels = split.y
        loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
        model = LeNet()
        optimizer = optim.Adam(model.parameters(), lr=1e-3)
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H828")
    def augmentation_that_turns_arrows(self) -> None:
        """The direction of an arrow is to be told, and the augmentation rotates the images."""
        train_set = RotatedCopies(600, turn=True)
        loader = DataLoader(train_set, batch_size=50, shuffle=True)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(72, 4),
        )
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(10):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H834", shows="H828 H848")
    def evaluation_mode_since_the_sanity_check(self) -> None:
        """The validation before the first epoch calls `eval()`, and nothing calls `train()`."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 48)]
        for _ in range(5):
            layers += [nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48)]
        layers += [nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)]
        model = nn.Sequential(*layers)
        optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.5)

        def validate() -> float:
            model.eval()
            with torch.no_grad():
                scores = model(split.held_x)
            return (scores.argmax(dim=1) == split.held_y).float().mean().item()

        history = [validate()]
        with self.watch(model, optimizer):
            for _ in range(10):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                history.append(validate())

    @faulty("", shows="H828")
    def pixels_reshaped_instead_of_permuted(self) -> None:
        """The class scores of the pixels are viewed as rows without moving the class axis last."""
        images, masks = discs(256)
        loader = DataLoader(TensorDataset(images, masks), batch_size=16, shuffle=True)
        model = SmallUNet(classes=2)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.8]))
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, mask in loader:
                    scores = model(x)
                    rows = scores.view(-1, 2)
                    loss = criterion(rows, mask.long().view(-1))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H855", shows="H826")
    def masks_of_255(self) -> None:
        """The masks come from image files: the foreground is 255, where the loss expects 1."""
        images, masks = discs(256)
        masks = 255 * masks
        loader = DataLoader(TensorDataset(images, masks), batch_size=16, shuffle=True)
        model = SmallUNet()
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, mask in loader:
                    optimizer.zero_grad()
                    loss = functional.binary_cross_entropy_with_logits(model(x), mask)
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H828 H856 H848")
    def divided_by_255_twice(self) -> None:
        """The data set scales pixels to [0, 1], and the loop divides them by 255 once more."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)
        model = LeNet()
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(10):
                for x, y in loader:
                    x = x / 255.0
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H837")
    def rectifier_behind_the_last_layer(self) -> None:
        """The block that is used for all layers ends in a ReLU, also for the scores."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=64, shuffle=True)

        def block(wide: int, narrow: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(wide, narrow), nn.ReLU())

        model = nn.Sequential(
            nn.Flatten(),
            block(64, 32),
            block(32, 16),
            block(16, 10),
        )
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
