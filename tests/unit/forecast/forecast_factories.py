"""Factories that the tests of the forecast trace in child processes.

Small jobs, right and wrong ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def _job(model: nn.Module, batch: Any, loss_fn: Any, **options: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch": batch, **options}


def mlp() -> dict[str, Any]:
    """Name no device anywhere."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    batch = (torch.randn(8, 64), torch.randint(10, (8,)))
    return _job(model, batch, lambda batch: functional.cross_entropy(model(batch[0]), batch[1]))


# Samples and width of the evaluation of `evaluated` and `evaluated_alike`.
EVALUATED_SAMPLES = 4096
EVALUATED_WIDTH = 256


class Evaluated(nn.Module):
    """Layers of one width, which fail if they are evaluated with gradients or in training mode."""

    def __init__(self) -> None:
        super().__init__()
        width = EVALUATED_WIDTH
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))

    def evaluate(self, batch: Any) -> torch.Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return self(batch[0]).argmax(dim=1)


def evaluated() -> dict[str, Any]:
    """Evaluate batches that are larger than those of the training."""
    batch = (torch.randn(8, EVALUATED_WIDTH), torch.randint(10, (8,)))
    model = Evaluated()
    return _job(
        model,
        batch,
        lambda batch: functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model, batch: model.evaluate(batch),
        evaluation_batch=(
            torch.randn(EVALUATED_SAMPLES, EVALUATED_WIDTH),
            torch.zeros(EVALUATED_SAMPLES, dtype=torch.long),
        ),
    )


def evaluated_alike() -> dict[str, Any]:
    """Evaluate the batches of the training."""
    job = evaluated()
    del job["evaluation_batch"]
    return job


def only_evaluated() -> dict[str, Any]:
    """Train nothing."""
    model = Evaluated()
    batch = torch.randn(8, EVALUATED_WIDTH)
    return {
        "model": model,
        "evaluate": lambda model, batch: model.evaluate((batch,)),
        "batch": batch,
    }


def fails_in_evaluation() -> dict[str, Any]:
    def evaluate(batch: Any) -> None:
        raise KeyError("missing")

    return {**evaluated(), "evaluate": evaluate}


def misspells_evaluation() -> dict[str, Any]:
    job = evaluated()
    return {**job, "eval_batch": job.pop("evaluation_batch")}


def has_only_evaluation_batch() -> dict[str, Any]:
    job = evaluated()
    del job["evaluate"]
    return job


def evaluates_nothing() -> dict[str, Any]:
    """Evaluate something that is no function."""
    return {**mlp(), "evaluate": 3}


def checkpointed() -> dict[str, Any]:
    """Fail with the batch on the host, in a checkpoint.

    With torch 2.11 its hooks stay while the error is kept.
    """
    job, errors = mlp(), []

    def loss_fn(batch: Any) -> torch.Tensor:
        try:
            return functional.cross_entropy(
                checkpoint(job["model"], batch[0], use_reentrant=False), batch[1]
            )
        except RuntimeError as error:
            errors.append(error)
            raise

    return {**job, "loss_fn": loss_fn}


class Transformer(nn.Module):
    """An encoder with embeddings of token ids.

    It makes its positions in each forward pass, without a device.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.positions = nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: torch.Tensor = self.head(self.encoder(self.embedding(ids) + positions))
        return logits


def transformer() -> dict[str, Any]:
    """Take a length from the sample batch."""
    model = Transformer()
    ids = torch.randint(100, (4, 32))

    def loss_fn(batch: Any) -> torch.Tensor:
        return functional.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
        )

    return _job(model, {"ids": ids, "labels": ids.clone()}, loss_fn)


class SquareAttention(nn.Module):
    """One layer whose attention keeps the scores of all pairs of positions."""

    def __init__(self, seq_len: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(seq_len, width))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions
        attended: torch.Tensor = self.attention(x, x, x, need_weights=True)[0]
        return attended


def of_length(seq_len: int = 32, width: int = 64) -> dict[str, Any]:
    """Have a parameter for the length of the sequences, on which the parameters depend too."""
    model = SquareAttention(seq_len, width)
    batch = torch.randn(4, seq_len, width)
    return _job(model, batch, lambda batch: model(batch).square().mean())


def of_limited_length(seq_len: int = 32) -> dict[str, Any]:
    """Have a table with positions for 64 elements."""
    model = SquareAttention(64, 16)
    batch = torch.randn(4, seq_len, 16)

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        assert batch.shape[1] <= 64, "the table has 64 positions"
        shown = batch + model.positions[: batch.shape[1]]
        return model.attention(shown, shown, shown)[0].square().mean()

    return _job(model, batch, loss_fn)


def of_depth(depth: int = 2) -> dict[str, Any]:
    """Have a parameter that changes the number of operations."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
    return _job(model, torch.randn(4, 8), lambda batch: model(batch).square().mean())


def lstm() -> dict[str, Any]:
    """Recur."""
    model = nn.ModuleDict(
        {"rnn": nn.LSTM(20, 32, num_layers=2, batch_first=True), "head": nn.Linear(32, 1)}
    )
    batch = {"x": torch.randn(8, 25, 20), "y": torch.randn(8, 1)}

    def loss_fn(batch: Any) -> torch.Tensor:
        return functional.mse_loss(model["head"](model["rnn"](batch["x"])[0][:, -1]), batch["y"])

    return _job(model, batch, loss_fn)


def _gan() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    models: dict[str, nn.Module] = {
        "generator": nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)),
        "discriminator": nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)),
    }
    return models, {
        name: torch.optim.Adam(model.parameters(), lr=2e-4) for name, model in models.items()
    }


def gan() -> dict[str, Any]:
    """Make a step of one's own with two optimizers, and noise in it without a device."""
    models, optimizers = _gan()
    generator, discriminator = models.values()

    def step(batch: torch.Tensor) -> None:
        noise = torch.randn(len(batch), 16)
        optimizers["discriminator"].zero_grad()
        fake = generator(noise)
        (
            functional.softplus(discriminator(fake.detach()))
            + functional.softplus(-discriminator(batch))
        ).mean().backward()
        optimizers["discriminator"].step()
        optimizers["generator"].zero_grad()
        functional.softplus(-discriminator(fake)).mean().backward()
        optimizers["generator"].step()

    return {"model": models, "optimizer": optimizers, "step": step, "batch": torch.randn(8, 32)}


def gan_by_guard() -> dict[str, Any]:
    """Make the same by a guard."""
    models, optimizers = _gan()
    generator, discriminator = models.values()

    def step(guard: Any, batch: torch.Tensor) -> None:
        def of_discriminator(real: torch.Tensor) -> torch.Tensor:
            fake = generator(torch.randn(len(real), 16)).detach()
            return (
                functional.softplus(discriminator(fake)) + functional.softplus(-discriminator(real))
            ).mean()

        def of_generator(real: torch.Tensor) -> torch.Tensor:
            return functional.softplus(-discriminator(generator(torch.randn(len(real), 16)))).mean()

        guard.step(batch, of_discriminator, optimizer="discriminator")
        guard.step(batch, of_generator, optimizer="generator")

    return {"model": models, "optimizer": optimizers, "step": step, "batch": torch.randn(8, 32)}


def own_step_of_a_size() -> dict[str, Any]:
    """Return a step that makes its own batch."""
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch_size: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(batch_size, 5, 32)).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step}


def casts_itself() -> dict[str, Any]:
    """Have an autocast in the loss function, as most scripts for a GPU do."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return model(batch).float().square().mean()

    return _job(model, torch.randn(8, 64), loss_fn)


def branching() -> dict[str, Any]:
    """Go another way from three samples on."""
    model = nn.Linear(8, 8)
    return _job(
        model, torch.zeros(4, 8), lambda x: (model(x).exp() if len(x) > 2 else model(x)).mean()
    )


def fp32_only() -> dict[str, Any]:
    """Scatter into fp32 what bf16 would not fit into."""
    model = nn.Linear(8, 8)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.zeros(len(x), 8)
            .scatter_(1, torch.zeros(len(x), 8, dtype=torch.int64), model(x))
            .mean()
        )

    return _job(model, torch.zeros(4, 8), loss_fn)


# Wrong ones.


def needs_values() -> None:
    """Look at weights while building."""
    if nn.Linear(32, 32).weight.detach().numpy().std() < 10:
        raise ValueError("these are no weights")


def hooks_on_nodes() -> dict[str, Any]:
    """Hook autograd's nodes: Megatron's way before there were hooks after accumulation."""
    model = nn.Linear(8, 8)
    model.nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node, parameter in zip(model.nodes, model.parameters(), strict=True):
        node.register_hook(lambda *_, parameter=parameter: setattr(parameter, "grad", None))
    return _job(model, torch.randn(4, 8), lambda batch: model(batch).mean())


def never_trained() -> dict[str, Any]:
    """Take the second of two turns in another call."""
    models, optimizers = _gan()

    def step(batch: torch.Tensor) -> None:
        models["discriminator"](batch).square().mean().backward()
        optimizers["often"].step()
        optimizers["often"].zero_grad()

    optimizers = {"often": optimizers["discriminator"], "rare": optimizers["generator"]}
    return {"model": models, "optimizer": optimizers, "step": step, "batch": torch.randn(8, 32)}


def of_another_model() -> dict[str, Any]:
    """Give the optimizer the parameters of a copy."""
    model = nn.Linear(8, 4)
    return {
        **_job(nn.Linear(8, 4), torch.randn(4, 8), lambda batch: model(batch).mean()),
        "model": model,
    }


def _group_of_one() -> None:
    options = {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **options)


def is_data_parallel() -> dict[str, Any]:
    """Wrap the model as torchrun's scripts do, at a world size of 1."""
    _group_of_one()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
    return _job(model, torch.randn(4, 8), lambda batch: model(batch).mean())


def is_sharded() -> dict[str, Any]:
    """Shard the parameters."""
    from torch.distributed.fsdp import fully_shard

    _group_of_one()
    model = nn.Linear(8, 4)
    fully_shard(model)
    return _job(model, torch.randn(4, 8), lambda batch: model(batch).mean())


def needs_cuda() -> None:
    """Import what only exists where CUDA is."""
    import flash_attn_that_is_not_installed  # type: ignore[import-not-found]  # noqa: F401


def wrong_shapes() -> dict[str, Any]:
    """Raise in the step."""
    model = nn.Linear(5, 2)
    return _job(model, torch.zeros(4, 3), lambda batch: model(batch).sum())


def detached_loss() -> dict[str, Any]:
    """Return a loss that leads nowhere."""
    model = nn.Linear(3, 2)
    return _job(model, torch.zeros(4, 3), lambda batch: model(batch).sum().detach())


def is_killed() -> None:
    """End as the kernel ends a process when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def exits() -> None:
    """Leave without a word."""
    os._exit(3)


def sleeps() -> None:
    """Take for ever."""
    time.sleep(600)


def waits_for_a_child_that_sleeps() -> None:
    """Hang in a process that hangs."""
    subprocess.run(["sleep", "20"], check=True)


def computes() -> None:
    """Compute for ever."""
    while True:
        pass


def prints() -> dict[str, Any]:
    """Print, read the input, and leave a child behind that holds the streams open."""
    print("hello from build")  # noqa: T201
    assert sys.stdin.read() == ""
    return mlp()
