"""Packing, padding and the CTC loss on fake tensors: operators that read lengths, which a fake tensor may not know.

Known lengths are used. Unknown ones are taken as the longest that they can be, which a plan must hold for, and that
is said. The allocations follow aten/src/ATen/native/PackedSequence.cpp, LossCTC.cpp and cuda/LossCTC.cu.

Does not: run the recurrent layers (``recurrent``), or emulate cuDNN's CTC loss, which torch takes only for int32
targets on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

aten = torch.ops.aten
_BELOW_AUTOGRAD = torch._C._AutoDispatchBelowAutograd

Known = Callable[[torch.Tensor], torch.Tensor | None]
Assume = Callable[[str], None]


class Sequences:
    """The rules for one fake device.

    Args:
        known: Returns the values of a fake tensor as a real one, or None if they are not known.
        assume: Called with what had to be assumed.
    """

    def __init__(self, known: Known, assume: Assume) -> None:
        self._known = known
        self._assume = assume

    def lengths(self, lengths: torch.Tensor, longest: int, operator: str) -> list[int]:
        """Return the lengths, all of them the longest if they are not known."""
        values = self._known(lengths) if isinstance(lengths, FakeTensor) else lengths
        if values is not None:
            return [int(value) for value in values.reshape(-1).tolist()]
        self._assume(f"all sequences given to {operator} were taken as {longest} long")
        return [longest] * lengths.numel()

    def pack(
        self,
        data: torch.Tensor,
        lengths: torch.Tensor,
        batch_first: bool,  # noqa: FBT001 (the operator's signature)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stand in for `_pack_padded_sequence`."""
        known: list[int] = []
        if isinstance(data, FakeTensor):
            known = self.lengths(lengths, data.shape[1 if batch_first else 0], "pack_padded_sequence")
        packed, batch_sizes = _Pack.apply(data, lengths, batch_first, known)  # type: ignore[no-untyped-call]
        if known:
            steps = range(max(known))
            _learn(batch_sizes, [sum(length > step for length in known) for step in steps])
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
        if not isinstance(data, FakeTensor):
            out: tuple[torch.Tensor, torch.Tensor] = aten._pad_packed_sequence.default.decompose(
                data, batch_sizes, batch_first, padding_value, total_length
            )
            return out
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

    def ctc_of_lists(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Sequence[int],
        target_lengths: Sequence[int],
        *rest: Any,
    ) -> torch.Tensor:
        """Stand in for `ctc_loss` with lists of lengths."""
        if not isinstance(log_probs, FakeTensor):
            loss: torch.Tensor = aten.ctc_loss.IntList.decompose(
                log_probs, targets, input_lengths, target_lengths, *rest
            )
            return loss
        return self._ctc(log_probs, targets, max(target_lengths, default=0), rest)

    def ctc_of_tensors(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: torch.Tensor,
        target_lengths: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        """Stand in for `ctc_loss` with tensors of lengths."""
        if not isinstance(log_probs, FakeTensor):
            loss: torch.Tensor = aten.ctc_loss.Tensor.decompose(
                log_probs, targets, input_lengths, target_lengths, *rest
            )
            return loss
        batch = max(1, target_lengths.numel())
        longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // batch)
        return self._ctc(log_probs, targets, max(self.lengths(target_lengths, longest, "ctc_loss"), default=0), rest)

    def _ctc(
        self, log_probs: torch.Tensor, targets: torch.Tensor, longest: int, rest: tuple[Any, ...]
    ) -> torch.Tensor:
        reduction, zero_infinity = (rest[1] if len(rest) > 1 else 1), (len(rest) > 2 and rest[2])
        losses: torch.Tensor = _Ctc.apply(log_probs, targets, longest)  # type: ignore[no-untyped-call]
        if zero_infinity:
            zero = torch.zeros((), dtype=losses.dtype, device=losses.device)
            losses = torch.where(losses == float("inf"), zero, losses)
        if reduction == 1:  # at::Reduction::Mean
            return (losses / torch.empty_like(losses).clamp_min(1)).mean()
        return losses.sum() if reduction == 2 else losses


def _learn(tensor: torch.Tensor, values: list[int]) -> None:
    """Let the fake mode know the values of a fake tensor: a recurrent layer asks for the first batch size."""
    facts = getattr(getattr(tensor, "fake_mode", None), "facts", None)
    if facts is not None:
        with unset_fake_temporarily():
            facts.know(tensor, torch.tensor(values, dtype=torch.int64))


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        lengths: torch.Tensor,
        batch_first: bool,  # noqa: FBT001
        known: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(data, FakeTensor):
            features = data.shape[2:]
            packed = data.new_empty((sum(known), *features))
            batch_sizes = torch.empty(max(known, default=0), dtype=torch.int64, device=lengths.device)
        else:
            with _BELOW_AUTOGRAD():
                packed, batch_sizes = aten._pack_padded_sequence(data, lengths, batch_first)
        ctx.save_for_backward(batch_sizes)
        ctx.shape, ctx.batch_first = data.shape, batch_first
        ctx.mark_non_differentiable(batch_sizes)
        return packed, batch_sizes

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _batch_sizes: Any) -> tuple[torch.Tensor | None, ...]:
        (batch_sizes,) = ctx.saved_tensors
        if not isinstance(gradient, FakeTensor):
            whole = aten._pack_padded_sequence_backward(gradient, ctx.shape, batch_sizes, ctx.batch_first)
        else:
            whole = gradient.new_zeros(ctx.shape)
        return whole, None, None, None


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, targets: torch.Tensor, longest: int) -> torch.Tensor:
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


def install_sequences(library: torch.library.Library, known: Known, assume: Assume) -> Sequences:
    """Have packing, padding and the CTC loss work on fake tensors.

    Args:
        library: Of namespace ``aten``, kind ``IMPL``, dispatch key ``AutogradPrivateUse1`` or ``AutogradCPU``; to be
            kept alive.
        known: Returns the values of a fake tensor as a real one, or None if they are not known.
        assume: Called with what had to be assumed.
    """
    rules = Sequences(known, assume)
    kernels: dict[str, Callable[..., Any]] = {
        "_pack_padded_sequence": rules.pack,
        "_pad_packed_sequence": rules.pad,
        "ctc_loss.IntList": rules.ctc_of_lists,
        "ctc_loss.Tensor": rules.ctc_of_tensors,
    }
    for operator, kernel in kernels.items():
        library.impl(operator, kernel)  # type: ignore[no-untyped-call]
    return rules
