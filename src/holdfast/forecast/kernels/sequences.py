"""Packing, padding and the CTC loss on fake tensors.

Operators that read lengths, which a fake tensor may not know.

Known lengths are used. Unknown ones are taken as the longest that they can be, which a plan must
hold for, and that is said. The allocations follow aten/src/ATen/native/PackedSequence.cpp,
LossCTC.cpp and cuda/LossCTC.cu; cuDNN's CTC loss, which torch takes only for int32 targets on the
host, is not emulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

aten = torch.ops.aten

Known = Callable[[torch.Tensor], torch.Tensor | None]
Assume = Callable[[str], None]


class _Sequences:
    """The rules for one fake device, in the operators' own signatures."""

    def __init__(self, known: Known, assume: Assume) -> None:
        self._known = known
        self._assume = assume

    def pack(self, data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:  # noqa: FBT001
        """Stand in for `_pack_padded_sequence`."""
        known = self._lengths(lengths, data.shape[1 if batch_first else 0], "pack_padded_sequence")
        packed, batch_sizes = _Pack.apply(data, lengths, known)  # type: ignore[no-untyped-call]
        _learn(
            batch_sizes,
            [sum(length > step for length in known) for step in range(max(known, default=0))],
        )
        return packed, batch_sizes

    def pad(
        self,
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        batch_first: bool,  # noqa: FBT001
        padding_value: float,
        total_length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stand in for `_pad_packed_sequence`: the whole is filled, then written over."""
        steps = batch_sizes.shape[0]
        sizes = self._known(batch_sizes)
        batch = -(-data.shape[0] // steps) if sizes is None else int(sizes[0])
        padded = data.new_full((max(steps, total_length), batch, *data.shape[1:]), padding_value)
        if data.shape[0] == steps * batch:
            padded[:steps].copy_(data.view(steps, batch, *data.shape[1:]))
        else:
            # Written in pieces in truth, one for each length; a single write keeps as much alive.
            padded.view(-1, *data.shape[1:])[: data.shape[0]].copy_(data)
        lengths = torch.empty(batch, dtype=torch.int64, device=batch_sizes.device)
        if sizes is not None:
            _learn(lengths, [sum(int(size) > row for size in sizes) for row in range(batch)])
        return (padded.transpose(0, 1) if batch_first else padded), lengths

    def ctc(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        _: Any,
        target_lengths: Any,
        *rest: Any,
    ) -> Any:
        """Stand in for `ctc_loss` with tensors or lists of lengths."""
        if isinstance(target_lengths, torch.Tensor):
            batch = max(1, target_lengths.numel())
            longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // batch)
            target_lengths = self._lengths(target_lengths, longest, "ctc_loss")
        reduction, zero_infinity = (rest[1] if len(rest) > 1 else 1), (len(rest) > 2 and rest[2])
        losses = _Ctc.apply(log_probs, targets, max(target_lengths, default=0))  # type: ignore[no-untyped-call]
        if zero_infinity:
            zero = torch.zeros((), dtype=losses.dtype, device=losses.device)
            losses = torch.where(losses == float("inf"), zero, losses)
        if reduction == 1:  # at::Reduction::Mean
            return (losses / torch.empty_like(losses).clamp_min(1)).mean()
        return losses.sum() if reduction == 2 else losses

    def _lengths(self, lengths: torch.Tensor, longest: int, operator: str) -> list[int]:
        """Return the lengths, all of them the longest if they are not known."""
        values = self._known(lengths) if isinstance(lengths, FakeTensor) else lengths
        if values is not None:
            return [int(value) for value in values.reshape(-1).tolist()]
        self._assume(f"all sequences given to {operator} were taken as {longest} long")
        return [longest] * lengths.numel()


def _learn(tensor: Any, values: list[int]) -> None:
    """Let the fake mode know the values of a fake tensor.

    A recurrent layer asks for the first batch size.
    """
    with unset_fake_temporarily():
        tensor.fake_mode.known_values.learn(tensor, torch.tensor(values, dtype=torch.int64))


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, lengths: torch.Tensor, known: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = data.new_empty((sum(known), *data.shape[2:]))
        batch_sizes = torch.empty(max(known, default=0), dtype=torch.int64, device=lengths.device)
        ctx.save_for_backward(batch_sizes)
        ctx.shape = data.shape
        ctx.mark_non_differentiable(batch_sizes)
        return packed, batch_sizes

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, _batch_sizes: Any
    ) -> tuple[torch.Tensor | None, ...]:
        return gradient.new_zeros(ctx.shape), None, None


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_probs: torch.Tensor, targets: torch.Tensor, longest: int
    ) -> torch.Tensor:
        steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
        log_alpha = log_probs.new_empty((batch, steps, 2 * longest + 1))
        losses = log_probs.new_empty((batch,))
        ctx.save_for_backward(log_probs, targets, log_alpha, losses)
        return losses

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_probs, _targets, log_alpha, _losses = ctx.saved_tensors
        log_beta = torch.empty_like(log_alpha)
        gradient = torch.full_like(log_probs, float("-inf"))
        del log_beta
        return gradient, None, None


def install_sequences(library: torch.library.Library, known: Known, assume: Assume) -> None:
    """Have packing, padding and the CTC loss work on fake tensors.

    `known` returns the values of a fake tensor or None, `assume` is called with what had to be
    assumed.
    """
    rules = _Sequences(known, assume)
    for native, rule in (
        (aten._pack_padded_sequence.default, rules.pack),
        (aten._pad_packed_sequence.default, rules.pad),
        (aten.ctc_loss.IntList, rules.ctc),
        (aten.ctc_loss.Tensor, rules.ctc),
    ):
        library.impl(native, _for_fake_tensors(native, rule))  # type: ignore[no-untyped-call]


def _for_fake_tensors(native: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        if isinstance(args[0], FakeTensor):
            return rule(*args)
        # Real ones are data, which nobody differentiates by
        with torch._C._AutoDispatchBelowAutograd():
            return native(*args)

    return kernel
