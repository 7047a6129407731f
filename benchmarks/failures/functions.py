"""Failures of what people add to graphs: own functions, hooks, activation checkpoints, transforms, modules' fields.

Each fails for real; see the package for how they are run.
"""

# ruff: noqa: ARG004 - the signatures of own functions are given by torch

from __future__ import annotations

from benchmarks.failures import failure


@failure("H1244", author="F")
def function_returns_one_gradient_for_two_inputs() -> None:
    import torch

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, factor: float) -> torch.Tensor:
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.factor

    x = torch.randn(3, requires_grad=True)
    Scale.apply(x, 2.0).sum().backward()


@failure("H1244", author="F")
def quantiser_returns_too_many_gradients() -> None:
    import torch

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gradient, torch.ones(3)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Round.apply(self.layer(x))

    Net()(torch.randn(2, 4)).sum().backward()


@failure("H1245", author="F")
def function_forgets_to_transpose() -> None:
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.t(), gradient.t() @ x

    weight = torch.randn(4, 2, requires_grad=True)
    Product.apply(torch.randn(5, 4), weight).sum().backward()


@failure("H1245", author="F")
def function_returns_a_scalar_gradient_for_a_vector() -> None:
    import torch

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x[:4].clone()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            return -gradient

    x = torch.randn(6, requires_grad=True)
    Reverse.apply(x).sum().backward()


@failure("H1265", author="F")
def function_returns_a_number_as_gradient() -> None:
    import torch

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(-1, 1)

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> float:
            return gradient.mean().item()

    Clip.apply(torch.randn(3, requires_grad=True)).sum().backward()


@failure("H1246", author="F")
def function_of_an_old_style() -> None:
    import torch

    class Sign(torch.autograd.Function):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sign()

        def backward(self, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    Sign()(torch.randn(3, requires_grad=True))


@failure("H1246", author="F")
def function_without_backward() -> None:
    import torch

    class Floor(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.floor()

    Floor.apply(torch.randn(3, requires_grad=True)).sum().backward()


@failure("H1266", author="F")
def number_saved_for_backward() -> None:
    import torch

    class Power(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, exponent: int) -> torch.Tensor:
            ctx.save_for_backward(x, exponent)
            return x**exponent

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            x, exponent = ctx.saved_tensors
            return gradient * exponent * x ** (exponent - 1), None

    Power.apply(torch.randn(3, requires_grad=True), 3).sum().backward()


@failure("H1251", author="F")
def dropout_turned_off_by_recomputation() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin().cos() if len(calls) == 1 else x.sin()

    checkpoint(block, torch.randn(4, requires_grad=True), use_reentrant=False).sum().backward()


@failure("H1251", author="F")
def cache_filled_in_a_checkpointed_block() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(x.detach())
            return self.layer(torch.cat(self.seen)).tanh()

    checkpoint(Block(), torch.randn(2, 4, requires_grad=True), use_reentrant=False).sum().backward()


@failure("H1251", author="F")
def number_type_differs_in_recomputation() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = True

        def block(x: torch.Tensor) -> torch.Tensor:
            nonlocal first
            scale, first = (1.0 if first else torch.ones(1, dtype=torch.float64)), False
            return (layer(x).float() * scale).exp().tanh()

        y = checkpoint(block, torch.randn(2, 4, requires_grad=True), use_reentrant=False)
    y.sum().backward()


@failure("H1252", author="F")
def reentrant_checkpoint_with_grad() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, requires_grad=True)
    y = checkpoint(torch.sin, x, use_reentrant=True).sum()
    torch.autograd.grad(y, x)


@failure("H1252", author="F")
def reentrant_checkpoint_of_a_frozen_part() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    class Frozen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    features = torch.nn.Linear(4, 4)(torch.randn(2, 4))
    checkpoint(Frozen(), features, use_reentrant=True).sum().backward()


@failure("H1253", author="F")
def hook_sums_a_gradient() -> None:
    import torch

    weight = torch.randn(3, 4, requires_grad=True)
    weight.register_hook(lambda gradient: gradient.sum(0))
    (weight * 2).sum().backward()


@failure("H1253", author="F")
def hook_returns_an_array() -> None:
    import torch

    model = torch.nn.Linear(4, 2)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.double())
    model(torch.randn(3, 4)).sum().backward()


@failure("H1253", author="F")
def hook_on_a_frozen_weight() -> None:
    import torch

    layer = torch.nn.Linear(4, 2).requires_grad_(requires_grad=False)
    layer.weight.register_hook(print)


@failure("H1254", author="F")
def class_weights_to_be_learned() -> None:
    import torch

    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(logits, labels, weight=self.weight)

    Weighted()(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])).backward()


@failure("H1254", author="F")
def exponent_of_a_zeta_function() -> None:
    import torch

    exponent = torch.tensor([2.0, 3.0], requires_grad=True)
    for _ in range(3):
        torch.special.zeta(exponent, 1.0).sum().backward()


@failure("H1254", author="F")
def shape_of_a_gamma_distribution_trained() -> None:
    import torch

    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.threshold = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.igamma(self.threshold.exp(), x.abs())

    Gate()(torch.randn(2, 4)).sum().backward()


@failure("H1255", author="F")
def wrong_backward_found_by_gradcheck() -> None:
    import torch

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * 2 * x**2

    torch.autograd.gradcheck(Cube.apply, torch.randn(4, dtype=torch.double, requires_grad=True))


@failure("H1255", author="F")
def gradcheck_in_single_precision() -> None:
    import torch

    layer = torch.nn.Linear(3, 2)
    torch.autograd.gradcheck(lambda x: layer(x).exp(), torch.randn(4, 3, requires_grad=True) * 3)


@failure("H1257", author="F")
def item_under_vmap() -> None:
    import torch

    def distance(x: torch.Tensor) -> float:
        return x.norm().item()

    torch.func.vmap(distance)(torch.randn(4, 3))


@failure("H1257", author="F")
def branch_on_a_value_under_vmap() -> None:
    import torch

    def clipped(x: torch.Tensor) -> torch.Tensor:
        return x / 2 if x.norm() > 1 else x

    torch.vmap(clipped)(torch.randn(4, 3))


@failure("H1257", author="F")
def dropout_under_per_sample_gradients() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (x,)).sum()

    torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(5, 4))


@failure("H1257", author="F")
def requires_grad_under_jacobian() -> None:
    import torch

    def energy(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return (x**2).sum()

    torch.func.grad(energy)(torch.randn(3))


@failure("H1257", author="F")
def backward_within_func_grad() -> None:
    import torch

    def loss(x: torch.Tensor) -> torch.Tensor:
        value = (x**2).sum()
        value.backward()
        return value

    torch.func.grad(loss)(torch.randn(3))


@failure("H1259", author="F")
def tensor_assigned_to_a_weight() -> None:
    import torch

    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.eye(4)


@failure("H1259", author="F")
def tied_weight_transposed() -> None:
    import torch

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)
            self.decode.weight = self.encode.weight.t()

    Tied()


@failure("H1259", author="F")
def product_registered_as_a_parameter() -> None:
    import torch

    module = torch.nn.Module()
    module.register_parameter("scale", torch.ones(3, requires_grad=True) * 2)


@failure("H1259", author="F")
def number_assigned_to_a_bias() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    model[0].bias = 0


@failure("H1260", author="F")
def layers_before_super_init() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            self.layer = torch.nn.Linear(4, 4)
            super().__init__()

    Net()


@failure("H1260", author="F")
def parameter_without_super_init() -> None:
    import torch

    class Scale(torch.nn.Module):
        def __init__(self, width: int) -> None:
            self.scale = torch.nn.Parameter(torch.ones(width))

    print(Scale(4))


@failure("H1260", author="F")
def buffer_without_super_init() -> None:
    import torch

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            self.register_buffer("table", torch.zeros(8, 4))

    Positions()


@failure("H1261", author="F")
def second_gradient_of_a_once_differentiable_function() -> None:
    import torch
    from torch.autograd.function import once_differentiable

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    x = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(Square.apply(x).square().sum(), x, create_graph=True)
    gradient.sum().backward()


@failure("H1267", author="F", timeout=120)
def graph_break_under_fullgraph() -> None:
    import torch

    def scaled(x: torch.Tensor) -> torch.Tensor:
        print("shape", x.shape, id(x))
        return x * 2

    torch.compile(scaled, fullgraph=True, backend="eager")(torch.randn(4))


@failure("H1267", author="F", timeout=120)
def logging_within_a_compiled_module() -> None:
    import torch

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with open("activations.txt", "a") as file:  # noqa: PTH123
                file.write(f"{x.mean()}\n")
            return x.relu()

    torch.compile(Net(), fullgraph=True, backend="eager")(torch.randn(4))


@failure("H1268", author="F", timeout=120)
def no_compiler_for_inductor() -> None:
    import os

    import torch

    os.environ["PATH"] = "/nonexistent"
    torch.compile(lambda x: (x.sin() + 1).cos())(torch.randn(64))
