"""Failures of graphs: in-place changes, graphs used twice, tensors cut off from them, losses that are no scalar.

Each fails for real; see the package for how they are run. Own functions, hooks and transforms are in ``functions``.
"""

from __future__ import annotations

from benchmarks.failures import failure


@failure("H948", author="F")
def generator_stepped_between_two_backwards() -> None:
    import torch

    generator, critic = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    fake = generator(torch.randn(8, 4))
    score = critic(fake).mean()
    critic_loss = critic(fake.detach()).mean()
    critic_loss.backward()
    optimizer.step()
    score.backward()


@failure("H948", author="F")
def hidden_state_updated_in_place() -> None:
    import torch

    cell = torch.nn.Linear(4, 4)
    hidden = torch.zeros(2, 4)
    outputs = []
    for _ in range(3):
        hidden = torch.sigmoid(cell(hidden))
        outputs.append(hidden)
        hidden += 1
    torch.stack(outputs).sum().backward()


@failure("H948", author="F")
def relu_in_place_after_sigmoid() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(4, 1))
    for _ in range(2):
        model(torch.randn(8, 4)).mean().backward()


@failure("H948", author="F")
def mask_written_into_attention() -> None:
    import torch

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.project(x).chunk(3, dim=-1)
            weights = (query @ key.transpose(-1, -2)).softmax(-1)
            weights[:, 0] = 0
            return weights @ value

    Attention()(torch.randn(2, 5, 8)).sum().backward()


@failure("H948", author="F")
def normalised_in_place_in_a_loop() -> None:
    import torch

    weight = torch.randn(4, 4, requires_grad=True)
    state = torch.ones(4)
    total = torch.zeros(())
    for step in range(4):
        state = torch.tanh(weight @ state)
        total = total + (state**2).sum()
        state.div_(step + 1)
    total.backward()


@failure("H948", author="F")
def moving_average_of_weights_during_a_step() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    loss = model(torch.randn(3, 4)).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.999)
    loss.backward()


@failure("H948", author="F")
def gradient_penalty_after_a_changed_input() -> None:
    import torch

    x = torch.randn(4, 3, requires_grad=True)
    y = x * 2
    z = (y**3).sum()
    y.clamp_(min=0)
    (gradient,) = torch.autograd.grad(z, x, create_graph=True)
    gradient.norm().backward()


@failure("H949", author="F")
def hidden_state_carried_over_batches() -> None:
    import torch

    lstm = torch.nn.LSTM(4, 8)
    state = None
    for _ in range(3):
        output, state = lstm(torch.randn(5, 2, 4), state)
        output.mean().backward()


@failure("H949", author="F")
def loss_of_two_heads_over_a_shared_encoder() -> None:
    import torch

    encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
    code = encoder(torch.randn(16, 4))
    for head in (torch.nn.Linear(8, 1), torch.nn.Linear(8, 3)):
        head(code).mean().backward()


@failure("H949", author="F")
def penalty_computed_once_before_the_loop() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(8, 4)).mean() + 0.01 * penalty).backward()
        optimizer.step()


@failure("H949", author="F")
def loss_accumulated_without_detach() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid())
    total = torch.zeros(())
    for _ in range(4):
        total = total + model(torch.randn(2, 4)).mean()
        total.backward()


@failure("H949", author="F")
def same_gradient_asked_for_twice() -> None:
    import torch

    x = torch.randn(5, requires_grad=True)
    y = (x.exp() * x).sum()
    torch.autograd.grad(y, x)
    torch.autograd.grad(y, x)


@failure("H949", author="F")
def saved_result_read_after_backward() -> None:
    import torch

    x = torch.randn(5, requires_grad=True)
    y = x.sigmoid()
    y.sum().backward()
    print(y.grad_fn._saved_result)


@failure("H949", author="F")
def discriminator_fed_without_detach() -> None:
    import torch

    generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    fake = torch.tanh(generator(torch.randn(8, 4)))
    torch.relu(1 + critic(fake)).mean().backward()
    (-critic(fake)).mean().backward()


@failure("H949", author="F")
def targets_from_a_network_kept_over_epochs() -> None:
    import torch

    teacher = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    student = torch.nn.Linear(4, 4)
    data = torch.randn(8, 4)
    targets = teacher(data)
    for epoch in range(2):
        loss = (student(data) - targets).square().mean()
        print(f"epoch {epoch}: {loss.item():.3f}")
        loss.backward()


@failure("H950", author="F")
def all_layers_frozen() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model.requires_grad_(requires_grad=False)
    torch.nn.functional.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 0])).backward()


@failure("H950", author="F")
def loss_computed_under_no_grad() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        loss = model(torch.randn(3, 4)).mean()
    loss.backward()


@failure("H950", author="F")
def loss_of_argmax() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).argmax(dim=1).float()

    loss = torch.nn.functional.mse_loss(Net()(torch.randn(5, 4)), torch.ones(5))
    loss.backward()


@failure("H950", author="F")
def loss_wrapped_in_a_new_tensor() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    losses = [model(torch.randn(2, 4)).mean().item() for _ in range(3)]
    torch.tensor(losses).mean().backward()


@failure("H950", author="F")
def output_taken_through_numpy() -> None:
    import numpy as np
    import torch

    model = torch.nn.Linear(4, 4)
    output = model(torch.randn(3, 4)).detach().numpy()
    loss = torch.from_numpy(np.abs(output)).sum()
    loss.backward()


@failure("H950", author="F")
def evaluation_mode_left_on_globally() -> None:
    import torch

    torch.set_grad_enabled(mode=False)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


@failure("H950", author="F")
def gradient_with_respect_to_a_constant_loss() -> None:
    import torch

    image = torch.rand(1, 3, 8, 8)
    torch.autograd.grad(image.mean(), image)


@failure("H951", author="F")
def loss_without_reduction() -> None:
    import torch

    model = torch.nn.Linear(4, 3)
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.zeros(8).long(), reduction="none")
    loss.backward()


@failure("H951", author="F")
def squared_error_not_averaged() -> None:
    import torch

    weight = torch.randn(3, requires_grad=True)
    for _ in range(10):
        error = (torch.randn(16, 3) @ weight - 1) ** 2
        error.backward()


@failure("H951", author="F")
def sensitivity_of_all_outputs() -> None:
    import torch

    x = torch.randn(4, 2, requires_grad=True)
    print(torch.autograd.grad(torch.nn.Linear(2, 5)(x), x))


@failure("H1263", author="F")
def complex_loss() -> None:
    import torch

    signal = torch.randn(16, requires_grad=True)
    torch.fft.fft(signal).mean().backward()


@failure("H952", author="F")
def weights_updated_by_hand() -> None:
    import torch

    weight = torch.randn(3, requires_grad=True)
    (weight**2).sum().backward()
    weight -= 0.1 * weight.grad


@failure("H952", author="F")
def bias_of_the_forget_gate_filled() -> None:
    import torch

    lstm = torch.nn.LSTM(4, 8)
    lstm.bias_hh_l0[8:16].fill_(1.0)


@failure("H952", author="F")
def padding_row_of_an_embedding_set_to_zero() -> None:
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 4)
            self.embedding.weight[0] = 0

    Encoder()


@failure("H952", author="F")
def parameters_initialised_in_place() -> None:
    import torch

    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.uniform_(-0.1, 0.1)


@failure("H952", author="F")
def weights_clamped_after_a_step() -> None:
    import torch

    critic = torch.nn.Linear(4, 1)
    optimizer = torch.optim.RMSprop(critic.parameters())
    for _ in range(3):
        critic(torch.randn(4, 4)).mean().backward()
        optimizer.step()
        for parameter in critic.parameters():
            parameter.clamp_(-0.01, 0.01)


@failure("H953", author="F")
def predictions_to_numpy_for_a_metric() -> None:
    import torch

    model = torch.nn.Linear(4, 2)
    output = model(torch.randn(8, 4))
    accuracy = (output.numpy().argmax(1) == 0).mean()
    print(accuracy)


@failure("H953", author="F")
def losses_to_an_array_for_a_plot() -> None:
    import numpy as np
    import torch

    weight = torch.randn(3, requires_grad=True)
    history = [(weight * step).sum() for step in range(5)]
    print(np.mean(history))


@failure("H953", author="F")
def weights_to_a_histogram() -> None:
    import numpy as np
    import torch

    model = torch.nn.Linear(64, 64)
    print(np.histogram(model.weight.cpu().numpy(), bins=10))


@failure("H953", author="F", needs="sklearn")
def scores_to_a_metric_of_sklearn() -> None:
    import torch
    from sklearn.metrics import roc_auc_score

    scores = torch.sigmoid(torch.nn.Linear(4, 1)(torch.randn(8, 4))).squeeze(1)
    print(roc_auc_score(torch.tensor([0, 1] * 4), scores))


@failure("H954", author="F")
def copy_of_a_loss() -> None:
    import copy

    import torch

    best = torch.nn.Linear(4, 1)(torch.randn(3, 4)).mean()
    print(copy.deepcopy(best))


@failure("H954", author="F")
def copy_of_a_model_that_keeps_its_features() -> None:
    import copy

    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.features = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.features = self.layer(x)
            return self.features.relu()

    model = Net()
    model(torch.randn(2, 4)).sum().backward()
    average = copy.deepcopy(model)
    print(average)


@failure("H954", author="F")
def averaged_model_of_one_with_cached_state() -> None:
    import torch

    class Memory(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.write = torch.nn.Linear(4, 4)
            self.slots = [torch.zeros(4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.slots.append(self.write(x))
            return torch.stack(self.slots).sum(0)

    model = Memory()
    model(torch.randn(4)).sum().backward()
    torch.optim.swa_utils.AveragedModel(model)


@failure("H1241", author="F")
def gradient_of_a_layer_that_is_not_used() -> None:
    import torch

    used, unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    loss = used(torch.randn(3, 4)).sum()
    torch.autograd.grad(loss, [*used.parameters(), *unused.parameters()])


@failure("H1241", author="F")
def inner_loop_over_all_parameters() -> None:
    import torch

    class TwoHeads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, *, task: int) -> torch.Tensor:
            return (self.first if task == 0 else self.second)(self.body(x))

    model = TwoHeads()
    for task in range(2):
        loss = model(torch.randn(5, 4), task=task).mean()
        torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)


@failure("H1242", author="F")
def input_gradient_without_requires_grad() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    x = torch.randn(3, 4)
    torch.autograd.grad(model(x).sum(), x)


@failure("H1242", author="F")
def penalty_on_interpolated_data() -> None:
    import torch

    critic = torch.nn.Linear(4, 1)
    real, fake = torch.randn(8, 4), torch.randn(8, 4)
    mixed = 0.5 * real + 0.5 * fake
    score = critic(mixed)
    gradient = torch.autograd.grad(score, mixed, grad_outputs=torch.ones_like(score), create_graph=True)[0]
    (gradient.norm(2, dim=1) - 1).square().mean().backward()


@failure("H1243", author="F")
def upstream_gradient_of_another_shape() -> None:
    import torch

    y = torch.nn.Linear(4, 2)(torch.randn(3, 4))
    y.backward(torch.ones(3))


@failure("H1243", author="F")
def ones_of_the_input_as_gradient() -> None:
    import torch

    x = torch.randn(6, 4, requires_grad=True)
    y = torch.nn.Linear(4, 1)(x)
    torch.autograd.grad(y, x, grad_outputs=torch.ones_like(x))


@failure("H1247", author="F")
def token_ids_require_gradients() -> None:
    import torch

    ids = torch.randint(0, 10, (4, 5))
    ids.requires_grad_()


@failure("H1247", author="F")
def parameter_of_integers() -> None:
    import torch

    class Prior(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = torch.nn.Parameter(torch.arange(5))

    Prior()


@failure("H1248", author="F")
def intermediate_result_frozen() -> None:
    import torch

    code = torch.nn.Linear(4, 4)(torch.randn(2, 4))
    code.requires_grad = False


@failure("H1248", author="F")
def outputs_of_a_backbone_frozen_in_forward() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(x).requires_grad_(requires_grad=False))

    Net()(torch.randn(2, 4)).sum().backward()


@failure("H1249", author="F")
def features_from_inference_mode_trained_on() -> None:
    import torch

    backbone, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    with torch.inference_mode():
        features = backbone(torch.randn(8, 4))
    head(features).sum().backward()


@failure("H1249", author="F")
def statistics_of_inference_mode_updated() -> None:
    import torch

    with torch.inference_mode():
        mean = torch.randn(100, 4).mean(0)
    mean -= mean.mean()


@failure("H1249", author="F")
def prompt_of_inference_mode_made_trainable() -> None:
    import torch

    embedding = torch.nn.Embedding(10, 4)
    with torch.inference_mode():
        prompt = embedding.weight[:3].clone()
    optimizer = torch.optim.SGD([prompt.requires_grad_()], lr=0.1)
    print(optimizer)


@failure("H1250", author="F")
def unbound_rows_changed_in_place() -> None:
    import torch

    rows = torch.nn.Linear(4, 4)(torch.randn(3, 4)).unbind(0)
    rows[0].mul_(2)
    torch.stack(rows).sum().backward()


@failure("H1250", author="F")
def chunk_of_a_gate_changed_in_place() -> None:
    import torch

    class Cell(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = torch.nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, value = self.gates(x).chunk(2, dim=-1)
            value += x
            return gate.sigmoid() * value

    Cell()(torch.randn(3, 4)).sum().backward()


@failure("H1250", author="F")
def view_of_no_grad_changed_with_gradients_on() -> None:
    import torch

    buffer = torch.zeros(4, 4, requires_grad=True) * 1
    with torch.no_grad():
        row = buffer[0]
    row += torch.ones(4, requires_grad=True)
    row.sum().backward()


@failure("H1250", author="F")
def view_detached_in_place() -> None:
    import torch

    features = torch.nn.Linear(4, 4)(torch.randn(2, 4))
    for row in features.split(1):
        row.detach_()


@failure("H1264", author="F")
def backward_of_a_loss_module() -> None:
    import torch

    output = torch.nn.Linear(4, 2)(torch.randn(3, 4))
    loss = torch.nn.CrossEntropyLoss()
    loss(output, torch.tensor([0, 1, 0]))
    loss.backward()


@failure("H1264", author="F")
def backward_of_a_number() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    total = 0.0
    for _ in range(3):
        total += model(torch.randn(2, 4)).mean().item()
    total.backward()


@failure("H1264", author="F")
def backward_of_a_tuple_of_losses() -> None:
    import torch

    def losses(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(), x.square().mean()

    losses(torch.nn.Linear(4, 1)(torch.randn(2, 4))).backward()


@failure("H1264", author="F")
def backward_of_an_empty_sum() -> None:
    import torch

    heads = torch.nn.ModuleDict()
    loss = sum(head(torch.zeros(4)).sum() for head in heads.values())
    loss.backward()


@failure("H1256", author="F")
def norm_of_a_gradient_that_is_not_there() -> None:
    import torch

    model = torch.nn.ModuleList([torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)])
    model[0](torch.randn(2, 4)).sum().backward()
    print([parameter.grad.norm() for parameter in model.parameters()])


@failure("H1256", author="F")
def gradient_of_an_input_that_was_moved() -> None:
    import torch

    x = torch.randn(4, requires_grad=True).double()
    (x**2).sum().backward()
    x.grad.zero_()


@failure("H1256", author="F")
def gradients_divided_before_any_backward() -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    for parameter in model.parameters():
        parameter.grad.div_(4)


@failure("H1258", author="F")
def gradient_of_another_shape_assigned() -> None:
    import torch

    layer = torch.nn.Linear(4, 2)
    layer.weight.grad = torch.zeros(4, 2)


@failure("H1258", author="F")
def gradient_in_double_assigned() -> None:
    import torch

    flat = torch.zeros(8).double()
    parameter = torch.nn.Parameter(torch.zeros(8))
    parameter.grad = flat


@failure("H1262", author="F")
def retain_grad_of_a_constant() -> None:
    import torch

    images = torch.rand(2, 3, 8, 8)
    features = torch.nn.functional.avg_pool2d(images, 2)
    features.retain_grad()
