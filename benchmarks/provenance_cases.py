"""Planted numerical faults with the truth about each, for ``benchmarks.provenance``.

A case takes a working step of ``provenance_models`` and spoils a sample, a weight, a buffer, a
mask, an eps or a line of the loss, so that its loss or its gradients hold NaN or Inf. Every third
case is held out: the tracer was not changed after a look at one of them. The hard cases at the end
were written when it was finished, against places where a tracer may go wrong; all of them are held
out.

At the first look 11 of 16 hard cases were right. After it two truths were widened, since they had
misnamed what torch runs (``logdet`` is ``linalg_slogdet``, and weight norm computes in a module of
its own), and one case was taken out, since what it planted did not happen (autocast sums in fp32).
The tracer was left as it was.
"""

# ruff: noqa: D101, D102 - a model says by its name what it is
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.provenance_models import (
    SAMPLES,
    Apply,
    Batch,
    Block,
    Step,
    cnn,
    flow,
    gan,
    lstm,
    mlp,
    ragged,
    seq2seq,
    siamese,
    tacotron,
    transformer,
    unet,
    vae,
)

LOSS = "loss function"


@dataclass(frozen=True, slots=True)
class Case:
    """One planted fault.

    Args:
        name: Of the fault.
        make: Returns a step that works.
        spoil: Spoils it.
        op: The names of the guilty operation, or of the bad tensor, that count as right.
        module: The paths that count as right; empty for a tensor of the batch.
        samples: Guilty samples; empty if none is.
        held_out: Whether it was kept away from the tracer's tuning.
        hard: Whether it was written after the tracer, to make it fail.
    """

    name: str
    make: Callable[[], Step]
    spoil: Callable[[Step], None]
    op: tuple[str, ...]
    module: tuple[str, ...]
    samples: tuple[int, ...]
    held_out: bool
    hard: bool


CASES: list[Case] = []


def _nothing(_: Step) -> None:
    pass


def case(
    make: Callable[[], Step] | None,
    op: str,
    module: str,
    samples: tuple[int, ...] = (),
    *,
    hard: bool = False,
) -> Callable[[Callable[..., Any]], None]:
    """Register a case; alternatives are separated by ``|``.

    Without `make`, the function makes the spoiled step.
    """

    def register(spoil: Callable[..., Any]) -> None:
        held_out = hard or len(CASES) % 3 == 2
        parts = (make, spoil) if make is not None else (spoil, _nothing)
        CASES.append(
            Case(
                spoil.__name__,
                *parts,
                tuple(op.split("|")),
                tuple(module.split("|")),
                samples,
                held_out,
                hard,
            )
        )

    return register


@torch.no_grad()
def put(target: torch.Tensor, place: object, value: float | torch.Tensor) -> None:
    target[place] = value  # type: ignore[index]


# --- regression


@case(mlp, "x", "", (5,))
def nan_in_a_feature(step: Step) -> None:
    step.batch["x"][5, 3] = math.nan


@case(mlp, "y", "", (2,))
def infinite_target(step: Step) -> None:
    step.batch["y"][2] = math.inf


@case(mlp, "div", "standardise", (3,))
def constant_sample_and_no_eps(step: Step) -> None:
    step.model.standardise.eps = 0.0
    step.batch["x"][3] = 1.0


@case(mlp, "log", "logs", (6,))
def negative_count(step: Step) -> None:
    step.batch["counts"][6, 0] = -3.0


@case(mlp, "log", "logs", (1,))
def zero_count_and_no_floor(step: Step) -> None:
    step.model.logs.floor = 0.0
    step.batch["counts"][1, 2] = 0.0


@case(mlp, "exp", LOSS)
def tiny_predicted_variance(step: Step) -> None:
    put(step.model.log_variance.bias, 0, -200.0)


@case(mlp, "blocks.1.outer.weight", "blocks.1.outer")
def nan_weight(step: Step) -> None:
    put(step.model.blocks[1].outer.weight, (2, 3), math.nan)


@case(mlp, "sqrt", "blocks.0.middle")
def root_of_a_square_at_zero(step: Step) -> None:
    step.model.blocks[0].middle = Apply(lambda hidden: torch.sqrt(hidden * hidden))
    put(step.model.blocks[0].inner.weight, 0, 0.0)
    put(step.model.blocks[0].inner.bias, 0, 0.0)


@case(mlp, "x", "", (1, 6))
def two_nan_samples(step: Step) -> None:
    step.batch["x"][1, 0] = step.batch["x"][6, 2] = math.nan


@case(mlp, "log", "logs", (4,))
def zero_count_beside_a_harmless_infinity(step: Step) -> None:
    step.model.blocks[1].middle = Apply(lambda h: h + torch.where(h > 0, h, -math.inf).exp() * 0.1)
    step.model.logs.floor = 0.0
    step.batch["counts"][4, 7] = 0.0


@case(mlp, "mean", "standardise", (2,))
def mean_overflows(step: Step) -> None:
    step.batch["x"][2] = 3e38


@case(mlp, "pow", LOSS, (4,))
def squared_error_overflows(step: Step) -> None:
    step.batch["y"][4] = 1e25


@case(mlp, "cosh", LOSS, (6,))
def log_cosh_overflows(step: Step) -> None:
    step.batch["y"][6] = 200.0
    step.loss = lambda b: torch.log(torch.cosh(b["y"] - step.model(b["x"], b["counts"])[0])).mean()


@case(mlp, "log", "logs", (0, 7))
def logarithm_in_place(step: Step) -> None:
    step.model.logs = Apply(lambda counts: counts.clone().log_())
    step.batch["counts"][0, 1] = step.batch["counts"][7, 4] = 0.0


# --- images


@case(cnn, "div", "embed")
def zero_embedding(step: Step) -> None:
    step.model.embed.eps = 0.0
    put(step.model.stage[1].weight, slice(None), 0.0)


@case(cnn, "stem.1.running_mean", "stem.1")
def infinite_running_mean(step: Step) -> None:
    step.model.eval()
    step.model.stem[1].running_mean[3] = math.inf


@case(cnn, "batch_norm", "stem.1")
def negative_running_variance(step: Step) -> None:
    step.model.eval()
    step.model.stem[1].running_var[2] = -1.0


@case(cnn, "div", "model")
def temperature_zero(step: Step) -> None:
    step.model.temperature = 0.0


@case(cnn, "convolution", "stem.0", (3,))
def enormous_image(step: Step) -> None:
    step.batch["image"][3] = 3e38
    put(step.model.stem[0].weight, slice(None), 1.0)


@case(cnn, "nll_loss|cross_entropy", LOSS, (2, 6))
def label_of_a_banned_class(step: Step) -> None:
    banned = torch.tensor([False, False, True, False])
    step.loss = lambda b: F.cross_entropy(
        step.model(b["image"]).masked_fill(banned, -math.inf), b["label"]
    )


@case(cnn, "image", "", (7,))
def infinite_pixel(step: Step) -> None:
    step.batch["image"][7, 0, 2, 2] = math.inf


@case(cnn, "mm|matmul|linear", "head")
def enormous_weights(step: Step) -> None:
    put(step.model.head.weight, slice(None), 3e38)


@case(cnn, "log_softmax|softmax|exp", LOSS)
def softmax_by_hand_overflows(step: Step) -> None:
    put(step.model.head.weight, slice(None), 30.0)

    def loss(b: Batch) -> torch.Tensor:
        odds = torch.exp(step.model(b["image"]))
        return -torch.log(odds.gather(1, b["label"][:, None]) / odds.sum(1, keepdim=True)).mean()

    step.loss = loss


# --- sequences


@case(lstm, "div", "pool", (2,))
def empty_sequence(step: Step) -> None:
    step.batch["lengths"][2] = 0


@case(lstm, "embedding.weight", "embedding", (4,))
def nan_row_of_an_embedding(step: Step) -> None:
    step.batch["tokens"][step.batch["tokens"] == 7] = 8
    step.batch["tokens"][4, 1] = 7
    step.batch["lengths"][4] = 6
    put(step.model.embedding.weight, 7, math.nan)


@case(lstm, "lstm.weight_hh_l0", "lstm")
def infinite_recurrent_weight(step: Step) -> None:
    put(step.model.lstm.weight_hh_l0, (0, 0), math.inf)


@case(lstm, "div", "pool", (0, 5))
def two_empty_sequences(step: Step) -> None:
    step.batch["lengths"][0] = step.batch["lengths"][5] = 0


@case(lstm, "std", "pool", (3,))
def deviation_over_one_step(step: Step) -> None:

    def pool(states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.stack([s[:n].std(0) for s, n in zip(states, lengths.tolist(), strict=True)])

    step.model.pool.forward = pool
    step.batch["lengths"][3] = 1


@case(lstm, "max|amax", "pool", (6,))
def largest_of_no_steps(step: Step) -> None:

    def pool(states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        exists = torch.arange(states.shape[1]) < lengths[:, None]
        return states.masked_fill(~exists[..., None], -math.inf).max(1).values

    step.model.pool.forward = pool
    step.batch["lengths"][6] = 0


@case(transformer, "softmax", "layers.0.attention", (3,))
def nothing_but_padding(step: Step) -> None:
    step.batch["tokens"][3] = 0


@case(lambda: transformer(Apply(torch.exp)), "exp", "layers.1.feed.middle")
def exponential_overflows(step: Step) -> None:
    put(step.model.layers[1].feed.inner.bias, slice(None), 100.0)


@case(transformer, "mul", "layers.0.attention")
def attention_scores_overflow(step: Step) -> None:
    step.model.layers[0].attention.scale = 1e39


@case(transformer, "features", "", (2,))
def nan_in_the_padding(step: Step) -> None:
    step.batch["features"][2, 5] = math.nan


@case(lambda: transformer(Apply(torch.log)), "log", "layers.1.feed.middle")
def logarithm_in_a_checkpointed_block(step: Step) -> None:
    step.model.layers[1].recompute = True


@case(
    lambda: transformer(Apply(lambda h: h * torch.sqrt((h * h).sum(-1, keepdim=True)))),
    "sqrt",
    "layers.1.feed.middle",
)
def root_in_a_checkpointed_block_backward(step: Step) -> None:
    step.model.layers[1].recompute = True
    put(step.model.layers[1].feed.inner.weight, slice(None), 0.0)
    put(step.model.layers[1].feed.inner.bias, slice(None), 0.0)


@case(transformer, "layer_norm", "layers.0.norm", (4,))
def layer_norm_without_eps(step: Step) -> None:
    layer = step.model.layers[0]
    layer.norm.eps = 0.0
    step.batch["tokens"][step.batch["tokens"] == 7] = 8
    step.batch["tokens"][4] = 7
    step.batch["features"][4] = 0.0
    put(step.model.embedding.weight, 7, 1.0)
    put(layer.attention.value.weight, slice(None), 0.0)
    put(layer.attention.value.bias, slice(None), 0.0)


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.attention(x, x, x, key_padding_mask=tokens == 0)[0].mean(1))


@case(None, "softmax|scaled_dot_product_attention", "attention", (5,))
def nothing_but_padding_in_torchs_attention() -> Step:
    model = TorchAttention()
    batch = {"tokens": torch.randint(1, 20, (SAMPLES, 6)), "label": torch.arange(SAMPLES) % 4}
    batch["tokens"][5] = 0
    return Step({"model": model}, batch, lambda b: F.cross_entropy(model(b["tokens"]), b["label"]))


@case(transformer, "bmm|matmul", "layers.1.attention")
def queries_and_keys_overflow(step: Step) -> None:
    for part in (step.model.layers[1].attention.query, step.model.layers[1].attention.key):
        put(part.weight, slice(None), 0.0)
        put(part.bias, slice(None), 1e20)


# --- speech


@case(tacotron, "softmax", "decoder.attention", (3,))
def empty_text(step: Step) -> None:
    step.batch["text"][3] = 0


@case(tacotron, "log", LOSS, (0, 2, 4, 6))
def entropy_of_exact_zeros(step: Step) -> None:

    def loss(b: Batch) -> torch.Tensor:
        frames, _, alignments = step.model(b["text"], b["mels"])
        return (
            F.mse_loss(frames, b["mels"])
            + 0.1 * (alignments * torch.log(alignments)).sum(-1).mean()
        )

    step.loss = loss


@case(tacotron, "div", LOSS, (5,))
def no_frames(step: Step) -> None:
    step.batch["lengths"][5] = 0.0


@case(tacotron, "mels", "", (1,))
def nan_in_a_frame(step: Step) -> None:
    step.batch["mels"][1, 2, 0] = math.nan


@case(tacotron, "exp", "decoder.amplify")
def decoder_state_overflows(step: Step) -> None:
    step.model.decoder.amplify = Apply(lambda hidden: torch.exp(hidden * hidden * 1e8))


@case(tacotron, "div", LOSS, (6,))
def spectral_convergence_of_silence(step: Step) -> None:
    step.batch["mels"][6] = 0.0

    def loss(b: Batch) -> torch.Tensor:
        frames, _, _ = step.model(b["text"], b["mels"])
        return (
            (frames - b["mels"]).flatten(1).norm(dim=1) / b["mels"].flatten(1).norm(dim=1)
        ).mean()

    step.loss = loss


@case(tacotron, "decoder.cell.weight_ih", "decoder.cell")
def nan_weight_in_the_decoder(step: Step) -> None:
    put(step.model.decoder.cell.weight_ih, (0, 0), math.nan)


@case(tacotron, "log", LOSS, (7,))
def log_magnitude_of_a_silent_frame(step: Step) -> None:
    step.batch["mels"] = step.batch["mels"].abs() + 0.1
    step.batch["mels"][7, 1] = 0.0
    step.loss = lambda b: F.l1_loss(step.model(b["text"], b["mels"])[0], torch.log(b["mels"]))


# --- adversarial


@case(gan, "log", LOSS)
def saturated_discriminator(step: Step) -> None:
    put(step.models["discriminator"].net[2].bias, slice(None), 100.0)


@case(lambda: gan("penalty"), "sqrt", LOSS)
def penalty_on_a_flat_discriminator(step: Step) -> None:
    put(step.models["discriminator"].net[0].weight, slice(None), 0.0)


@case(gan, "div", "generator.output")
def generator_scales_by_its_largest(step: Step) -> None:
    step.models["generator"].output = Apply(lambda x: x / x.abs().amax(-1, keepdim=True))
    put(step.models["generator"].net[3].weight, slice(None), 0.0)
    put(step.models["generator"].net[3].bias, slice(None), 0.0)


@case(gan, "noise", "", (4,))
def nan_noise(step: Step) -> None:
    step.batch["noise"][4, 1] = math.nan


@case(gan, "generator.net.3.weight", "generator.net.3")
def infinite_generator_weight(step: Step) -> None:
    put(step.models["generator"].net[3].weight, (1, 1), math.inf)


@case(gan, "addmm|linear", "discriminator.net.0", (2,))
def enormous_real_sample(step: Step) -> None:
    step.batch["real"][2] = 3e38
    put(step.models["discriminator"].net[0].weight, slice(None), 0.5)


# --- encoder and decoder


@case(seq2seq, "div", LOSS, (5,))
def no_label_counts(step: Step) -> None:
    step.batch["labels"][5] = -100


@case(seq2seq, "softmax", "encoder.0.attention", (4,))
def empty_source(step: Step) -> None:
    step.batch["source"][4] = 0


@case(seq2seq, "final_logits_bias", "model")
def nan_buffer(step: Step) -> None:
    step.model.final_logits_bias[0, 3] = math.nan


@case(seq2seq, "div", "model")
def logit_cap_of_zero(step: Step) -> None:
    step.model.logit_cap = lambda logits: torch.tanh(logits / torch.zeros(())) * 5.0


@case(seq2seq, "div", LOSS, (7,))
def no_label_counts_beside_legal_masks(step: Step) -> None:
    step.batch["labels"][step.batch["labels"] == 3] = 4
    banned = torch.arange(20) == 3
    step.model.logit_cap = lambda logits: logits.masked_fill(banned, -math.inf)
    step.batch["labels"][7] = -100


@case(seq2seq, "nll_loss|cross_entropy", LOSS, (2,))
def banned_label(step: Step) -> None:
    step.batch["labels"][step.batch["labels"] == 3] = 4
    banned = torch.zeros(20).masked_fill(torch.arange(20) == 3, -math.inf)
    step.model.logit_cap = lambda logits: logits + banned
    step.batch["labels"][2, 1] = 3


@case(seq2seq, "softmax", "encoder.0.attention", (1,))
def empty_source_in_a_checkpointed_layer(step: Step) -> None:
    step.model.encoder[0].recompute = True
    step.batch["source"][1] = 0


@case(seq2seq, "sigmoid|log", "model")
def logarithm_of_a_saturated_sigmoid(step: Step) -> None:
    put(step.model.lm_head.weight, slice(None), 0.0)
    step.model.final_logits_bias.fill_(-200.0)
    step.model.logit_cap = lambda logits: torch.log(torch.sigmoid(logits))


# --- ragged batches


@case(ragged, "div", "summary", (3,))
def no_items(step: Step) -> None:
    step.batch["lengths"][3] = step.batch["choice"][3] = 0


@case(ragged, "nll_loss|cross_entropy", LOSS, (6,))
def choice_outside_the_mask(step: Step) -> None:
    step.batch["lengths"][6], step.batch["choice"][6] = 2, 4


@case(ragged, "items", "", (2,))
def nan_behind_a_multiplied_mask(step: Step) -> None:
    step.batch["lengths"][2] = step.batch["choice"][2] = 3
    step.batch["choice"][2] = 1
    step.batch["items"][2, 4] = math.nan


@case(ragged, "items", "", (5,))
def nan_behind_a_where_backward(step: Step) -> None:
    step.batch["lengths"][5], step.batch["choice"][5] = 3, 1
    step.batch["items"][5, 4] = math.nan
    model = step.model

    def loss(b: Batch) -> torch.Tensor:
        exists = torch.arange(5) < b["lengths"][:, None]
        states = torch.where(exists[..., None], torch.tanh(model.item(b["items"])), 0.0)
        scores = (states * model.query(states.sum(1))[:, None]).sum(-1)
        return F.cross_entropy(scores.masked_fill(~exists, -math.inf), b["choice"])

    step.loss = loss


@case(ragged, "logsumexp", LOSS, (1,))
def partition_of_nothing(step: Step) -> None:
    model = step.model
    model.summary.forward = lambda states, _lengths: states.mean(1)
    step.batch["lengths"][1] = step.batch["choice"][1] = 0
    step.loss = lambda b: torch.logsumexp(model(b["items"], b["lengths"]), 1).mean()


# --- separation


@case(lambda: unet(eps=0.0), "div", LOSS, (4,))
def silent_target(step: Step) -> None:
    step.batch["clean"][4] = 0.0


@case(unet, "rsqrt", "down.0.norm", (2,))
def silent_mixture(step: Step) -> None:
    step.model.down[0].norm.eps = 0.0
    step.batch["mixture"][2] = 0.0


@case(unet, "pow", LOSS, (6,))
def loud_mixture(step: Step) -> None:
    step.batch["mixture"][6] *= 1e25


@case(lambda: unet(eps=0.0), "div", LOSS)
def mask_closed(step: Step) -> None:
    put(step.model.mask.bias, 0, -200.0)


@case(unet, "up.1.weight", "up.1")
def nan_weight_of_a_convolution(step: Step) -> None:
    put(step.model.up[1].weight, (0, 0, 0), math.nan)


@case(unet, "pow", LOSS, (3,))
def squared_waveform_overflows(step: Step) -> None:
    step.batch["clean"][3] = 1e25
    step.loss = lambda b: ((step.model(b["mixture"]) - b["clean"]) ** 2).mean(1).sqrt().mean()


# --- flows


@case(flow, "log", "squash", (3,))
def zero_on_the_edge(step: Step) -> None:
    step.model.squash.margin = 0.0
    step.batch["x"][3, 2] = 0.0


@case(flow, "log1p", "squash", (5,))
def one_on_the_edge(step: Step) -> None:
    step.model.squash.margin = 0.0
    step.batch["x"][5, 0] = 1.0


@case(flow, "log", "couplings.1")
def scale_vanishes(step: Step) -> None:
    step.model.couplings[1].least = 0.0
    put(step.model.couplings[1].net.bias, slice(None), -200.0)


@case(flow, "log1p", "squash", (2,))
def outside_the_unit_interval(step: Step) -> None:
    step.batch["x"][2, 1] = 1.2


@case(flow, "pow", "model")
def latent_square_overflows(step: Step) -> None:
    put(step.model.couplings[2].net.bias, slice(0, 2), 1e20)


# --- autoencoders


@case(vae, "exp", "sample")
def deviation_explodes(step: Step) -> None:
    put(step.model.log_variance.bias, slice(None), 200.0)


@case(vae, "exp", LOSS)
def divergence_explodes(step: Step) -> None:
    put(step.model.log_variance.bias, slice(None), 100.0)


@case(vae, "noise", "", (1,))
def infinite_noise(step: Step) -> None:
    step.batch["noise"][1, 0] = math.inf


# --- half precision


def half(middle: nn.Module | None = None) -> Step:
    model = nn.Sequential(nn.Linear(8, 16), Block(16, middle), nn.ReLU(), nn.Linear(16, 4))
    batch = {"x": torch.randn(SAMPLES, 8), "label": torch.arange(SAMPLES) % 4}
    loss = Step({"model": model}, batch, lambda b: F.cross_entropy(model(b["x"]), b["label"]))
    loss.precision = torch.float16
    return loss


@case(half, "to", "0", (3,))
def input_leaves_the_range(step: Step) -> None:
    step.batch["x"][3] = 1e5


@case(half, "addmm|linear", "3")
def product_leaves_the_range(step: Step) -> None:
    put(step.model[3].weight, slice(None), 6e4)
    put(step.model[0].weight, slice(None), 0.0)
    put(step.model[0].bias, slice(None), 10.0)


@case(lambda: half(Apply(lambda h: h * h / (h * h).sum(-1, keepdim=True))), "mul", "1.middle", (5,))
def square_leaves_the_range(step: Step) -> None:
    step.batch["x"][5] = 5000.0


@case(half, "to|cross_entropy", LOSS)
def loss_scale_too_large(step: Step) -> None:
    step.scale = 2.0**24


# --- distances


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        return gradient / (2 * y)


def equal_pair(sample: int, distance: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    step = siamese()
    step.model.distance = Apply(distance)
    step.batch["right"][sample] = step.batch["left"][sample]
    return step


@case(None, "sqrt", "distance", (3,))
def equal_pair_and_no_eps() -> Step:
    return equal_pair(3, lambda d: (d * d).sum(-1).sqrt())


@case(None, "Root", "distance", (6,))
def custom_function_backward() -> Step:
    return equal_pair(6, lambda d: Root.apply((d * d).sum(-1)))


@case(None, "sqrt", "distance", (4,))
def root_behind_a_where() -> Step:
    def distance(d: torch.Tensor) -> torch.Tensor:
        squared = (d * d).sum(-1)
        return torch.where(squared > 0, squared.sqrt(), 0.0)

    return equal_pair(4, distance)


@case(None, "pow", "distance", (5,))
def fractional_power_at_zero() -> Step:
    return equal_pair(5, lambda d: d.abs().pow(0.5).sum(-1))


@case(siamese, "acos", LOSS, (2,))
def angle_between_equal_vectors(step: Step) -> None:
    step.batch["right"][2] = step.batch["left"][2] = torch.eye(8)[0]

    def loss(b: Batch) -> torch.Tensor:
        scale = torch.exp(0 * step.model.net[0].weight[0])  # 1, with a gradient
        cosine = (F.normalize(b["left"], dim=1) * scale * F.normalize(b["right"], dim=1)).sum(1)
        return torch.acos(cosine).mean() + step.model(b["left"], b["right"]).mean()

    step.loss = loss


@case(siamese, "sqrt", LOSS)
def collapsed_embeddings(step: Step) -> None:
    put(step.model.net[2].weight, slice(None), 0.0)
    step.loss = lambda b: torch.relu(1 - step.model.net(b["left"]).var(0).sqrt()).mean()


@case(siamese, "mean", LOSS)
def mean_of_no_pairs(step: Step) -> None:
    step.batch["same"].zero_()
    step.loss = lambda b: (
        step.model(b["left"], b["right"])[b["same"] > 0.5].mean() + step.model.net(b["left"]).sum()
    )


@case(lambda: equal_pair(0, lambda d: d.sum(-1) / d.norm(dim=-1)), "div", "distance", (0,))
def cosine_by_hand_of_a_zero_vector(step: Step) -> None:
    smallest = torch.full((SAMPLES,), math.inf)  # a legal start for a minimum, beside the fault
    loss = step.loss
    step.loss = lambda b: loss(b) + 0 * torch.minimum(smallest[: len(b["left"])], b["same"]).sum()


@case(siamese, "exp", LOSS, (7,))
def contrast_overflows(step: Step) -> None:
    step.batch["left"][7] *= 1.0
    step.batch["margin"] = torch.ones(SAMPLES)
    step.batch["margin"][7] = 1e4
    step.loss = lambda b: torch.log1p(
        torch.exp(step.model(b["left"], b["right"]) * b["margin"])
    ).mean()


# --- hard cases


def sequential(*layers: nn.Module) -> Step:
    model = nn.Sequential(*layers)
    batch = {"x": torch.randn(SAMPLES, 8), "label": torch.arange(SAMPLES) % 4}
    return Step({"model": model}, batch, lambda b: F.cross_entropy(model(b["x"]), b["label"]))


@case(None, "logdet|linalg_slogdet", "1", hard=True)
def logdet_of_a_singular_matrix() -> Step:
    def volume(x: torch.Tensor) -> torch.Tensor:
        return x + torch.logdet((x[:, :2, None] * 0) @ x[:, None, :2])[:, None]

    return sequential(nn.Linear(8, 8), Apply(volume), nn.Linear(8, 4))


@case(None, "linalg_svd|svd", "1", hard=True)
def svd_with_equal_singular_values() -> Step:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        u, _, v = torch.linalg.svd(torch.eye(3) + 0 * x[:, :3, None])
        return x + (u[:, :1] @ v[:, :, 1:2]).reshape(-1, 1)

    return sequential(nn.Linear(8, 8), Apply(rotate), nn.Linear(8, 4))


@case(
    lambda: sequential(
        nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4)
    ),
    "weight_norm_interface|div|norm",
    "1|1.parametrizations.weight.0",
    hard=True,
)
def weight_norm_of_a_zero_row(step: Step) -> None:
    put(step.model[1].parametrizations.weight.original1, 2, 0.0)


@case(
    lambda: sequential(nn.Identity(), Apply(torch.erfinv), nn.Linear(8, 4)),
    "erfinv",
    "1",
    (3,),
    hard=True,
)
def quantile_of_one(step: Step) -> None:
    step.batch["x"] = step.batch["x"].tanh() * 0.9
    step.batch["x"][3, 0] = 1.0


@case(None, "ctc_loss", LOSS, (4,), hard=True)
def ctc_with_too_long_a_target() -> Step:
    model = nn.Linear(8, 5)
    batch = {
        "x": torch.randn(SAMPLES, 6, 8),
        "target": torch.randint(1, 5, (SAMPLES, 9)),
        "lengths": torch.full((SAMPLES,), 2),
    }
    batch["lengths"][4] = 9

    def loss(b: Batch) -> torch.Tensor:
        scores = model(b["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, b["target"], torch.full((len(b["x"]),), 6), b["lengths"])

    return Step({"model": model}, batch, loss)


@case(lambda: sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), "pow", LOSS, (5,), hard=True)
def focal_loss_of_a_certain_sample(step: Step) -> None:
    step.batch["boost"] = torch.zeros(SAMPLES)
    step.batch["boost"][5] = 500.0

    def loss(b: Batch) -> torch.Tensor:
        logits = step.model(b["x"]) + F.one_hot(b["label"], 4) * b["boost"][:, None]
        p = logits.softmax(-1).gather(1, b["label"][:, None])
        return -((1 - p).pow(0.5) * torch.log(p + 1e-6)).mean()

    step.loss = loss


@case(None, "div", "1", (6,), hard=True)
def fault_behind_an_exchange_of_samples() -> Step:
    """The bad row is computed from sample 6 and stands in row 1."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.flip(x, (0,)) / torch.flip(x, (0,)).amax(-1, keepdim=True)

    step = sequential(nn.Identity(), Apply(shifted), nn.Linear(8, 4))
    step.batch["x"][6] = 0.0
    return step


@case(
    lambda: sequential(
        nn.Linear(8, 8, bias=False), Apply(lambda x: x / x.norm(dim=-1, keepdim=True))
    ),
    "div",
    "1",
    (2,),
    hard=True,
)
def time_first_layout(step: Step) -> None:
    step.batch["x"] = torch.randn(SAMPLES, 3, 8)
    step.batch["x"][2, 1] = 0.0
    step.loss = lambda b: (
        (step.model(b["x"].transpose(0, 1).contiguous()) ** 2).sum(-1).log1p().mean()
    )


@case(
    lambda: sequential(nn.Identity(), Apply(torch.log), nn.Linear(8, 4)),
    "log",
    "1",
    (4,),
    hard=True,
)
def positions_flattened_the_other_way(step: Step) -> None:
    step.batch["x"] = torch.rand(SAMPLES, 8, 8) + 0.1
    step.batch["x"][4, 3, 2] = 0.0

    def loss(b: Batch) -> torch.Tensor:
        flat = b["x"].transpose(0, 1).reshape(-1, 8)
        return step.model(flat).pow(2).mean()

    step.loss = loss


@case(
    lambda: sequential(nn.Linear(8, 8), nn.Identity(), LogOfSums(), nn.Linear(8, 4)),
    "log",
    "2",
    (1,),
    hard=True,
)
def a_chain_broken_by_a_number(step: Step) -> None:
    step.batch["x"][1, 0] = -1e6


class LogOfSums(nn.Module):
    """Scales by a statistic that went through Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.log(x.abs().sum() * 0 + (x.abs().amax() < 1e3)).item()
        return x * scale


@case(lambda: sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), "exp", LOSS, hard=True)
def sinkhorn_underflows(step: Step) -> None:

    def loss(b: Batch) -> torch.Tensor:
        kernel = torch.exp(-torch.cdist(step.model(b["x"]), step.model(b["x"]) + 10) / 1e-3)
        for _ in range(3):
            kernel = kernel / kernel.sum(0)
        return kernel.mean()

    step.loss = loss


@case(None, "sqrt", "1", (3,), hard=True)
def two_roots_of_which_one_is_harmless() -> Step:
    """The first root's derivative is infinite as well, but a detach keeps it away from every
    gradient.
    """

    def roots(x: torch.Tensor) -> torch.Tensor:
        return (
            x + torch.sqrt(torch.zeros_like(x)).detach() + torch.sqrt((x * x).sum(-1, keepdim=True))
        )

    step = sequential(nn.Linear(8, 8, bias=False), Apply(roots), nn.Linear(8, 4))
    step.batch["x"][3] = 0.0
    return step


@case(None, "div", "model", (0,), hard=True)
def division_in_place_in_a_loop() -> Step:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(len(x), 8)
            state = torch.zeros(len(x), 8)
            for time in range(x.shape[1]):
                state = self.cell(x[:, time], state)
                total = total + state * (time < lengths)[:, None]
            return self.head(total.div_(lengths[:, None]))

    model = Smooth()
    lengths = torch.full((SAMPLES,), 3.0)
    lengths[0] = 0.0
    batch = {
        "x": torch.randn(SAMPLES, 4, 8),
        "lengths": lengths,
        "label": torch.arange(SAMPLES) % 4,
    }
    return Step(
        {"model": model}, batch, lambda b: F.cross_entropy(model(b["x"], b["lengths"]), b["label"])
    )


@case(
    lambda: sequential(nn.Linear(8, 8, bias=False), nn.RMSNorm(8, eps=0.0), nn.Linear(8, 4)),
    "rms_norm|rsqrt",
    "1",
    (5,),
    hard=True,
)
def rms_norm_without_eps(step: Step) -> None:
    step.batch["x"][5] = 0.0


@case(unet, "log", LOSS, (2,), hard=True)
def log_spectrum_of_silence(step: Step) -> None:
    step.batch["clean"][2] = 0.0
    window = torch.hann_window(8)

    def spectrum(wave: torch.Tensor) -> torch.Tensor:
        return torch.log(
            torch.stft(wave, 8, 4, window=window, return_complex=True, pad_mode="constant").abs()
        )

    step.loss = lambda b: F.l1_loss(spectrum(step.model(b["mixture"])), spectrum(b["clean"]))
