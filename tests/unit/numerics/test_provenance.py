"""Where NaN and Inf come from.

The ten cases of the research, decoys, and what the tracer sees and leaves behind.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from holdfast.numerics.operands import nonfinite
from holdfast.numerics.provenance import Origin, trace
from holdfast.numerics.tracer import OriginTracer

SAMPLES = 8
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x))


class Net(nn.Module):
    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Apply(middle), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        scores = (query @ query.transpose(1, 2)).masked_fill(hidden[:, None, :], -math.inf)
        return (scores.softmax(-1) @ x).mean(1)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, hidden))


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def labels() -> torch.Tensor:
    return torch.arange(SAMPLES) % 4


def find(
    model: nn.Module, x: torch.Tensor, loss: Loss = cross_entropy, y: torch.Tensor | None = None
) -> Origin | None:
    target = labels() if y is None else y

    def run_once() -> torch.Tensor:
        model.zero_grad()
        value = loss(model, x, target)
        value.backward()
        return value.detach()

    return trace(
        run_once,
        {"model": model},
        list(model.named_parameters()),
        [("x", x), ("y", target)],
        SAMPLES,
    )


def spoiled(place: tuple[int, ...], value: float) -> torch.Tensor:
    x = torch.randn(SAMPLES, 8)
    x[place] = value
    return x


def reader(
    hidden: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Origin | None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x, hidden)
        return F.cross_entropy(logits, y) if loss_of is None else loss_of(logits)

    return find(Reader(), torch.randn(SAMPLES, 5, 8), loss)


def behind_a_where(x: torch.Tensor) -> torch.Tensor:
    z = x * (x > 0)
    return torch.where(z > 0, z / z, z)


def nan_weight() -> Origin | None:
    model = Net()
    with torch.no_grad():
        model.blocks[3].lin.weight[2, 3] = math.nan  # type: ignore[union-attr,operator,index]
    return find(model, torch.randn(SAMPLES, 8))


def masked(*, row: int | None) -> torch.Tensor:
    hidden = torch.zeros(SAMPLES, 5, dtype=torch.bool)
    hidden[:, 4] = True
    if row is not None:
        hidden[row] = True
    return hidden


def log_of_zero(logits: torch.Tensor) -> torch.Tensor:
    return -torch.log(torch.where(torch.arange(4) == 0, 0.0, logits.softmax(-1))).mean()


def sum_of_nothing(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x + torch.full_like(x, -math.inf), 1, keepdim=True).expand(-1, 8)


@dataclass
class Truth:
    op: str
    module: str
    phase: str
    mechanism: str
    samples: tuple[int, ...] = ()
    kind: str = "operation"


TEN: dict[str, tuple[Callable[[], Origin | None], Truth]] = {
    "log(relu(x))": (
        lambda: find(Net(lambda x: torch.log(torch.relu(x))), torch.randn(SAMPLES, 8)),
        Truth("log", "blocks.2", "forward", "log of 0"),
    ),
    "0/0 under where": (
        lambda: find(Net(behind_a_where), torch.randn(SAMPLES, 8)),
        Truth("div", "blocks.2", "backward", "derivative of a division by 0"),
    ),
    "exp overflow": (
        lambda: find(Net(lambda x: torch.exp(x * 1000)), torch.randn(SAMPLES, 8)),
        Truth("exp", "blocks.2", "forward", "exp overflow"),
    ),
    "sqrt at 0, backward": (
        lambda: find(Net(lambda x: torch.sqrt((x * (x > 0)) ** 2)), torch.randn(SAMPLES, 8)),
        Truth("sqrt", "blocks.2", "backward", "sqrt has an infinite derivative at 0"),
    ),
    "NaN in sample 5": (
        lambda: find(Net(), spoiled((5, 3), math.nan)),
        Truth("x", "", "forward", "NaN in the batch (x)", (5,), "input"),
    ),
    "1e30 in sample 6": (
        lambda: find(
            nn.Sequential(nn.Identity(), Apply(lambda x: x * x), nn.Linear(8, 4)),
            spoiled((6,), 1e30),
        ),
        Truth("mul", "1", "forward", "float32 range exceeded", (6,)),
    ),
    "NaN weight": (
        nan_weight,
        Truth("blocks.3.lin.weight", "blocks.3.lin", "forward", "is NaN", (), "parameter"),
    ),
    "softmax of an all-masked row": (
        lambda: reader(masked(row=2)),
        Truth("softmax", "attention", "forward", "masked", (2,)),
    ),
    "log(0) in the loss, legal mask present": (
        lambda: reader(masked(row=None), log_of_zero),
        Truth("log", "loss function", "forward", "log of 0"),
    ),
    "logsumexp over all -inf": (
        lambda: find(Net(sum_of_nothing), torch.randn(SAMPLES, 8)),
        Truth("logsumexp", "blocks.2", "forward", "masked"),
    ),
}


@pytest.mark.parametrize("case", TEN)
def test_each_of_the_ten_cases_is_named_in_full(case: str) -> None:
    """Operation, module, phase, mechanism and samples are right in every case of the research's
    table.
    """
    run, truth = TEN[case]
    origin = run()
    assert origin is not None
    assert (origin.kind, origin.op, origin.module, origin.phase) == (
        truth.kind,
        truth.op,
        truth.module,
        truth.phase,
    )
    assert truth.mechanism in origin.mechanism
    if origin.kind == "operation":
        assert "test_provenance.py" in origin.line
    if truth.samples:
        assert origin.samples == truth.samples


def test_a_finite_step_has_no_origin() -> None:
    """A step that does not fail again, transient Inf and legal masks included, gives None."""

    def harmless(x: torch.Tensor) -> torch.Tensor:
        lowest = torch.minimum(torch.full_like(x, math.inf), x)
        return torch.where(x > 0, x, -math.inf).exp() * 0.1 + lowest

    assert find(Net(harmless), torch.randn(SAMPLES, 8)) is None
    assert reader(masked(row=None)) is None


def test_of_an_in_place_operation_the_old_value_is_reported() -> None:
    """The operand of ``log_`` is described as it was before it was overwritten."""
    origin = find(Net(lambda x: (x * 0).log_()), torch.randn(SAMPLES, 8))
    assert origin is not None
    assert (origin.op, origin.mechanism) == ("log", "log of 0")
    assert (origin.operands[0].least, origin.operands[0].most) == (0.0, 0.0)


def test_a_write_into_part_of_a_tensor_is_traced_to_its_writer() -> None:
    """Of writes through views into one buffer the bad one is followed, the last or not."""

    def parts(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:, 0] = torch.log(x[:, 0].abs() * 0)
        out[:, 1:] = x[:, 1:]
        return out[:, :1].expand(-1, 8) + 0 * x

    origin = find(Net(parts), torch.randn(SAMPLES, 8))
    assert origin is not None
    assert origin.op == "log"


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient / (2 * ctx.saved_tensors[0])


def test_a_custom_function_is_named_by_its_class() -> None:
    """A division in the backward of a custom Function is reported with the class, its line and
    its module.
    """
    origin = find(Net(lambda x: Root.apply((x * (x > 0)) ** 2)), torch.randn(SAMPLES, 8))
    assert origin is not None
    assert (origin.op, origin.aten, origin.module, origin.phase) == (
        "Root",
        "aten.div",
        "blocks.2",
        "backward",
    )
    assert origin.line.endswith("in backward")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_keeps_its_module(reentrant: bool) -> None:
    """Recomputation inside the backward pass does not hide which module's derivative failed."""
    inner = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: torch.sqrt((x * (x > 0)) ** 2)))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.head = nn.Linear(8, 8), inner, nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.inner, self.first(x), use_reentrant=reentrant))

    origin = find(Outer(), torch.randn(SAMPLES, 8))
    assert origin is not None
    assert (origin.op, origin.module, origin.phase) == ("sqrt", "inner.1", "backward")


def test_fp16_overflow_of_scaled_gradients_is_distinguished() -> None:
    """A loss scale that is too large is a finite overflow, and no fault of the operation."""
    model, x = nn.Linear(8, 4), torch.randn(SAMPLES, 8)

    def run_once() -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), labels())
        (loss * 2.0**24).backward()
        return loss.detach()

    origin = trace(run_once, {"model": model}, list(model.named_parameters()), [("x", x)], SAMPLES)
    assert origin is not None
    assert (origin.kind, origin.phase) == ("finite_overflow", "backward")
    assert "65,504" in origin.mechanism


def test_running_statistics_are_not_blamed_for_the_batch_that_spoils_them() -> None:
    """A NaN sample that BatchNorm writes into its buffers in the same step is traced to the
    batch.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    origin = find(model, spoiled((3, 0), math.nan))
    assert origin is not None
    assert (origin.kind, origin.op, origin.samples) == ("input", "x", (3,))


def left_behind() -> tuple[int, int, int]:
    hooks = len(torch_modules._global_forward_hooks) + len(torch_modules._global_forward_pre_hooks)
    return (
        hooks,
        len(torch_modules._global_forward_hooks_always_called),
        len(_get_current_dispatch_mode_stack()),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_and_modes_are_gone_afterwards(fails: bool) -> None:
    """Nothing stays in the process, also when the step raises in the middle of a module."""
    before = left_behind()

    def middle(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise LookupError("from the user's module")
        return torch.log(x)

    if fails:
        with pytest.raises(LookupError, match="from the user's module"):
            find(Net(middle), torch.randn(SAMPLES, 8))
    else:
        assert find(Net(middle), torch.randn(SAMPLES, 8)) is not None
    assert left_behind() == before
    assert not torch.is_anomaly_enabled()


def test_the_tracer_changes_neither_random_state_nor_values() -> None:
    """Loss, gradients and the generator's state are bit for bit those of an untraced step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x, seen = torch.randn(SAMPLES, 8), []

    def run_once() -> torch.Tensor:
        torch.manual_seed(4)
        model.zero_grad()
        loss = cross_entropy(model, x, labels())
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen.append([loss.detach(), *gradients, torch.get_rng_state()])
        return loss.detach()

    run_once()
    assert (
        trace(run_once, {"model": model}, list(model.named_parameters()), [("x", x)], SAMPLES)
        is None
    )
    assert all(torch.equal(plain, traced) for plain, traced in zip(*seen, strict=True))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_nonfinite_is_exact_in_every_type(dtype: torch.dtype) -> None:
    """One NaN or Inf is found at its place, and a sum that overflows is no false alarm."""
    values = torch.ones(5, dtype=dtype)
    assert nonfinite(values) is None
    for bad in (math.nan, math.inf, -math.inf):
        values[3] = bad
        where = nonfinite(values)
        assert where is not None
        assert where.tolist() == [False, False, False, True, False]
    if not dtype.is_complex:
        assert nonfinite(torch.full((100,), torch.finfo(dtype).max, dtype=dtype)) is None


def test_no_tensor_is_kept_alive() -> None:
    """A bad tensor is freed as soon as its owner drops it, although its suspect is remembered."""
    tracer = OriginTracer({}, [], None)
    with tracer:
        bad = torch.zeros(1000).log()
        last = weakref.ref(bad)
        del bad
    gc.collect()
    assert last() is None
    assert len(tracer.suspects) == 1


def test_a_nan_among_the_numbers_is_no_overflow() -> None:
    """A NaN that the script multiplies by is not explained by the range of the type."""
    found = find(Net(lambda x: x * math.nan), torch.randn(SAMPLES, 8))
    assert found is not None
    assert (found.op, found.confidence) == ("mul", "unknown")
