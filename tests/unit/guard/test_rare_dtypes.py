"""Buffers and frozen parameters of types and layouts that torch stores and hardly computes with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.unit.guard.guarded import ask_for_too_much, events, the_event
from torch import nn

import holdfast

# torch says of most of these kinds, once in a process, that they are in beta.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SAMPLES = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


def eight_bits(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor([0.5, -2.0, float("nan")]).to(dtype)


def integers(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor([1, 2, 3]).to(dtype)


def not_coalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (4, 4))


KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "float8_e4m3fn": eight_bits(torch.float8_e4m3fn),
    "float8_e5m2": eight_bits(torch.float8_e5m2),
    "float8_e4m3fnuz": eight_bits(torch.float8_e4m3fnuz),
    "float8_e5m2fnuz": eight_bits(torch.float8_e5m2fnuz),
    "uint16": integers(torch.uint16),
    "uint32": integers(torch.uint32),
    "uint64": integers(torch.uint64),
    "bool": integers(torch.bool),
    "complex32": lambda: torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex32),
    "complex128": lambda: torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex128),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse half": lambda: torch.eye(4).half().to_sparse(),
    "sparse bool": lambda: torch.eye(4).bool().to_sparse(),
    "sparse complex": lambda: torch.eye(4).to(torch.complex64).to_sparse(),
    "not coalesced": not_coalesced,
    "sparse and empty": lambda: torch.zeros(4, 4).to_sparse(),
    "empty": lambda: torch.empty(0, 3),
    "a scalar": lambda: torch.tensor(2.0),
}
REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "compressed rows": lambda: torch.eye(4).to_sparse_csr(),
    "compressed columns": lambda: torch.eye(4).to_sparse_csc(),
    "blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "bits": lambda: torch.ones(3, dtype=torch.uint8).view(torch.bits8),
}


class WithConstant(nn.Module):
    """A linear layer beside a tensor of a rare kind, as a buffer or as a frozen parameter."""

    def __init__(
        self, constant: torch.Tensor, *, is_parameter: bool = False, persistent: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        if is_parameter:
            self.constant = nn.Parameter(constant, requires_grad=False)
        else:
            self.register_buffer("constant", constant, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def bits_of(tensor: torch.Tensor) -> object:
    """Return what a tensor holds as plain numbers, of a sparse one as it is stored."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor.is_coalesced(), bits_of(tensor._indices()), bits_of(tensor._values())]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def mean_error(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean()


def a_run(run_dir: object, model: nn.Module) -> holdfast.Guard:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loader = holdfast.DataLoader(SAMPLES, batch_size=8, shuffle=False)
    return holdfast.Guard(run_dir, model=model, optimizer=optimizer, loader=loader)


@pytest.mark.parametrize("is_parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("kind", KEPT)
def test_a_rare_kind_trains_saves_and_resumes_with_every_bit(tmp_path, caplog, kind, is_parameter):
    """A run that is cut and continued ends with the weights of a bare loop, and the constant
    with its own bits.
    """
    bare = WithConstant(KEPT[kind](), is_parameter=is_parameter)
    optimizer = torch.optim.Adam(bare.linear.parameters(), lr=0.01)
    for batch in SAMPLES.repeat(2, 1).split(8):
        optimizer.zero_grad()
        mean_error(bare)(batch).backward()
        optimizer.step()

    for steps in (3, 8):
        model = WithConstant(KEPT[kind](), is_parameter=is_parameter)
        with a_run(tmp_path, model) as guard:
            for batch in guard.batches(max_steps=steps):
                guard.step(batch, mean_error(model))

    assert guard.resumed_from is not None
    assert bits_of(model.linear.weight) == bits_of(bare.linear.weight)
    assert bits_of(model.constant) == bits_of(bare.constant)
    assert not events(
        guard, "save_failed", "save_refused", "snapshot_failed", "not_restored", "diagnosis_limited"
    )
    assert not any("diagnosis" in message for message in caplog.messages)


def flip(constant: torch.Tensor) -> None:
    integers = {1: torch.uint8, 4: torch.int32}
    with torch.no_grad():
        bits = (
            torch.view_as_real(constant)
            if constant.is_complex()
            else constant.view(integers[constant.itemsize])
        )
        bits.copy_(bits.flip(0))


def double(constant: torch.Tensor) -> None:
    with torch.no_grad():
        constant.copy_((constant + constant.t().coalesce()).coalesce())


@pytest.mark.parametrize("is_parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize(
    "kind", ["float8_e4m3fn", "float8_e5m2fnuz", "uint32", "complex32", "sparse", "not coalesced"]
)
def test_a_rare_kind_that_a_pass_changes_is_put_back_before_a_retry(tmp_path, kind, is_parameter):
    """A pass that runs out of memory after it has changed the constant is made again from where
    it began.
    """
    ends = []
    for name, fails in (("undisturbed", False), ("disturbed", True)):
        model = WithConstant(KEPT[kind](), is_parameter=is_parameter)
        guard = a_run(tmp_path / name, model)
        change = double if model.constant.is_sparse else flip

        failing: list[bool] = []

        def loss(
            x: torch.Tensor,
            model: WithConstant = model,
            change: Callable = change,
            failing: list = failing,
        ) -> torch.Tensor:
            change(model.constant)
            if failing:
                failing.pop()
                ask_for_too_much()
            return mean_error(model)(x)

        for step in range(4):
            failing += [True] * (fails and step == 2)
            guard.step(SAMPLES[:8], loss)
        ends.append([bits_of(model.constant), bits_of(model.linear.weight)])
        assert len(events(guard, "retry")) == fails
        assert not events(guard, "not_restored")

    assert ends[0] == ends[1]


@pytest.mark.parametrize("is_parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_checkpoint_can_hold_is_refused_before_training(tmp_path, kind, is_parameter):
    """Tensors that could not be saved are H310 when the guard is made, and not at the first
    save.
    """
    if is_parameter and kind == "quantized":
        pytest.skip("torch makes no parameter of it")

    with pytest.raises(holdfast.CheckpointError) as caught:
        a_run(tmp_path, WithConstant(REFUSED[kind](), is_parameter=is_parameter))

    assert caught.value.rule == "H310"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_made_anew_in_each_process_need_not_be_saved(tmp_path, kind):
    """A buffer that is no part of the state may be of any kind that the model trains with."""
    model = WithConstant(REFUSED[kind](), persistent=False)
    guard = a_run(tmp_path, model)

    for batch in guard.batches(max_epochs=1):
        guard.step(batch, mean_error(model))

    assert guard.global_step == 4
    assert the_event(guard, "closed").data["how"] == "finished"
