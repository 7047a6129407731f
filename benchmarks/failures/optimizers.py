"""Failures by optimizers and schedules: wrong parameters, settings, closures, states of another model."""

from __future__ import annotations

from benchmarks.failures import failure


@failure("H975", author="G")
def optimizer_of_layers_in_a_plain_list() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [torch.nn.Linear(2, 2) for _ in range(3)]

    torch.optim.Adam(Net().parameters(), lr=1e-3)


@failure("H975", author="G")
def everything_is_frozen() -> None:
    import torch

    backbone = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
    torch.optim.SGD(filter(lambda p: p.requires_grad, backbone.parameters()), lr=0.1)


@failure("H975", author="G")
def parameter_moved_before_it_became_a_parameter() -> None:
    import torch

    noise = torch.nn.Parameter(torch.randn(3, 8)) * 0.1
    torch.optim.Adam([noise], lr=0.01)


@failure("H975", author="G")
def head_in_both_groups() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    torch.optim.AdamW([{"params": net.parameters()}, {"params": net[1].parameters(), "lr": 1e-2}])


@failure("H975", author="G")
def head_unfrozen_twice() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
    for layer in (net[0], net[1]):
        optimizer.add_param_group({"params": layer.parameters(), "lr": 0.01})


@failure("H976", author="G")
def resumed_after_a_layer_was_added() -> None:
    import torch

    old = torch.nn.Linear(3, 3)
    saved = torch.optim.Adam(old.parameters()).state_dict()
    new = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    torch.optim.Adam(new.parameters()).load_state_dict(saved)


@failure("H976", author="G")
def resumed_with_other_groups() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    torch.save(torch.optim.SGD([{"params": each.parameters()} for each in net], lr=0.1).state_dict(), "optimizer.pt")
    torch.optim.SGD(net.parameters(), lr=0.1).load_state_dict(torch.load("optimizer.pt"))


@failure("H986", author="G")
def schedule_resumed_with_a_fresh_optimizer() -> None:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, last_epoch=29)


@failure("H986", author="G")
def cosine_schedule_from_a_saved_epoch() -> None:
    import torch

    net = torch.nn.Linear(2, 2)
    torch.save({"epoch": 12, "model": net.state_dict()}, "last.pt")
    checkpoint = torch.load("last.pt")
    net.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(net.parameters())
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, last_epoch=checkpoint["epoch"])


@failure("H987", author="G")
def one_cycle_counted_in_epochs_but_stepped_in_batches() -> None:
    import torch

    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for _epoch in range(10):
        for _batch in range(5):
            net(torch.randn(4, 2)).mean().backward()
            optimizer.step()
            schedule.step()


@failure("H987", author="G")
def one_cycle_trained_longer_after_resume() -> None:
    import torch

    def build(epochs: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.OneCycleLR]:
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=epochs, steps_per_epoch=4)

    _, first = build(2)
    optimizer, second = build(5)
    second.load_state_dict(first.state_dict())
    while True:
        optimizer.step()
        second.step()


@failure("H1320", author="G")
def negative_learning_rate_from_a_sweep() -> None:
    import torch

    rate = 10.0 * -3
    torch.optim.Adam(torch.nn.Linear(1, 1).parameters(), lr=rate)


@failure("H1320", author="G")
def second_beta_of_one() -> None:
    import torch

    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters(), betas=(0.9, 1.0))


@failure("H1320", author="G")
def weight_decay_with_a_wrong_sign() -> None:
    import torch

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1, weight_decay=-1e-4)


@failure("H1320", author="G")
def nesterov_without_momentum() -> None:
    import torch

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1, nesterov=True)


@failure("H1320", author="G")
def learning_rate_read_as_text() -> None:
    import torch
    import yaml

    settings = yaml.safe_load("lr: 1e-3")
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=settings["lr"])


@failure("H1286", author="G")
def dropout_in_percent() -> None:
    import torch

    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(20))


@failure("H1321", author="G")
def one_tensor_instead_of_a_list() -> None:
    import torch

    torch.optim.Adam(torch.zeros(3, requires_grad=True))


@failure("H1321", author="G")
def modules_instead_of_parameters() -> None:
    import torch

    torch.optim.SGD([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], lr=0.1)


@failure("H1321", author="G")
def names_and_parameters_swapped() -> None:
    import torch

    net = torch.nn.Linear(2, 2)
    torch.optim.SGD(dict(net.named_parameters()), lr=0.1)


@failure("H1321", author="G")
def scheduler_of_a_model() -> None:
    import torch

    torch.optim.lr_scheduler.StepLR(torch.nn.Linear(1, 1), step_size=3)


@failure("H1321", author="G")
def lbfgs_with_groups() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    torch.optim.LBFGS([{"params": each.parameters()} for each in net])


@failure("H1322", author="G")
def lbfgs_without_closure() -> None:
    import torch

    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters())
    net(torch.randn(4, 2)).pow(2).mean().backward()
    optimizer.step()


@failure("H1322", author="G")
def plateau_without_metric() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    for _epoch in range(2):
        optimizer.step()
        schedule.step()


@failure("H1323", author="G")
def one_cycle_without_length() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, epochs=3)


@failure("H1323", author="G")
def one_cycle_of_an_empty_loader() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(3)), batch_size=8, drop_last=True)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, epochs=3, steps_per_epoch=len(loader))


@failure("H1323", author="G")
def lambdas_for_fewer_groups() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD([{"params": each.parameters()} for each in net], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=[lambda epoch: 0.9**epoch])


@failure("H1323", author="G")
def warm_up_without_milestone() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[])


@failure("H1323", author="G")
def plateau_that_should_grow() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="maximize")


@failure("H1323", author="G")
def cyclic_momentum_of_an_optimizer_without() -> None:
    import torch

    optimizer = torch.optim.Adagrad(torch.nn.Linear(2, 1).parameters())
    torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)


@failure("H1324", author="G")
def sparse_embedding_with_adam() -> None:
    import torch

    table = torch.nn.Embedding(100, 4, sparse=True)
    optimizer = torch.optim.AdamW(table.parameters())
    table(torch.tensor([1, 5])).sum().backward()
    optimizer.step()


@failure("H1324", author="G")
def dense_layer_with_sparse_adam() -> None:
    import torch

    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SparseAdam(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@failure("H1325", author="G")
def fused_and_foreach_together() -> None:
    import torch

    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters(), fused=True, foreach=True)


@failure("H1325", author="G")
def fused_and_differentiable_for_meta_learning() -> None:
    import torch

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1, fused=True, differentiable=True)


@failure("H1256", author="G")
def clearing_gradients_by_hand_before_the_first_backward() -> None:
    import torch

    for parameter in torch.nn.Linear(3, 3).parameters():
        parameter.grad.zero_()


@failure("H1256", author="G")
def norm_of_the_gradient_of_an_unused_branch() -> None:
    import torch

    net = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    net["used"](torch.ones(1, 2)).sum().backward()
    print({name: parameter.grad.norm().item() for name, parameter in net.named_parameters()})


@failure("H1327", author="G")
def adam_state_of_a_wider_model() -> None:
    import torch

    def train(width: int, state: dict[str, object] | None) -> dict[str, object]:
        layer = torch.nn.Linear(4, width)
        optimizer = torch.optim.Adam(layer.parameters())
        if state:
            optimizer.load_state_dict(state)
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    train(16, train(8, None))


@failure("H1327", author="G")
def momentum_of_the_old_head() -> None:
    import torch

    head = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for classes in (3, 5):
        head.weight.data, head.bias.data = torch.randn(classes, 4), torch.zeros(classes)
        head.weight.grad = head.bias.grad = None
        head(torch.ones(1, 4)).sum().backward()
        optimizer.step()
