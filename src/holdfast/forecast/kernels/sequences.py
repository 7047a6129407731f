"""Emulate packing, padding and the CTC loss for fake tensors.

These operators need the lengths of the sequences. If the lengths are not known, all sequences are
assumed to have the largest possible length, which is the worst case and is reported as an
assumption. The allocations follow aten/src/ATen/native/PackedSequence.cpp, LossCTC.cpp and
cuda/LossCTC.cu. cuDNN's CTC loss is not emulated; torch uses it only for int32 targets on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

aten = torch.ops.aten

# A function that returns the values of a fake tensor, or None if they are not known.
ValueOf = Callable[[torch.Tensor], torch.Tensor | None]
Assume = Callable[[str], None]

# The values of at::Reduction::Mean and at::Reduction::Sum.
_MEAN = 1
_SUM = 2


def install_sequences(library: torch.library.Library, value_of: ValueOf, assume: Assume) -> None:
    """Make packing, padding and the CTC loss work on fake tensors.

    Args:
        library: The library in which the kernels are registered.
        value_of: A function that returns the values of a fake tensor, or None if they are unknown.
        assume: Called with the text of each assumption.
    """
    sequences = _Sequences(value_of, assume)
    for native, rule in (
        (aten._pack_padded_sequence.default, sequences.pack),
        (aten._pad_packed_sequence.default, sequences.pad),
        (aten.ctc_loss.IntList, sequences.ctc),
        (aten.ctc_loss.Tensor, sequences.ctc),
    ):
        library.impl(native, _for_fake_tensors(native, rule))  # type: ignore[no-untyped-call]


def _for_fake_tensors(native: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls `rule` for fake tensors and `native` for real ones."""

    def kernel(*args: Any) -> Any:
        if isinstance(args[0], FakeTensor):
            return rule(*args)
        # Real tensors are input data and need no gradients.
        with torch._C._AutoDispatchBelowAutograd():
            return native(*args)

    return kernel


class _Sequences:
    """Replacements for operators on one fake device. Each has the signature of its operator."""

    def __init__(self, value_of: ValueOf, assume: Assume) -> None:
        self._value_of = value_of
        self._assume = assume

    def pack(self, data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:  # noqa: FBT001
        """Replace `_pack_padded_sequence`, and record the resulting batch sizes as known values."""
        time_dimension = 1 if batch_first else 0
        known_lengths = self._known_lengths(
            lengths, data.shape[time_dimension], "pack_padded_sequence"
        )
        packed, batch_sizes = _Pack.apply(data, lengths, known_lengths)  # type: ignore[no-untyped-call]
        steps = range(max(known_lengths, default=0))
        _learn(batch_sizes, [sum(length > step for length in known_lengths) for step in steps])
        return packed, batch_sizes

    def pad(
        self,
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        batch_first: bool,  # noqa: FBT001
        padding_value: float,
        total_length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace `_pad_packed_sequence`, which creates padding and copies the data into it."""
        steps = batch_sizes.shape[0]
        sizes = self._value_of(batch_sizes)
        batch = -(-data.shape[0] // steps) if sizes is None else int(sizes[0])
        features = data.shape[1:]
        padded = data.new_full((max(steps, total_length), batch, *features), padding_value)
        if data.shape[0] == steps * batch:
            padded[:steps].copy_(data.view(steps, batch, *features))
        else:
            # torch copies the data in several pieces. A single copy has the same effect on memory.
            padded.view(-1, *features)[: data.shape[0]].copy_(data)
        lengths = torch.empty(batch, dtype=torch.int64, device=batch_sizes.device)
        if sizes is not None:
            _learn(lengths, [sum(int(size) > row for size in sizes) for row in range(batch)])
        if batch_first:
            return padded.transpose(0, 1), lengths
        return padded, lengths

    def ctc(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        _: Any,
        target_lengths: Any,
        *options: Any,
    ) -> Any:
        """Replace both overloads of `ctc_loss`, which take lengths as a tensor or as a list.

        `options` contains the arguments `blank`, `reduction` and `zero_infinity`, if they were
        passed.
        """
        if isinstance(target_lengths, torch.Tensor):
            batch = max(1, target_lengths.numel())
            longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // batch)
            target_lengths = self._known_lengths(target_lengths, longest, "ctc_loss")
        reduction = options[1] if len(options) > 1 else _MEAN
        zero_infinity = options[2] if len(options) > 2 else False
        losses = _Ctc.apply(log_probs, targets, max(target_lengths, default=0))  # type: ignore[no-untyped-call]
        if zero_infinity:
            zero = torch.zeros((), dtype=losses.dtype, device=losses.device)
            losses = torch.where(losses == float("inf"), zero, losses)
        if reduction == _MEAN:
            return (losses / torch.empty_like(losses).clamp_min(1)).mean()
        if reduction == _SUM:
            return losses.sum()
        return losses

    def _known_lengths(self, lengths: torch.Tensor, longest: int, operator: str) -> list[int]:
        """Return the lengths as integers. If they are unknown, all are assumed to be `longest`.

        Args:
            lengths: The lengths, as a real or fake tensor.
            longest: The largest possible length.
            operator: The name of the operator, for the text of the assumption.
        """
        values = self._value_of(lengths) if isinstance(lengths, FakeTensor) else lengths
        if values is not None:
            return [int(value) for value in values.reshape(-1).tolist()]
        self._assume(f"all sequences passed to {operator} were assumed to have length {longest}")
        return [longest] * lengths.numel()


def _learn(tensor: Any, values: list[int]) -> None:
    """Record the values of a fake tensor in its fake mode, because later operators need them.

    For example, a recurrent layer reads the first batch size.
    """
    with unset_fake_temporarily():
        value = torch.tensor(values, dtype=torch.int64)
        tensor.fake_mode.known_values.learn(tensor, value)


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
        steps = log_probs.shape[0]
        batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
        # The loss extends each target by blanks before, between and after its labels, which gives
        # 2 * length + 1 symbols.
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
