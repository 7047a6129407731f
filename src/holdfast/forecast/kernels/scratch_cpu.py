"""What the CPU's operators need while they run, for forecasts that are checked on a CPU.

Each is run once.

It is run on zeros of the same shapes and strides, and torch's profiler says what the allocator gave
out. So the figures are those of this machine's kernels and number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from holdfast.forecast.kernels.operators import LISTS
from holdfast.forecast.kernels.scratch import Scratch, name_of, needs_nothing

_MOST_ELEMENTS = 2**26  # that are computed with: 256 MiB of fp32
_known: dict[Any, Scratch | None] = {}


def scratch_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Scratch | None:
    """Return what this call needs on this CPU beside its arguments and results.

    None for views and the like.
    """
    del out
    if not isinstance(op, torch._ops.OpOverload) or (
        needs_nothing(op) and name_of(op) not in LISTS["more_on_cpu"]
    ):
        return None
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    key = (op, structure, tuple(map(_described, leaves)))
    if key not in _known:
        _known[key] = _measured(op, leaves, structure)
    return _known[key]


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (
            (*leaf.shape, *leaf.stride(), leaf.dtype) if leaf.layout is torch.strided else id(leaf)
        )
    return str(leaf)


def _measured(op: Any, leaves: Sequence[Any], structure: Any) -> Scratch | None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if sum(tensor.numel() for tensor in tensors) > _MOST_ELEMENTS:
        return Scratch(0, sum(tensor.nbytes for tensor in tensors))
    try:
        peak, kept = _run(op, leaves, structure)
    except (RuntimeError, NotImplementedError, IndexError, ValueError):  # zeros do not suit it
        return Scratch(0, sum(tensor.nbytes for tensor in tensors))
    needed = max(0, peak - kept)
    return Scratch(needed, needed)


def _run(op: Any, leaves: Sequence[Any], structure: Any) -> tuple[int, int]:
    """Return the most bytes that were given out at once, and those that were not given back."""
    # Whether gradients are wanted stays as it is: oneDNN's LSTM keeps more then
    with unset_fake_temporarily():
        args, kwargs = pytree.tree_unflatten([zeros_like(leaf) for leaf in leaves], structure)
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as watched:
            kept = op(*args, **kwargs)
        assert watched.profiler is not None
        events = [
            event
            for event in watched.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        del kept
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


def zeros_like(leaf: Any) -> Any:
    """Return real zeros in place of a tensor, and anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(tuple(leaf.shape), leaf.stride(), dtype=leaf.dtype).zero_()


def lstm(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `aten.mkldnn_rnn_layer`.

    Torch's fake kernel says that its workspace has 0 bytes.
    """
    with unset_fake_temporarily():
        leaves, structure = pytree.tree_flatten((args, kwargs))
        real_args, real_kwargs = pytree.tree_unflatten(
            [zeros_like(leaf) for leaf in leaves], structure
        )
        shapes = [(tuple(one.shape), one.dtype) for one in func(*real_args, **real_kwargs)]
    with mode:
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)
