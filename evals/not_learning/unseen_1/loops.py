"""Programs whose loop, optimizer or schedule is what matters."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from evals.not_learning.data import blobs, curve, digits, rings, spirals
from evals.not_learning.parts import mlp
from evals.not_learning.program import Programs, faulty, healthy


class SignMomentum(optim.Optimizer):
    """Lion: steps of equal size in the direction of an average of gradients."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # noqa: ARG002
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "average" not in state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"]
                direction = average.lerp(parameter.grad, 0.1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                average.lerp_(parameter.grad, 0.01)


class Net(nn.Module):
    """A network for digits, as flat rows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return self.head(self.body(x))


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of rows that are classified rightly."""
    training = model.training
    model.eval()
    share = (model(x).argmax(dim=1) == y).float().mean().item()
    model.train(training)
    return share


class Loops(Programs):
    """Optimizers, schedules, accumulation, averages and the mistakes with them."""

    @healthy
    def accumulation_with_a_rest(self) -> None:
        """Four small batches for each step, and a step for the rest of the epoch."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=20, shuffle=True)
        model = Net()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        accumulated = 4
        with self.watch(model, optimizer):
            for _ in range(6):
                optimizer.zero_grad()
                for index, (x, y) in enumerate(loader):
                    loss = functional.cross_entropy(model(x), y) / accumulated
                    loss.backward()
                    last = index + 1 == len(loader)
                    if (index + 1) % accumulated == 0 or last:
                        optimizer.step()
                        optimizer.zero_grad()

    @healthy
    def weight_averaging_and_cycles(self) -> None:
        """A cyclic learning rate, and the average of the weights at the end of each cycle."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        averaged = optim.swa_utils.AveragedModel(model)
        optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = optim.lr_scheduler.CyclicLR(
            optimizer, base_lr=0.01, max_lr=0.2, step_size_up=len(loader)
        )
        with self.watch(model, optimizer, scheduler=scheduler):
            for epoch in range(8):
                for x, y in loader:
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    scheduler.step()
                if epoch % 2 == 1:
                    averaged.update_parameters(model)

    @healthy
    def sharpness_aware_steps(self) -> None:
        """SAM: a first backward pass to climb, a second one at the higher place to step."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        radius = 0.05
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                    climbs = []
                    with torch.no_grad():
                        for parameter in model.parameters():
                            climb = radius * parameter.grad / (norm + 1e-12)
                            parameter.add_(climb)
                            climbs.append(climb)
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    with torch.no_grad():
                        for parameter, climb in zip(model.parameters(), climbs, strict=True):
                            parameter.sub_(climb)
                    optimizer.step()

    @healthy
    def optimizer_of_their_own(self) -> None:
        """Lion, written as a subclass of `Optimizer`, with decoupled weight decay."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = SignMomentum(model.parameters(), lr=2e-3, weight_decay=0.1)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    loss = functional.cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def factored_second_moments(self) -> None:
        """Adafactor with relative steps: its `lr` is only an upper bound."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.Adafactor(model.parameters(), lr=0.05)
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    loss = functional.cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def two_backward_passes_for_one_step(self) -> None:
        """The loss of the labels and that of a reconstruction go back one after the other."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        classifier = nn.Linear(32, 10)
        decoder = nn.Linear(32, 64)
        model = nn.ModuleList([encoder, classifier, decoder])
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    code = encoder(x)
                    functional.cross_entropy(classifier(code), y).backward(retain_graph=True)
                    functional.mse_loss(decoder(code), x).backward()
                    optimizer.step()

    @healthy
    def five_steps(self) -> None:
        """A smoke test: five large steps over the whole data set."""
        x, y = blobs(self.seed)
        model = mlp(20, 32, 5)
        optimizer = optim.Adam(model.parameters(), lr=3e-2)
        with self.watch(model, optimizer):
            for _ in range(5):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

    @healthy
    def gradual_unfreezing(self) -> None:
        """The body is frozen at first, and joins the optimizer in a group of its own later."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        model.body.requires_grad_(False)
        optimizer = optim.Adam(model.head.parameters(), lr=1e-2)
        with self.watch(model, optimizer, frozen=("body.*",)):
            for epoch in range(8):
                if epoch == 3:
                    model.body.requires_grad_(True)
                    optimizer.add_param_group({"params": model.body.parameters(), "lr": 2e-3})
                for x, y in loader:
                    loss = functional.cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def plateau_of_the_validation_loss(self) -> None:
        """`ReduceLROnPlateau` over validation losses, early stopping, and the best weights."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        best = math.inf
        best_weights = copy.deepcopy(model.state_dict())
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(10):
                model.train()
                for x, y in loader:
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                model.eval()
                with torch.no_grad():
                    held = functional.cross_entropy(model(split.held_x), split.held_y).item()
                scheduler.step(held)
                if held < best:
                    best = held
                    best_weights = copy.deepcopy(model.state_dict())
        model.load_state_dict(best_weights)

    @healthy
    def resumed_near_the_end(self) -> None:
        """Weights and optimizer come from a checkpoint, and a few epochs at a low rate are left."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        before = Net()
        optimizer = optim.SGD(before.parameters(), lr=0.1, momentum=0.9)
        for _ in range(6):
            for x, y in loader:
                optimizer.zero_grad()
                functional.cross_entropy(before(x), y).backward()
                optimizer.step()
        file = io.BytesIO()
        torch.save({"model": before.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        checkpoint = torch.load(file)
        model = Net()
        model.load_state_dict(checkpoint["model"])
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.load_state_dict(checkpoint["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = 0.002
        with self.watch(model, optimizer):
            for _ in range(3):
                for x, y in loader:
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    optimizer.step()

    @healthy
    def parity_after_a_plateau(self) -> None:
        """The parity of four of twelve bits: the loss stays at log 2 for long, and then falls."""
        model = mlp(12, 128, 2)
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for _ in range(500):
                bits = torch.randint(2, (128, 12)).float()
                labels = bits[:, :4].sum(dim=1).long() % 2
                scores = model(2 * bits - 1)
                loss = functional.cross_entropy(scores, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def lasso_with_proximal_steps(self) -> None:
        """After each step the weights are pulled towards zero by hand, and most end there."""
        x = torch.randn(500, 40)
        wanted = torch.zeros(40)
        wanted[:4] = torch.tensor([2.0, -1.0, 1.5, 0.7])
        y = x @ wanted + 0.5 * torch.randn(500)
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = nn.Linear(40, 1)
        optimizer = optim.SGD(model.parameters(), lr=0.02)
        with self.watch(model, optimizer):
            for _ in range(25):
                for features, target in loader:
                    loss = functional.mse_loss(model(features).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    with torch.no_grad():
                        weight = model.weight
                        weight.copy_(functional.softshrink(weight, 0.02 * 0.1))

    @healthy
    def private_gradients(self) -> None:
        """Gradients of single rows are clipped, summed, and noise is added before the step."""
        x, y = blobs(self.seed)
        model = mlp(20, 24, 5)
        optimizer = optim.SGD(model.parameters(), lr=0.5)

        def row_loss(weights: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            scores = torch.func.functional_call(model, weights, (row[None],))
            return functional.cross_entropy(scores, label[None])

        gradient = torch.func.vmap(torch.func.grad(row_loss), in_dims=(None, 0, 0))
        with self.watch(model, optimizer):
            for _ in range(100):
                rows = torch.randint(len(x), (64,))
                weights = {name: p.detach() for name, p in model.named_parameters()}
                singles = gradient(weights, x[rows], y[rows])
                norm = torch.stack([g.flatten(1).norm(dim=1) for g in singles.values()]).norm(dim=0)
                factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
                optimizer.zero_grad()
                for name, parameter in model.named_parameters():
                    clipped = torch.einsum("n,n...->...", factor, singles[name])
                    parameter.grad = (clipped + torch.randn_like(parameter)) / 64
                optimizer.step()

    @healthy
    def reptile(self) -> None:
        """Meta-learning: a copy adapts to each task, and the weights move towards the copy."""
        model = mlp(1, 32, 1, act=nn.Tanh)
        learner = copy.deepcopy(model)
        optimizer = optim.SGD(model.parameters(), lr=0.3)
        inner = optim.Adam(learner.parameters(), lr=1e-2)
        losses = []
        with self.watch(learner, inner):
            for _ in range(60):
                phase = 3.14 * torch.rand(()) / 2
                learner.load_state_dict(model.state_dict())
                x = 6 * torch.rand(40, 1) - 3
                y = torch.sin(x + phase)
                for _ in range(8):
                    loss = functional.mse_loss(learner(x), y)
                    inner.zero_grad()
                    loss.backward()
                    inner.step()
                losses.append(loss.item())
                for parameter, adapted in zip(
                    model.parameters(), learner.parameters(), strict=True
                ):
                    parameter.grad = parameter.detach() - adapted.detach()
                optimizer.step()

    @healthy
    def alternating_halves(self) -> None:
        """Two optimizers take turns: one for the body, the other one for the head."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        body_optimizer = optim.SGD(model.body.parameters(), lr=0.2, momentum=0.9)
        head_optimizer = optim.SGD(model.head.parameters(), lr=0.1)
        with self.watch(model, {"body": body_optimizer, "head": head_optimizer}):
            for _ in range(10):
                for index, (x, y) in enumerate(loader):
                    model.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    if index % 2 == 0:
                        body_optimizer.step()
                    else:
                        head_optimizer.step()

    @healthy
    def scaled_half_precision(self) -> None:
        """A `GradScaler` around the loss, gradients unscaled before they are clipped."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = functional.cross_entropy(model(x), y)
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()

    @faulty("H811", shows="H825 H826 H828")
    def gradients_never_cleared(self) -> None:
        """`zero_grad` is missing: each step goes along the sum of all gradients so far."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H812", shows="H828")
    def step_outside_of_the_inner_loop(self) -> None:
        """`step` stands one level too far left: it is called once for each epoch."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                optimizer.step()

    @faulty("H817", shows="H813 H828")
    def cleared_before_the_step(self) -> None:
        """`zero_grad` is called between `backward` and `step`."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.zero_grad()
                    optimizer.step()

    @faulty("H820", shows="H819 H828")
    def schedule_of_epochs_stepped_by_batches(self) -> None:
        """A step schedule of ten epochs is advanced after each batch."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(15):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    scheduler.step()

    @faulty("H854", shows="H819 H828")
    def plateau_of_single_batches(self) -> None:
        """`ReduceLROnPlateau` is stepped with the noisy loss of each batch."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=10, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.02)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=3)
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(5):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    scheduler.step(loss.item())

    @faulty("H809", shows="H808 H811 H813 H814 H828")
    def optimizer_of_the_model_before_the_copy(self) -> None:
        """The model is copied after the optimizer is made, and the copy is trained."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model = copy.deepcopy(model)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H808", shows="H811 H828")
    def layers_in_a_plain_list(self) -> None:
        """The hidden layers are in a Python list, so that `parameters()` does not know them."""

        class Deep(nn.Module):
            """Four narrow hidden layers."""

            def __init__(self) -> None:
                super().__init__()
                self.layers = [nn.Linear(64, 8), *(nn.Linear(8, 8) for _ in range(3))]
                self.head = nn.Linear(8, 10)

            def forward(self, x: Tensor) -> Tensor:
                """Return the scores of the classes."""
                for layer in self.layers:
                    x = functional.relu(layer(x))
                return self.head(x)

        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Deep()
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(10):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H810 H808", shows="H811 H813 H828")
    def only_the_frozen_body(self) -> None:
        """The body is frozen for the fine-tuning, and the optimizer is given the body."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net(width=64)
        model.body.requires_grad_(False)
        optimizer = optim.Adam(model.body.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H825", shows="H828 H848")
    def rate_of_adam_as_for_sgd(self) -> None:
        """Adam is given the learning rate 0.5 that SGD had, and the units die or run away."""
        x, y = rings(1000)
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = mlp(2, 32, 32, 32, 3)
        optimizer = optim.Adam(
            model.parameters(),
            lr=0.5,
        )
        with self.watch(model, optimizer):
            for _ in range(15):
                for points, labels in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(points), labels)
                    loss.backward()
                    optimizer.step()

    @faulty("H824", shows="H828")
    def rate_copied_from_fine_tuning(self) -> None:
        """SGD with a learning rate of 2e-5, which was meant for AdamW and a pretrained model."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(
            model.parameters(),
            lr=2e-5,
            momentum=0.9,
        )
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H824 H828")
    def scaled_gradients_clipped(self) -> None:
        """Gradients are clipped while they are scaled, and vanish when they are unscaled."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        with self.watch(model, optimizer):
            for _ in range(8):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    scaler.scale(loss).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()

    @faulty("", shows="H813 H814 H828")
    def loss_made_anew(self) -> None:
        """The loss is taken as a number, and made a new tensor that requires a gradient."""
        x, y = curve(self.seed)
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = mlp(8, 32, 1)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(20):
                for inputs, target in loader:
                    guess = model(inputs)
                    loss = functional.mse_loss(guess, target)
                    loss = torch.tensor(loss.item(), requires_grad=True)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H843", shows="H828")
    def labels_in_order(self) -> None:
        """The rows are sorted by their labels, and the loader does not shuffle."""
        split = digits(self.seed)
        order = split.y.argsort()
        loader = DataLoader(
            TensorDataset(split.x[order], split.y[order]),
            batch_size=20,
        )
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()

    @faulty("H840", shows="H826 H828 H831")
    def likelihood_with_a_second_minus(self) -> None:
        """`nll_loss` is negated, as if it returned the likelihood: the loss falls for ever."""
        split = digits(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=50, shuffle=True)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        with self.watch(model, optimizer):
            for _ in range(6):
                for x, y in loader:
                    optimizer.zero_grad()
                    log_probability = functional.log_softmax(model(x), dim=1)
                    loss = functional.nll_loss(log_probability, y)
                    loss = -loss
                    loss.backward()
                    optimizer.step()

    @faulty("H838")
    def sigmoid_before_the_scores(self) -> None:
        """The model ends in a sigmoid, and the loss is `BCEWithLogitsLoss`."""
        x, y = spirals(self.seed)
        target = y.float()[:, None]
        loader = DataLoader(TensorDataset(x, target), batch_size=50, shuffle=True)
        model = nn.Sequential(
            mlp(2, 64, 64, 1),
            nn.Sigmoid(),
        )
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        criterion = nn.BCEWithLogitsLoss()
        with self.watch(model, optimizer):
            for _ in range(10):
                for points, labels in loader:
                    optimizer.zero_grad()
                    loss = criterion(model(points), labels)
                    loss.backward()
                    optimizer.step()

    @faulty("H809", shows="H808 H811 H813 H814 H828")
    def new_model_in_each_fold(self) -> None:
        """The model is made anew for each fold, the optimizer only once."""
        split = digits(self.seed)
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scores = []
        for fold in range(3):
            held = torch.arange(len(split.x)) % 3 == fold
            loader = DataLoader(
                TensorDataset(split.x[~held], split.y[~held]), batch_size=50, shuffle=True
            )
            if fold > 0:
                model = Net()
            with self.watch(model, optimizer):
                for _ in range(4):
                    for x, y in loader:
                        optimizer.zero_grad()
                        loss = functional.cross_entropy(model(x), y)
                        loss.backward()
                        optimizer.step()
            scores.append(accuracy(model, split.x[held], split.y[held]))
