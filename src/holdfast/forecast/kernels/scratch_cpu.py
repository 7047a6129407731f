"""Measure the scratch memory of CPU kernels, for forecasts that are compared with real CPU runs.

Each operator runs once on tensors of zeros with the same shapes and strides, and torch's profiler
records the allocations. The results are specific to this machine's kernels and number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from holdfast.forecast.kernels.operators import LISTS
from holdfast.forecast.kernels.scratch import Scratch, name_of, needs_no_scratch

# Calls whose tensors have more elements than this in total (256 MiB in fp32) are not measured, so
# that a forecast takes only seconds.
_MOST_ELEMENTS = 2**26

# Cached measurements, keyed by the operator and the properties of its arguments.
_measured: dict[Any, Scratch] = {}


def scratch_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Scratch | None:
    """Return the scratch memory that a call of an operator needs on this machine's CPU.

    The arguments are the same as those of `scratch.scratch_of`.

    Returns:
        The scratch memory, or None if the operator is known to need none.
    """
    del out
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if needs_no_scratch(op) and name_of(op) not in LISTS["more_on_cpu"]:
        return None
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    key = (op, structure, tuple(map(_describe, leaves)))
    if key not in _measured:
        _measured[key] = _measure(op, leaves, structure)
    return _measured[key]


def _describe(leaf: Any) -> Any:
    """Return a cache key with the properties of an argument that may affect scratch memory."""
    if not isinstance(leaf, torch.Tensor):
        return str(leaf)
    if leaf.layout is not torch.strided:
        return id(leaf)
    return (*leaf.shape, *leaf.stride(), leaf.dtype)


def _measure(op: Any, leaves: Sequence[Any], structure: Any) -> Scratch:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    unmeasured = Scratch(0, sum(tensor.nbytes for tensor in tensors))
    if sum(tensor.numel() for tensor in tensors) > _MOST_ELEMENTS:
        return unmeasured
    try:
        peak, kept = _run(op, leaves, structure)
    except (RuntimeError, NotImplementedError, IndexError, ValueError):
        # Some operators reject zeros, for example as lengths.
        return unmeasured
    needed = max(0, peak - kept)
    return Scratch(needed, needed)


def _run(op: Any, leaves: Sequence[Any], structure: Any) -> tuple[int, int]:
    """Run an operator on tensors of zeros under torch's profiler.

    The grad mode is not changed, because oneDNN's LSTM keeps more memory if gradients are enabled.

    Returns:
        The peak of allocated bytes, and the number of bytes that the operator did not free.
    """
    with unset_fake_temporarily():
        args, kwargs = pytree.tree_unflatten([_zeros_like(leaf) for leaf in leaves], structure)
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            result = op(*args, **kwargs)
        assert profiler.profiler is not None
        events = [
            event
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        del result
    live = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


def _zeros_like(leaf: Any) -> Any:
    """Return a real tensor of zeros for a tensor, and any other argument unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(tuple(leaf.shape), leaf.stride(), dtype=leaf.dtype).zero_()


def lstm(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Fake kernel of `aten.mkldnn_rnn_layer`, which runs the real operator on zeros.

    The shapes of the real results are used, because torch's own fake kernel returns a workspace of
    0 bytes.
    """
    with unset_fake_temporarily():
        real_args, real_kwargs = pytree.tree_map(_zeros_like, (args, kwargs))
        results = func(*real_args, **real_kwargs)
        shapes = [(tuple(result.shape), result.dtype) for result in results]
    with mode:
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)
