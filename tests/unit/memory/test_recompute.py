"""Recomputation: the same gradients, buffers and random numbers, and nothing left behind on the
modules.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.loader import random_state
from holdfast.memory.blocks import find_repeated_blocks
from holdfast.memory.recompute import RecomputeDiffersError, recomputing
from holdfast.memory.saved_bytes import SavedBytes


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0  # is put back; what is added to a list is not
        self.seen: list[torch.Size] = []

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        return x + gain * self.dropout(torch.relu(self.norm(self.linear(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, gain=0.5)
        return self.head(x)


def _recomputing(model: nn.Module) -> Any:
    blocks = [block for _, block in find_repeated_blocks(model)]
    return recomputing(blocks, random_state.capture, random_state.restore)


def _step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Run one forward and backward, and return all that it left.

    Gradients, buffers, random state.
    """
    random_state.seed_cpu(7)
    model(torch.randn(8, 6)).square().mean().backward()
    left = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    left |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return left | {"torch": torch.get_rng_state(), "next": torch.rand(3)}


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []


def test_a_step_is_bit_equal_with_recomputation() -> None:
    """Gradients, BatchNorm statistics, dropout masks and the random state after it are those of
    a plain step.
    """
    plain = Net()
    twin = copy.deepcopy(plain)
    expected = _step(plain)
    with _recomputing(twin):
        found = _step(twin)
    assert [len(block.seen) for block in plain.blocks] == [1, 1, 1]
    assert [len(block.seen) for block in twin.blocks] == [2, 2, 2]  # it really was computed again
    assert [block.calls for block in twin.blocks] == [1, 1, 1]
    _assert_equal(found, expected)
    assert int(twin.blocks[0].norm.num_batches_tracked) == 1


class Counting(nn.Module):
    """A block whose output depends on a buffer that it changes, as codebooks and running scales
    do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return torch.tanh(self.linear(x) * float(self.count))


def test_buffers_that_are_read_are_those_of_the_first_time() -> None:
    """A block that is used twice in one pass sees its buffer as it was at each use, and moves it
    twice in all.
    """
    plain = nn.Sequential(Counting(), Counting())
    plain.append(plain[0])
    twin = copy.deepcopy(plain)
    expected = _step(plain)
    with recomputing([twin[0], twin[1]], random_state.capture, random_state.restore):
        found = _step(twin)
    _assert_equal(found, expected)
    assert (float(twin[0].count), float(twin[1].count)) == (2, 1)


def test_hooks_run_once() -> None:
    """Forward hooks of a block see its output once, not again in the backward pass."""
    model = Net()
    seen: list[torch.Size] = []
    model.blocks[1].register_forward_hook(lambda _module, _args, output: seen.append(output.shape))
    with _recomputing(model):
        _step(model)
    assert seen == [torch.Size([8, 6])]


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_the_modules_are_as_before_after_an_error(fails_in: str) -> None:
    """Also when an attempt dies in the middle of a pass, every block has its own forward back."""
    model = Net()
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def fail(*_: object) -> None:
        raise MemoryError("injected")

    if fails_in == "forward":
        handle: Any = model.blocks[2].linear.register_forward_hook(fail)
    else:
        handle = model.blocks[0].linear.weight.register_hook(fail)
    with pytest.raises(MemoryError), _recomputing(model):
        _step(model)
    handle.remove()
    assert all("forward" not in vars(block) for block in model.blocks)
    for name, buffer in model.named_buffers():
        buffer.data.copy_(state[name])
    model.zero_grad()
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    _assert_equal(_step(model), _step(fresh))


def test_a_forward_of_the_instance_is_put_back() -> None:
    """A block whose forward somebody replaced gets exactly that one back, and it was used
    meanwhile.
    """
    model = Net()
    plain: Callable[..., torch.Tensor] = model.blocks[0].forward

    def patched(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return 2 * plain(x, **options)

    model.blocks[0].forward = patched
    with _recomputing(model):
        _step(model)
    assert model.blocks[0].forward is patched
    assert len(model.blocks[0].seen) == 2


def test_one_forward_pass_may_be_recomputed_twice() -> None:
    """A gradient penalty goes backward through a forward pass before the loss does.

    Both see what it saw.
    """
    grads = []
    for blocks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)) for _ in range(2))
        )
        x = torch.ones(8, 4, requires_grad=True)
        with recomputing(list(model) if blocks else [], torch.get_rng_state, torch.set_rng_state):
            y = model(x).square().sum()
            (first,) = torch.autograd.grad(y, x, retain_graph=True)
            y.backward()
        grads.append([first, *(p.grad for p in model.parameters()), *model.buffers()])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


def test_repeated_blocks_are_the_outermost_of_one_class() -> None:
    """The layers of a transformer are found, and not their parts nor single layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
            "convolutions": nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU(), nn.Conv1d(1, 1, 1)),
            "single": Block(),
        }
    )
    names = [name for name, _ in find_repeated_blocks(model)]
    assert names == ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"]
    nested = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(6, 6)))
    assert [name for name, _ in find_repeated_blocks(nested)] == ["0.0", "0.1"]
    assert find_repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    alike = [nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)]
    assert [name for name, _ in find_repeated_blocks(nn.Sequential(nn.Linear(6, 6), *alike))] == [
        "1",
        "2",
        "3",
    ]


@pytest.mark.parametrize("how", ["functional_call", "data", "in place"])
def test_other_weights_than_the_first_time_are_noticed_in_every_call(how: str) -> None:
    """Fast weights and weights swapped for the forward pass raise.

    The gradients would be others, silently.
    """
    model = Net()
    weight = model.blocks[1].linear.weight
    with _recomputing(model), pytest.raises(RecomputeDiffersError, match="its weights"):
        if how == "functional_call":
            fast = {name: 1.1 * parameter for name, parameter in model.named_parameters()}
            loss = torch.func.functional_call(model, fast, (torch.randn(8, 6),)).sum()
        elif how == "data":
            kept, weight.data = weight.data, 1.1 * weight.data
            loss = model(torch.randn(8, 6)).sum()
            weight.data = kept
        else:
            loss = model(torch.randn(8, 6)).sum()
            with torch.no_grad():
                weight.mul_(1.1)
        loss.backward()


class Consuming(nn.Module):
    """A block that takes its input from an object that it empties."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, skips: list[Any]) -> torch.Tensor:
        return torch.tanh(self.linear(x + skips.pop()()))


@pytest.mark.parametrize("memory_is_short", [False, True])
def test_what_a_block_raises_only_the_second_time_comes_of_recomputing(
    memory_is_short: bool,
) -> None:
    """An empty list the second time names the block, with the error as its cause.

    Out of memory stays what it is.
    """

    def once() -> torch.Tensor:
        skips.append(fail)
        return torch.zeros(())

    def fail() -> torch.Tensor:
        if memory_is_short:
            return torch.empty(2**50, dtype=torch.uint8)
        raise IndexError("pop from empty list")

    block, skips = Consuming(), []  # type: Consuming, list[Any]
    with recomputing([block], random_state.capture, random_state.restore):
        skips.append(once)
        loss = block(torch.randn(8, 6, requires_grad=True), skips).sum()
        if memory_is_short:
            with pytest.raises(RuntimeError, match="allocate") as short:
                loss.backward()
            assert not isinstance(short.value, RecomputeDiffersError)
        else:
            with pytest.raises(RecomputeDiffersError, match="pop from empty") as differs:
                loss.backward()
            assert differs.value.block is block
            assert isinstance(differs.value.__cause__, IndexError)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("measured", [False, True])
def test_a_copy_that_is_made_meanwhile_computes_with_its_own_weights(
    copied: Any, measured: bool
) -> None:
    """A teacher that the loss copies or saves while forwards are replaced has plain ones, bound
    to itself.
    """
    model = Net().eval()
    x = torch.randn(8, 6)
    during = (
        SavedBytes(dict(model.named_modules())).measuring((), [])
        if measured
        else _recomputing(model)
    )
    with during:
        teacher = copied(model)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.zero_()
    assert [block.forward.__self__ for block in teacher.blocks] == list(teacher.blocks)
    assert not teacher(x).any()
    assert copy.deepcopy(teacher).blocks[0].forward.__self__ is not teacher.blocks[0]
