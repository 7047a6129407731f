"""What a CUDA kernel needs while it runs, beside its arguments and results.

No dispatcher sees it, so tables say it.

Each rule follows the source that it names (torch 2.11 to 2.13). Where the library is closed (cuDNN,
cub) the figure is an assumption with an upper bound, and it counts as uncalibrated. An operator
that no table knows counts as
0 and widens the margin by the size of its tensors: an operator rarely needs more than a copy of
    each.

What outlives the operator is not counted here: the reserve of a recurrent layer (``recurrent``),
    and cuBLAS's
workspaces, which belong to the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.forecast.kernels.operators import LISTS

aten = torch.ops.aten
_INDEX_BYTES = 8
_ROWS_PER_THREAD = 10  # EmbeddingBackwardKernel.cu: rows that one thread sums


@dataclass(frozen=True, slots=True)
class Scratch:
    """What one call of an operator needs while it runs.

    What is counted, and what the margin has to cover.

    Both are the same where torch's own source, or a measurement, says it.
    """

    bytes: int
    at_most: int


NOTHING = Scratch(0, 0)
Arguments = dict[str, Any]
Rule = Callable[[Arguments, Any], Scratch]


@dataclass(slots=True)
class Uncalibrated:
    """What a step holds of uncertain figures.

    How often which operator, and by how many bytes it may need more.
    """

    calls: Counter[str] = field(default_factory=Counter)
    _while_running: int = 0
    _kept: int = 0

    @property
    def excess_bytes(self) -> int:
        """The most by which the peak may be higher than forecast: one operator runs at a time."""
        return self._while_running + self._kept

    def note(self, name: str, scratch: Scratch) -> None:
        """Take down a call of an operator."""
        excess = scratch.at_most - scratch.bytes
        if excess:
            self.calls[name] += 1
        self._while_running = max(self._while_running, excess)

    def note_kept(self, name: str, excess: int) -> None:
        """Take down something that is kept until the backward pass and may be larger by that
        much.
        """
        self.calls[name] += 1
        self._kept += excess

    def clear(self) -> None:
        """Forget everything: a new step begins."""
        self.calls.clear()
        self._while_running = self._kept = 0


def scratch_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Scratch | None:
    """Return what this call needs on CUDA beside its arguments and results.

    None if its operator needs nothing.
    """
    if op not in _rules:
        _rules[op] = _rule_of(op)
    rule = _rules[op]
    return None if rule is None else rule(_arguments(op, args, kwargs), out)


_rules: dict[Any, Rule | None] = {}


def _rule_of(op: Any) -> Rule | None:
    if not isinstance(op, torch._ops.OpOverload):
        return _unknown
    rule = RULES.get(name_of(op)) if op.namespace == "aten" else None
    if rule is None:
        return None if needs_nothing(op) else _unknown

    def checked(given: Arguments, out: Any) -> Scratch:
        try:
            return rule(given, out)
        # Another torch, another signature
        except (KeyError, AttributeError, TypeError, IndexError, RuntimeError):
            return _unknown(given, out)

    return checked


def _unknown(given: Arguments, out: Any) -> Scratch:
    tensors = (leaf for leaf in pytree.tree_leaves((given, out)) if isinstance(leaf, torch.Tensor))
    return Scratch(0, sum(t.nbytes for t in tensors if t.layout is torch.strided))


def _arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    if not isinstance(op, torch._ops.OpOverload):  # a higher order operator has no schema
        return {"args": args, **kwargs}
    arguments = op._schema.arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given.update(zip((one.name for one in arguments), args, strict=False))
    return {**given, **kwargs}


def name_of(op: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    return str(op.overloadpacket).rpartition(".")[2]


def needs_nothing(op: Any) -> bool:
    """Return whether an operator is known to run in its results on every device."""
    name = name_of(op)
    if (
        op.namespace in ("prim", "prims", "profiler")
        or torch.Tag.pointwise in op.tags
        or op.is_view
    ):
        return True
    return op.namespace == "aten" and (
        name.startswith(("_foreach_", "_fused_ada", "_fused_sgd"))
        or not {name, name.rstrip("_")}.isdisjoint(LISTS["in_place"])
        or _is_gradient(name)
    )


def _is_gradient(name: str) -> bool:
    """Return whether it is the gradient of a pointwise function, which carries no tag."""
    packet = getattr(aten, name.removesuffix("_backward"), None)
    if not name.endswith("_backward") or packet is None:
        return False
    return any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _exactly(size: int) -> Scratch:
    return Scratch(size, size)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _copy_unless_contiguous(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.nbytes


def _heads_swapped(tensor: torch.Tensor) -> int:
    """Bytes of ``tensor.transpose(1, 2).contiguous()``."""
    return _copy_unless_contiguous(tensor.transpose(1, 2))


def _flash_backward(given: Arguments, _out: Any) -> Scratch:
    """flash_attn/flash_api.cpp, mha_bwd.

    Fp32 sums for the query's gradient, row sums, keys' gradients by head.
    """
    query, key = given["query"], given["key"]
    batch, heads, length, size = query.shape
    rounded_length, rounded_size = _up(length, 128), _up(size, 32 if size <= 128 else 64)
    sums = batch * rounded_length * heads * (rounded_size + 1) * 4
    if key.shape[1] != heads:
        sums += 2 * batch * key.shape[2] * heads * size * query.element_size()
    return _exactly(sums + _heads_swapped(given["grad_out"]) + _heads_swapped(given["out"]))


def _efficient_backward(given: Arguments, _out: Any) -> Scratch:
    """mem_eff_attention/kernel_backward.h.

    Workspace_size(), and the row sums of attention_backward.cu.
    """
    query, value = given["query"], given["value"]
    batch, heads, length, size = query.shape
    value_size, keys = value.shape[-1], value.shape[2]
    half = query.dtype in (torch.float16, torch.bfloat16)
    # cutlassB.h, sm80: tiles of 64 x 64, of 128 x 64 for half precision beyond a head size of 64.
    tile = 128 if half and max(size, value_size) > 64 else 64
    gradient_of_query = _up(length, tile) * _up(size, 64) * 4 + 16 * (-(-length // tile)) * (
        -(-size // 64)
    )
    staging = 0
    if half and max(size, value_size) > tile:  # kScratchsAccumGradK and V: not kept in registers
        splits = max(1, min(-(-keys // 64), 200 // (batch * heads)))
        staging = splits * _up(keys, 64) * (_up(size, tile) + _up(value_size, tile)) * 4
    rows = batch * heads * length * 4
    # In fp32 the row sums are made by a product of the two tensors, then transposed and copied.
    sums = rows if half else 2 * rows + batch * heads * length * value_size * 4
    workspace = batch * heads * (gradient_of_query + staging)
    copies = _heads_swapped(given["grad_out_"])
    return Scratch(copies + max(sums, rows + workspace), copies + sums + 2 * workspace)


def _convolution_backward(given: Arguments, _out: Any) -> Scratch:
    """One gradient after the other; each reads two of the three and writes the third."""
    data = _reordered((given["grad_output"], given["weight"], given["input"]), given["groups"])
    # Weights are summed in fp32
    single = given["weight"].numel() * 4 if given["weight"].element_size() < 4 else 0
    return Scratch(data.bytes + single, data.at_most + single)


def _reordered(tensors: Sequence[torch.Tensor], groups: int) -> Scratch:
    """Closed: kernels for tensor cores want channels last and copy what is not (nchwToNhwcKernel in
    profiles).

    How much more the heuristics take is unknown (pytorch issue 49207 saw gigabytes); twice the
    tensors are allowed.
    """
    copies = (
        0
        if _is_channels_last(tensors[0]) or groups > 1
        else sum(tensor.nbytes for tensor in tensors)
    )
    return Scratch(copies, copies + 2 * sum(tensor.nbytes for tensor in tensors))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def _embedding_backward(given: Arguments, out: Any) -> Scratch:
    """Embedding.cu and EmbeddingBackwardKernel.cu.

    Sorted indices, one row of sums for each piece of a segment.

    Up to 3072 indices a kernel without scratch is taken. The sorting one is counted all the same:
        forecasts for large
    batches are drawn from traces of small ones, which must not lack what the large ones need.
    """
    indices = given["indices"].numel()
    rows, size = out.shape
    segments = min(indices, rows)
    pieces = indices // _ROWS_PER_THREAD + segments
    sorting = 2 * indices * _INDEX_BYTES
    offsets = (indices + 2 * segments + pieces) * _INDEX_BYTES
    return _exactly(sorting + max(sorting, offsets + pieces * size * max(4, out.element_size())))


def _index_put(given: Arguments, _out: Any) -> Scratch:
    """Indexing.cu, index_put_with_sort_kernel.

    Linear, sorted and original indices, and cub's buffers.
    """
    if not given.get("accumulate"):
        return NOTHING
    values = given["values"]
    shapes = [index.shape for index in given["indices"] if index is not None]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    count = math.prod(shape) if shapes else 0
    expected = 5 * count * _INDEX_BYTES + _copy_unless_contiguous(values)
    return Scratch(expected, 2 * expected)


def _reduced_loss(given: Arguments, _out: Any) -> Scratch:
    """The loss of every element, which is then averaged or summed."""
    return NOTHING if given["reduction"] == 0 else _exactly(given["self"].nbytes)


def _logits_loss(given: Arguments, out: Any) -> Scratch:
    """Two temporaries at a time; one of them becomes the result if nothing is reduced."""
    return _exactly(max(0, 2 * given["self"].nbytes - (0 if given["reduction"] else out.nbytes)))


RULES: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "convolution": lambda given, out: _reordered(
        (given["input"], given["weight"], out), given["groups"]
    ),
    "convolution_backward": _convolution_backward,
    "embedding_dense_backward": _embedding_backward,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    # layer_norm_kernel.cu: partial sums of the two parameters' gradients, 32 rows of each in fp32.
    "native_layer_norm_backward": lambda given, _: _exactly(
        2 * 32 * math.prod(given["normalized_shape"]) * 4
    ),
    # group_norm_kernel.cu: two sums in fp32 for each sample and channel.
    "native_group_norm_backward": lambda given, _: _exactly(2 * given["N"] * given["C"] * 4),
    # Composed of other operators inside one dispatch, on every device alike.
    "mse_loss": _reduced_loss,
    "smooth_l1_loss": _reduced_loss,
    "huber_loss": _reduced_loss,
    "binary_cross_entropy_with_logits": _logits_loss,
    "logsumexp": lambda given, out: _exactly(given["self"].nbytes + out.nbytes),
    # Masks: what is minus infinity, and the rows that are it altogether.
    "_safe_softmax": lambda given, out: _exactly(
        out.numel() + out.numel() // max(1, out.shape[given["dim"]])
    ),
}
