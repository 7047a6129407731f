"""The jobs that the forecast is measured on, each a function that `holdfast plan` takes and that
also really trains.

Own networks are in `forecast_networks`; those of transformers, built from configs, in
`forecast_transformers`. Every job is small enough for one CPU core, and grows with its micro-batch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

from benchmarks import forecast_networks as networks
from holdfast.forecast.job.tracing import TraceRequest

Kind = Literal["matrix products", "convolution", "fused RNN", "Tacotron 2"]
Family = Literal["transformer", "CNN", "RNN", "other"]
Parts = dict[str, Any]
Batch = dict[str, torch.Tensor]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One job of the zoo.

    Args:
        name: Of the function that builds it, which takes ``micro_batch_size``.
        module: Where that function lies.
        kind: By the kernels with scratch memory of their own: decides which accuracy is to be
            reached on a CPU.
        family: Decides which accuracy is to be reached on a GPU.
        micro_batch_size: Samples of the sample batch, and of the real step on a CPU.
        max_grad_norm: To which the real step clips gradients; None: it does not.
        own_step: It makes the whole step itself, in fp32.
    """

    name: str
    module: str
    kind: Kind
    family: Family
    micro_batch_size: int
    max_grad_norm: float | None = None
    own_step: bool = False

    def request(self, **asked: Any) -> TraceRequest:
        """Return the request that has it traced."""
        return TraceRequest(factory=f"{self.module}:{self.name}", **asked)

    @property
    def function(self) -> Callable[..., Parts]:
        """Return the function."""
        found: Callable[..., Parts] = getattr(importlib.import_module(self.module), self.name)
        return found

    def build(self, micro_batch_size: int | None = None) -> Parts:
        """Build it: model, optimizer, ``loss_fn`` or ``step``, and a batch."""
        return (
            self.function()
            if micro_batch_size is None
            else self.function(micro_batch_size=micro_batch_size)
        )


def train_step(
    model: Model, job: Parts, batch: Any, precision: str = "fp32", scaler: Any = None
) -> None:
    """Make one real training step as a plain loop does.

    Args:
        model: What is trained.
        job: What `Model.build` returned.
        batch: A batch on the device of the job.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast.
        scaler: A gradient scaler, for fp16.
    """
    if "step" in job:
        job["step"](batch)
        return
    parameters = [parameter for module in modules_of(job) for parameter in module.parameters()]
    kind = _AUTOCAST.get(precision)
    job["optimizer"].zero_grad(set_to_none=True)
    with torch.autocast(parameters[0].device.type, kind, enabled=kind is not None):
        loss = job["loss_fn"](batch)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(job["optimizer"])
    if model.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(parameters, model.max_grad_norm)
    job["optimizer"].step()
    if scaler is not None:
        scaler.update()


def modules_of(job: Parts) -> list[nn.Module]:
    """Return the models of a job."""
    return list(job["model"].values()) if isinstance(job["model"], Mapping) else [job["model"]]


def optimizers_of(job: Parts) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a job."""
    return (
        list(job["optimizer"].values())
        if isinstance(job["optimizer"], Mapping)
        else [job["optimizer"]]
    )


def _job(
    model: nn.Module,
    batch: Batch,
    loss_fn: Callable[[Batch], torch.Tensor],
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> Parts:
    optimizer = kind((p for p in model.parameters() if p.requires_grad), **{"lr": 1e-3, **options})
    return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch": batch}


def _classifier(model: nn.Module, inputs: torch.Tensor, **optimizer: Any) -> Parts:
    batch = {"inputs": inputs, "labels": torch.randint(10, (len(inputs),))}
    return _job(
        model,
        batch,
        lambda batch: F.cross_entropy(model(batch["inputs"]), batch["labels"]),
        **optimizer,
    )


def mlp(micro_batch_size: int = 256) -> Parts:
    """Six wide layers with LayerNorm, GELU and dropout; gradients are clipped."""
    return _classifier(networks.Perceptron(1024, 1024, 6, 10), torch.randn(micro_batch_size, 1024))


def contrastive(micro_batch_size: int = 256) -> Parts:
    """One encoder called on two views, every view against every other (InfoNCE).

    Logits of batch by batch.
    """
    model = networks.Perceptron(512, 1024, 3, 128)

    def loss_fn(batch: Batch) -> torch.Tensor:
        first, second = F.normalize(model(batch["first"])), F.normalize(model(batch["second"]))
        return F.cross_entropy(
            first @ second.T / 0.1, torch.arange(len(first), device=first.device)
        )

    return _job(
        model, {name: torch.randn(micro_batch_size, 512) for name in ("first", "second")}, loss_fn
    )


def vae(micro_batch_size: int = 256) -> Parts:
    """A variational autoencoder."""
    model = networks.VariationalAutoencoder()

    def loss_fn(batch: Batch) -> torch.Tensor:
        images = batch["images"]
        logits, mean, log_variance = model(images)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        return (
            F.binary_cross_entropy_with_logits(logits, images, reduction="sum") + divergence
        ) / len(images)

    return _job(model, {"images": torch.rand(micro_batch_size, 784)}, loss_fn, torch.optim.Adam)


def resnet(micro_batch_size: int = 16) -> Parts:
    """Residual blocks as in ResNet-18, SGD with momentum."""
    images = torch.randn(micro_batch_size, 3, 32, 32)
    return _classifier(networks.ResNet(), images, kind=torch.optim.SGD, lr=0.1, momentum=0.9)


def unet(micro_batch_size: int = 4) -> Parts:
    """Segmentation with skips."""
    model = networks.UNet()
    batch = {
        "images": torch.randn(micro_batch_size, 1, 96, 96),
        "masks": torch.rand(micro_batch_size, 1, 96, 96),
    }
    return _job(
        model,
        batch,
        lambda batch: F.binary_cross_entropy_with_logits(model(batch["images"]), batch["masks"]),
    )


def _two_networks(size: int, second: str, critic: nn.Module) -> Parts:
    models = {"generator": networks.Generator(), second: critic}
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=2e-4) for name, model in models.items()
    }
    return {
        "model": models,
        "optimizer": optimizers,
        "batch": {"images": torch.randn(size, 3, 32, 32)},
    }


def dcgan(micro_batch_size: int = 32) -> Parts:
    """Two networks, two optimizers, one step."""
    job = _two_networks(micro_batch_size, "discriminator", networks.Discriminator())
    (generator, discriminator), optimizers = job["model"].values(), job["optimizer"]

    def step(batch: Batch) -> None:
        real = batch["images"]
        made = generator(torch.randn(len(real), 64, 1, 1, device=real.device))
        optimizers["discriminator"].zero_grad(set_to_none=True)
        on_real, on_made = discriminator(real), discriminator(made.detach())
        loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        (loss + F.binary_cross_entropy_with_logits(on_made, torch.zeros_like(on_made))).backward()
        optimizers["discriminator"].step()
        optimizers["generator"].zero_grad(set_to_none=True)
        fooled = discriminator(made)
        F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled)).backward()
        optimizers["generator"].step()

    return {**job, "step": step}


def wgan_gp(micro_batch_size: int = 32) -> Parts:
    """A critic with a gradient penalty, which is differentiated twice."""
    job = _two_networks(micro_batch_size, "critic", networks.Discriminator(normalised=False))
    (generator, critic), optimizers = job["model"].values(), job["optimizer"]

    def step(batch: Batch) -> None:
        real = batch["images"]
        made = generator(torch.randn(len(real), 64, 1, 1, device=real.device))
        share = torch.rand(len(real), 1, 1, 1, device=real.device)
        between = (share * real + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()
        optimizers["critic"].zero_grad(set_to_none=True)
        (critic(made.detach()).mean() - critic(real).mean() + penalty).backward()
        optimizers["critic"].step()
        optimizers["generator"].zero_grad(set_to_none=True)
        (-critic(made).mean()).backward()
        optimizers["generator"].step()

    return {**job, "step": step}


def tacotron(micro_batch_size: int = 8) -> Parts:
    """Text to speech, 40 frames from 48 characters."""
    model = networks.Tacotron()

    def loss_fn(batch: Batch) -> torch.Tensor:
        before, after, stops = model(batch["text"], batch["frames"])
        loss = F.mse_loss(before, batch["frames"]) + F.mse_loss(after, batch["frames"])
        return loss + F.binary_cross_entropy_with_logits(stops, batch["stops"])

    batch = {
        "text": torch.randint(64, (micro_batch_size, 48)),
        "frames": torch.randn(micro_batch_size, 40, networks.MELS),
        "stops": torch.rand(micro_batch_size, 40),
    }
    return _job(model, batch, loss_fn, torch.optim.Adam, weight_decay=1e-6)


def encoder(micro_batch_size: int = 8, length: int = 256) -> Parts:
    """The transformer encoder that torch has."""
    return _classifier(networks.Encoder(), torch.randn(micro_batch_size, length, 256))


def encoder_recomputed(micro_batch_size: int = 8, length: int = 256) -> Parts:
    """The same, every layer checkpointed by its author."""
    return _classifier(
        networks.Encoder(recomputed=True), torch.randn(micro_batch_size, length, 256)
    )


def lstm(micro_batch_size: int = 16, length: int = 64) -> Parts:
    """A text classifier."""
    return _classifier(
        networks.RecurrentClassifier(nn.LSTM), torch.randint(4000, (micro_batch_size, length))
    )


def gru(micro_batch_size: int = 16, length: int = 64) -> Parts:
    """The same with gated recurrent units."""
    return _classifier(
        networks.RecurrentClassifier(nn.GRU), torch.randint(4000, (micro_batch_size, length))
    )


def lora(micro_batch_size: int = 8, length: int = 128) -> Parts:
    """A frozen language model with adapters that learn."""
    model = networks.AdaptedLanguageModel()

    def loss_fn(batch: Batch) -> torch.Tensor:
        logits = model(batch["ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    return _job(model, {"ids": torch.randint(2000, (micro_batch_size, length))}, loss_fn)


def vit(micro_batch_size: int = 16) -> Parts:
    """A vision transformer of our own."""
    return _classifier(networks.VisionTransformer(), torch.randn(micro_batch_size, 3, 64, 64))


_OWN: tuple[tuple[Callable[..., Parts], Kind, Family], ...] = (
    *((build, "matrix products", "other") for build in (mlp, contrastive, vae)),
    *((build, "matrix products", "transformer") for build in (encoder, encoder_recomputed, lora)),
    (vit, "convolution", "transformer"),
    *((build, "convolution", "CNN") for build in (resnet, unet, dcgan, wgan_gp)),
    *((build, "fused RNN", "RNN") for build in (lstm, gru)),
    (tacotron, "Tacotron 2", "RNN"),
)
_CLIPPED = {"mlp": 1.0, "tacotron": 1.0}
_OWN_STEPS = {"dcgan", "wgan_gp"}
_HUGGING_FACE = "benchmarks.forecast_transformers"
_TRANSFORMERS: tuple[tuple[str, Kind, int], ...] = (
    *(
        (name, "matrix products", 4)
        for name in ("pegasus", "llama_sdpa", "llama_eager", "gpt2", "t5")
    ),
    ("bert", "matrix products", 8),
    ("hf_vit", "convolution", 16),
    *((name, "convolution", 4) for name in ("whisper", "wav2vec2")),
)
MODELS = (
    *(
        Model(
            name=build.__name__,
            module=__name__,
            kind=kind,
            family=family,
            micro_batch_size=inspect.signature(build).parameters["micro_batch_size"].default,
            max_grad_norm=_CLIPPED.get(build.__name__),
            own_step=build.__name__ in _OWN_STEPS,
        )
        for build, kind, family in _OWN
    ),
    *(
        Model(
            name=name, module=_HUGGING_FACE, kind=kind, family="transformer", micro_batch_size=size
        )
        for name, kind, size in _TRANSFORMERS
    ),
)
"""All jobs. Those of transformers come last and can only be built where it is, see `find_models`.
"""
QUICK = ("mlp", "resnet", "lora")


def find_models(*, quick: bool) -> tuple[list[Model], list[str]]:
    """Return the jobs that can be built here, and what is left out and why.

    Args:
        quick: Only a few, none of transformers.
    """
    if quick:
        return [model for model in MODELS if model.name in QUICK], []
    from benchmarks.forecast_transformers import find_transformers

    version, why = find_transformers()
    if version is not None:
        return list(MODELS), [f"transformers {version}"]
    found = [model for model in MODELS if model.module == __name__]
    return found, [f"{model.name}: {why}" for model in MODELS if model not in found]
