"""What loss functions are given is seen, told apart by place, and not altered."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.learning.losses.function_mode import FunctionMode
from holdfast.learning.losses.sites import LossSites
from holdfast.learning.losses.sources import SourceOperation, source_of, unscaled
from holdfast.learning.measurements import Measurements
from holdfast.learning.observations import ObservedLoss

N, C = 16, 5
LABELS = torch.arange(N) % C
ONES = torch.ones(N, C)
LOGITS, with_logits = "binary_cross_entropy_with_logits#1", F.binary_cross_entropy_with_logits


def seen(loss: Callable[[Tensor], Tensor], calls: int = 3) -> dict[str, ObservedLoss]:
    """Return the facts of some calls of a loss on fresh scores."""
    sites = LossSites()
    mode = FunctionMode(sites, lambda loss: sites.begin_pass(), lambda weight: None)
    measurements = Measurements()
    mode.begin_step(measurements, examine=True)
    for _ in range(calls):
        scores = torch.randn(N, C, requires_grad=True)
        with mode:
            loss(scores).backward()
    measurements.note_all()
    return sites.observations()


FLAGS: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    (
        "cross_entropy#1",
        "softmax_input",
        lambda z: F.cross_entropy(z.exp() / z.exp().sum(1, keepdim=True), LABELS),
    ),
    ("cross_entropy#1", "relu_source", lambda z: F.cross_entropy(z.relu(), LABELS)),
    ("nll_loss#1", "batch_axis", lambda z: F.nll_loss(z.log_softmax(0), LABELS)),
    ("nll_loss#1", "positive", lambda z: F.nll_loss(z.abs() + 1, LABELS)),
    ("nll_loss#1", "not_normalised", lambda z: F.nll_loss(F.logsigmoid(z), LABELS)),
    ("kl_div#1", "positive", lambda z: F.kl_div(z.softmax(1), ONES / C, reduction="batchmean")),
    ("log_softmax#1", "softmax_input", lambda z: -z.softmax(1).log_softmax(1)[:, 0].mean()),
    (
        "log#1",
        "batch_axis",
        lambda z: -(z.softmax(0).gather(1, LABELS[:, None]) + 1e-8).log().mean(),
    ),
    ("log#1", "batch_axis", lambda z: -z.softmax(0).clamp_min(1e-8).log()[range(N), LABELS].mean()),
    (LOGITS, "sigmoid_source", lambda z: with_logits(z.sigmoid().view(-1), ONES.view(-1))),
    (LOGITS, "target_out_of_range", lambda z: with_logits(z, 2 * ONES)),
    (
        "binary_cross_entropy#1",
        "clamped_scores",
        lambda z: F.binary_cross_entropy((3 * z).clamp(0, 1), ONES / 2),
    ),
    ("difference#1", "broadcast", lambda z: (z[:, :1] - torch.randn(N)).square().mean()),
    ("ctc_loss#1", "positive", lambda z: _ctc(z + 5)),
    ("mse_loss#1", "beyond_tanh", lambda z: F.mse_loss(z.tanh(), 3 * ONES)),
    ("mse_loss#1", "beyond_relu", lambda z: F.mse_loss(z.relu(), -ONES)),
    ("l1_loss#1", "beyond_sigmoid", lambda z: F.l1_loss(z.sigmoid().view(-1), 2 * ONES.view(-1))),
    ("difference#1", "beyond_relu", lambda z: (-ONES - z.relu()).square().mean()),
    (
        "cosine_embedding_loss#1",
        "target_out_of_range",
        lambda z: F.cosine_embedding_loss(z, ONES, LABELS % 2),
    ),
    ("soft_margin_loss#1", "target_out_of_range", lambda z: F.soft_margin_loss(z, 0 * ONES)),
]


def _ctc(scores: Tensor) -> Tensor:
    return F.ctc_loss(scores.unsqueeze(1), torch.tensor([[1, 2]]), (N,), (2,))


@pytest.mark.parametrize(("place", "flag", "loss"), FLAGS)
def test_a_wrong_argument_is_seen(place: str, flag: str, loss: Callable[[Tensor], Tensor]) -> None:
    """Each fault raises its own flag in every call, in facts that can be written down."""
    facts = json.loads(json.dumps(asdict(seen(loss)[place])))
    assert facts["flags"][flag] == facts["calls"] == 3


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.cross_entropy(z, LABELS),
        lambda z: F.cross_entropy(z.view(2, 8, C).permute(0, 2, 1), LABELS.view(2, 8)),
        lambda z: F.nll_loss(z.log_softmax(1), LABELS),
        lambda z: F.nll_loss(torch.log(z.softmax(1)), LABELS),
        lambda z: with_logits(z, ONES),
        lambda z: F.binary_cross_entropy(z.sigmoid(), ONES),
        lambda z: F.binary_cross_entropy(z.sigmoid().clamp(1e-6, 1 - 1e-6), ONES),
        lambda z: F.mse_loss(z, 3 * ONES),
        lambda z: F.mse_loss(z.tanh(), 0.9 * ONES),
        lambda z: F.mse_loss(5 * z.tanh(), 3 * ONES),
        lambda z: F.hinge_embedding_loss(z, 2.0 * (ONES > 0) - 1),
        lambda z: F.kl_div(z.log_softmax(1), ONES / C, reduction="batchmean"),
        lambda z: (z[:, None] - z[None, :]).square().mean(),
        lambda z: _ctc(z.log_softmax(1)),
        lambda z: -z[0].softmax(0).log()[1],  # one state, as in reinforcement learning
        lambda z: F.nll_loss(z.T.log_softmax(0).T, LABELS),
    ],
)
def test_right_arguments_raise_no_flag(loss: Callable[[Tensor], Tensor]) -> None:
    """The usual ways to call a loss leave every flag unset."""
    assert not [key for facts in seen(loss).values() for key in facts.flags]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_broadcast_that_pairs_all_with_all_is_reported_with_its_shapes() -> None:
    """(N, 1) against (N,) is N x N pairs; a single number against all is fine."""
    wrong = seen(lambda z: F.mse_loss(z[:, :1], torch.randn(N)))["mse_loss#1"]
    assert wrong.flags["broadcast"] == 3
    assert wrong.shapes == "(16, 1) and (16,)"
    assert (
        "broadcast" not in seen(lambda z: F.mse_loss(z[:, :1], torch.ones(1)))["mse_loss#1"].flags
    )


def test_the_loss_of_the_best_constant_is_known() -> None:
    """It is the entropy of the labels, the variance of the targets, and unknown with class
    weights.
    """
    labels = seen(lambda z: F.cross_entropy(z[:15], LABELS[:15]))["cross_entropy#1"].baseline
    assert labels == pytest.approx(math.log(C))
    targets = torch.randn(N, C, dtype=torch.float64)
    columns = seen(lambda z: F.mse_loss(z.double(), targets))["mse_loss#1"].baseline
    assert columns == pytest.approx(float(targets.var(0, correction=0).mean()))
    rare = (torch.arange(N * C).view(N, C) % 8 == 0).float()
    binary = seen(lambda z: with_logits(z.view(-1), rare.view(-1)))[LOGITS].baseline
    p = 1 / 8
    assert binary == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    weighted = seen(lambda z: F.cross_entropy(z, LABELS, weight=torch.ones(C)))
    assert weighted["cross_entropy#1"].baseline is None


def test_the_source_of_a_tensor_is_found_behind_views() -> None:
    """Reshaping keeps the dimension, reordering forgets it, and a clamp is told."""
    scores = torch.randn(N, C, requires_grad=True)
    split = scores.softmax(-1).view(4, 4, C).flatten(0, 1)
    assert source_of(split) == SourceOperation(name="Softmax", dim=-1, shape=(N, C))
    turned = scores.softmax(1).T.contiguous().T
    assert source_of(turned) == SourceOperation(name="Softmax", dim=None, shape=(N, C))
    clamped = scores.sigmoid().clamp(0.1, 0.9)
    assert source_of(clamped) == SourceOperation(name="Sigmoid", clamped=True)
    assert source_of(scores) == SourceOperation()


def test_the_factor_of_a_loss_scaler_is_taken_out() -> None:
    """The loss is the user's, not the one that fp16 needs."""
    loss = torch.tensor(0.25, requires_grad=True) * 1
    assert unscaled(torch.amp.GradScaler("cpu").scale(loss)) == 0.25
    assert unscaled(loss * torch.tensor(3.0)) == 0.75
