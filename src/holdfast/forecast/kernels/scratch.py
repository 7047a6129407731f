"""What an operator needs while it runs, beside its arguments and results: no dispatcher sees it, so tables say it.

Route ``"privateuse1"`` uses CUDA's table, route ``"cpu"`` that of the CPU, where the forecast can be checked against
the real allocator. An operator that no table knows counts as 0, is counted, and widens the margin by the size of its
tensors: an operator rarely needs more than a copy of each.

Does not: record anything. The tracer notes an allocation and its release for what is returned here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.forecast.kernels import scratch_composites, scratch_cpu, scratch_cuda
from holdfast.forecast.kernels.scratch_cuda import Rule

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchEstimate:
    """What one call of an operator needs while it runs.

    Args:
        bytes: To be counted.
        upper_bytes: The most that it may be.
        calibrated: False if the figure is an assumption, or if the operator is not known at all.
    """

    bytes: int
    upper_bytes: int
    calibrated: bool


NO_SCRATCH = ScratchEstimate(bytes=0, upper_bytes=0, calibrated=True)

# They run in their results, on both devices; what a reduction of CUDA keeps between blocks is below a megabyte.
_IN_PLACE_NAMES = """
    mm bmm addmm baddbmm dot mv addmv addr linear matmul einsum
    sum mean amax amin max min any all argmax argmin var var_mean std prod norm linalg_vector_norm
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data cumsum cumprod
    native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit native_batch_norm_backward
    cudnn_batch_norm cudnn_batch_norm_backward _batch_norm_with_update batch_norm_backward
    _fused_rms_norm _fused_rms_norm_backward
    embedding index index_select gather scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy
    index_copy_ masked_fill masked_fill_ masked_scatter where cat stack split_with_sizes constant_pad_nd
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss_backward
    binary_cross_entropy binary_cross_entropy_backward smooth_l1_loss_backward huber_loss_backward
    l1_loss log_sigmoid_forward log_sigmoid_backward soft_margin_loss soft_margin_loss_backward
    native_dropout native_dropout_backward bernoulli bernoulli_ normal_ uniform_ exponential_ random_ rand randn
    rand_like randn_like randint randperm
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool1d
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
    max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward
    upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward replication_pad1d
    replication_pad2d grid_sampler_2d grid_sampler_2d_backward pixel_shuffle pixel_unshuffle
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided new_zeros new_ones new_full zeros ones
    full zeros_like ones_like full_like arange linspace eye scalar_tensor tril triu tril_indices triu_indices
    unsafe_split unsafe_chunk unsafe_split_with_sizes
    clone copy_ _to_copy contiguous fill_ zero_ set_ resize_ lift_fresh lift_fresh_copy detach detach_ alias
    _local_scalar_dense item is_same_size _unsafe_view slice_backward select_backward slice_scatter select_scatter
    diagonal_backward as_strided roll flip repeat unfold_backward im2col col2im record_stream is_pinned
    equal nonzero masked_select bucketize searchsorted one_hot isin count_nonzero nan_to_num
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention_for_cpu
    _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _fused_dropout
    glu glu_backward prelu _prelu_kernel _prelu_kernel_backward _cdist_forward cross
    _pack_padded_sequence _ctc_loss view_as_real view_as_complex
    dropout layer_norm group_norm batch_norm reshape flatten chunk to type_as softmax log_softmax
"""
_IN_PLACE = frozenset(_IN_PLACE_NAMES.split())

_Entry = Rule | bool
_entries: dict[tuple[str, Any], _Entry] = {}


def scratch_bytes(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, route: str, device_kind: str = "cuda"
) -> ScratchEstimate:
    """Return what this call needs beside its arguments and results.

    Args:
        op: Overload that was dispatched.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: What it returned.
        route: ``"privateuse1"`` or ``"cpu"``.
        device_kind: Type of the device that the call ran on: ``"cpu"`` means the host. On route ``"privateuse1"`` the
            host's memory is nobody's business.
    """
    if route == "privateuse1" and device_kind == "cpu":
        return NO_SCRATCH
    entry = _entries.get((route, op))
    if entry is None:
        entry = _entries[route, op] = _entry(route, op)
    if entry is True:
        return NO_SCRATCH
    if entry is False:
        return ScratchEstimate(bytes=0, upper_bytes=_bytes_of((args, kwargs, out)), calibrated=False)
    names = [argument.name for argument in op._schema.arguments]
    try:
        need = entry({**_defaults(op), **dict(zip(names, args, strict=False)), **kwargs}, out)
    except (KeyError, AttributeError, TypeError, IndexError, RuntimeError):  # another torch, another signature
        return ScratchEstimate(bytes=0, upper_bytes=_bytes_of((args, kwargs, out)), calibrated=False)
    return ScratchEstimate(bytes=need.expected, upper_bytes=need.at_most, calibrated=need.calibrated)


def _entry(route: str, op: Any) -> _Entry:
    """The rule for an operator; True if it needs nothing, False if it is not known."""
    namespace, name = getattr(op, "namespace", ""), str(getattr(op, "overloadpacket", op)).rpartition(".")[2]
    if namespace in ("prim", "prims", "profiler"):
        return True
    rules: Mapping[str, Rule] = scratch_cuda.RULES if route == "privateuse1" else scratch_cpu.RULES
    rule = rules.get(name) or scratch_composites.RULES.get(name)
    if namespace == "aten" and rule is not None:
        return rule
    if torch.Tag.pointwise in getattr(op, "tags", ()) or getattr(op, "is_view", False):
        return True
    return namespace == "aten" and (
        name.startswith(("_foreach_", "_fused_ada", "_fused_sgd"))
        or name.rstrip("_") in _IN_PLACE
        or name in _IN_PLACE
        or _is_gradient(name)
    )


def _is_gradient(name: str) -> bool:
    """Say whether it is the gradient of a pointwise function, which carries no tag."""
    packet = getattr(aten, name.removesuffix("_backward"), None)
    if not name.endswith("_backward") or packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _defaults(op: Any) -> dict[str, Any]:
    return {
        argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()
    }


def _bytes_of(values: Any) -> int:
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


@dataclass(slots=True)
class Uncalibrated:
    """What a step holds of uncertain figures: which operators, and by how many bytes it may need more.

    Args:
        calls: How often each was called.
    """

    calls: Counter[str] = field(default_factory=Counter)
    _while_running: int = 0
    _kept: int = 0

    @property
    def excess_bytes(self) -> int:
        """The most by which the peak may be higher than forecast: one operator runs at a time."""
        return self._while_running + self._kept

    def note(self, name: str, estimate: ScratchEstimate) -> None:
        """Take down a call of an operator."""
        excess = estimate.upper_bytes - estimate.bytes
        if not estimate.calibrated:
            self.calls[name] += 1
        self._while_running = max(self._while_running, excess)

    def note_kept(self, name: str, excess: int) -> None:
        """Take down something that lives until the backward pass and may be larger by that much."""
        self.calls[name] += 1
        self._kept += excess

    def clear(self) -> None:
        """Forget everything: a new step begins."""
        self.calls.clear()
        self._while_running = self._kept = 0
