"""Copy the buffers that a forward pass changes, so that an attempt can be undone.

The first step shows which buffers change. It compares values, because BatchNorm updates its
statistics without changing their version counters. After the first step, only the buffers that
change are copied, into memory that is allocated once. For all other buffers, changes are detected
by their version counters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from holdfast.checkpoint.expanded import once
from holdfast.checkpoint.kinds import copy_bits, has_no_values, is_plain, same_bits
from holdfast.guard.state.states import StateKeeper

# Smaller buffers are gated together, because a model with BatchNorm has hundreds of them, and a
# kernel for each would take longer. Larger ones are gated one by one, to save memory.
_MAX_NUMEL_TO_CONCATENATE = 2**16


@dataclass(frozen=True, slots=True)
class _Place:
    """A buffer, identified by its module and its key, since a pass may replace the tensor."""

    module: nn.Module
    key: str
    name: str

    def now(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.key)

    @property
    def is_statistic(self) -> bool:
        return isinstance(self.module, _NormBase)


class BufferKeeper:
    """Keeps copies of buffers and other states from the start of a step.

    Args:
        models: The models by name.
        states: The object that keeps copies of other state. None if there is no other state.
    """

    def __init__(self, models: dict[str, nn.Module], states: StateKeeper | None = None) -> None:
        self.states = StateKeeper({}) if states is None else states
        # The buffers that change. Before the end of the first step, these are all buffers.
        self._mutable = [
            _Place(module, key, ".".join(part for part in (model_name, prefix, key) if part))
            for model_name, model in models.items()
            for prefix, module in model.named_modules()
            for key in module._buffers
        ]
        self._constant: list[_Place] = []
        # Whether the first step has shown which buffers change.
        self._has_learned = False
        # For each mutable buffer, its tensor at the last `capture` and a copy of the values.
        self._before: list[torch.Tensor | None] = []
        self._copies: list[torch.Tensor | None] = []
        # Whether all mutable buffers have values that `gate` can restore. None if not known yet.
        self._are_plain: bool | None = None
        # For each constant buffer, its tensor at the last `capture` and the version counter.
        self._versions: list[tuple[torch.Tensor | None, int]] = []

    def capture(self, earlier: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """Copy the buffers that may change, and store the version counters of the others.

        The copy is fused and does not synchronize with the device.

        Args:
            earlier: The result of `captured` in an earlier process. Where a name is present, this
                value is captured instead of the buffer's current value.
        """
        self.states.capture()
        if not self._mutable and not self._constant:
            return
        buffers = [place.now() for place in self._mutable]
        self._note_versions()
        if not self._copies_fit(buffers):
            self._are_plain = None
            self._copies = [
                None if buffer is None else _uninitialized_like(buffer) for buffer in buffers
            ]
        self._before = buffers
        _copy(self._copies, self._before)
        if earlier:
            _copy(self._copies, [earlier.get(place.name) for place in self._mutable])

    def _copies_fit(self, buffers: list[torch.Tensor | None]) -> bool:
        """Return whether these buffers can be copied into the existing copies."""
        # Usually, the buffers are the same tensors as at the last `capture`, which is quick to
        # check.
        are_same_tensors = len(buffers) == len(self._before) and all(
            buffer is before and (buffer is copy or buffer.shape == copy.shape)  # type: ignore[union-attr]
            for buffer, before, copy in zip(buffers, self._before, self._copies, strict=True)
        )
        if are_same_tensors:
            return True
        return [_layout_of(buffer) for buffer in buffers] == [
            _layout_of(copy) for copy in self._copies
        ]

    def captured(self) -> dict[str, torch.Tensor]:
        """Return the values that the mutable buffers had at the last `capture`, by name."""
        named = zip(self._mutable, self._copies, strict=True)
        return {place.name: copy for place, copy in named if copy is not None}

    def restore(self) -> list[str]:
        """Restore all buffers and states to their values at the last `capture`.

        Afterwards, each buffer is the same tensor object as at the last `capture`, with the same
        values.

        Returns:
            The names of buffers and states that could not be restored. If a buffer changes for the
            first time, there is no copy of it to restore.
        """
        self._put(self._before)
        for buffer, copy in zip(self._before, self._copies, strict=True):
            # The data of the buffer was replaced, or the buffer was resized.
            if buffer is not copy and buffer.shape != copy.shape:  # type: ignore[union-attr]
                buffer.data = torch.empty_like(copy)  # type: ignore[union-attr,arg-type]
        _copy(_once(self._before, self._before), _once(self._copies, self._before))
        newly_mutable = self._learn_newly_mutable()
        # The new mutable buffers are at the end of the list and have no copies yet.
        for place in self._mutable[len(self._before) :]:
            now = place.now()
            self._are_plain = None
            self._before.append(now)
            is_copied = now is not None and not has_no_values(now)
            self._copies.append(now.detach().clone() if is_copied else now)  # type: ignore[union-attr]
        return newly_mutable + self.states.restore()

    @contextlib.contextmanager
    def as_captured(self) -> Iterator[None]:
        """Put the buffers of the last `capture` into the models inside the context.

        On exit, the buffers that have changed since then are put back. Version counters do not
        change, so autograd graphs remain valid.
        """
        current = [place.now() for place in self._mutable]
        values = [
            None if buffer is None or has_no_values(buffer) else buffer.detach().clone()
            for buffer in self._before
        ]
        self._put(self._before)
        _copy(_once(self._before, self._before), _once(self._copies, self._before))
        try:
            yield
        finally:
            _copy(_once(self._before, self._before), _once(values, self._before))
            self._put(current)

    def _put(self, buffers: Sequence[torch.Tensor | None]) -> None:
        """Make these tensors the mutable buffers of the models."""
        for place, buffer in zip(self._mutable, buffers, strict=True):
            place.module._buffers[place.key] = buffer

    def can_gate(self) -> bool:
        """Return whether `gate` could undo all changes to buffers since the last `capture`.

        It cannot if a buffer was replaced by another tensor, has another shape, or changed for the
        first time, if a mutable buffer is sparse or quantized, or if it is not yet known which
        buffers change.
        """
        return (
            self._has_learned
            and not self._changed_constants()
            and self._have_same_storage()
            and self._have_plain_values()
        )

    def _have_same_storage(self) -> bool:
        """Return whether each mutable buffer is still the same tensor, with the same shape."""
        for place, before, copy in zip(self._mutable, self._before, self._copies, strict=True):
            if place.now() is not before:
                return False
            # The data of a buffer can be replaced, as in ``buffer.data = longer``.
            if before is not copy and before.shape != copy.shape:  # type: ignore[union-attr]
                return False
        return True

    def _have_plain_values(self) -> bool:
        """Return whether all mutable buffers have values that `gate` can restore."""
        if self._are_plain is None:
            # `torch.where` cannot select between sparse or quantized tensors.
            self._are_plain = all(
                before is None or is_plain(before) or bool(has_no_values(before))
                for before in self._before
            )
        return self._are_plain

    def gate(self, refused: torch.Tensor) -> None:
        """Undo all changes since the last `capture` if a flag on the device is set.

        This does not synchronize with the device. Call it only if `can_gate` returns True.

        Args:
            refused: The flag, bool, shape ``()``.
        """
        # Some elements of an expanded buffer share memory. `_once` selects each only once.
        targets = _once(self._before, self._before)
        sources = _once(self._copies, self._before)
        # ``.data`` does not change version counters, so autograd graphs remain valid.
        pairs = [
            (target.data, source)
            for target, source in zip(targets, sources, strict=True)
            if target is not None and source is not None and not has_no_values(target)
        ]
        small_pairs = []
        for target, source in pairs:
            if target.numel() > _MAX_NUMEL_TO_CONCATENATE:
                target.copy_(torch.where(refused, source, target))
            else:
                small_pairs.append((target, source))
        for dtype in {target.dtype for target, _ in small_pairs}:
            _select_together([pair for pair in small_pairs if pair[0].dtype is dtype], refused)

    def learn(self) -> list[str]:
        """Determine which buffers and states have changed in an attempt that will be committed.

        In the first step, this compares the values of all buffers.

        Returns:
            The names of buffers and states that have changed for the first time.
        """
        changed_states = self.states.learn()
        if self._has_learned:
            if not self._constant:
                return changed_states
            return self._learn_newly_mutable() + changed_states
        changed: list[_Place] = []
        constant: list[_Place] = []
        for place, before, copy in zip(self._mutable, self._before, self._copies, strict=True):
            is_same = place.now() is before and (before is None or _equal(before, copy))
            if is_same and not place.is_statistic:
                constant.append(place)
            else:
                changed.append(place)
        self._mutable = changed
        self._constant = constant
        self._has_learned = True
        self._before = []
        self._copies = []
        self._are_plain = None
        self._versions = []
        return [place.name for place in changed] + changed_states

    def _learn_newly_mutable(self) -> list[str]:
        """Treat constant buffers that have changed as mutable, and return their names."""
        newly_mutable = self._changed_constants()
        if newly_mutable:
            self._constant = [place for place in self._constant if place not in newly_mutable]
            self._mutable = self._mutable + newly_mutable
            self._note_versions()
        return [place.name for place in newly_mutable]

    def _changed_constants(self) -> list[_Place]:
        """Return the constant buffers that have changed since the last `capture`."""
        return [
            place
            for place, (buffer, version) in zip(self._constant, self._versions, strict=True)
            if place.now() is not buffer or _version(buffer) != version
        ]

    def _note_versions(self) -> None:
        """Record the tensor and the version counter of each constant buffer."""
        self._versions = [(place.now(), _version(place.now())) for place in self._constant]

    def now(self) -> dict[str, torch.Tensor]:
        """Return the buffers that may change, by name."""
        return {
            place.name: buffer for place in self._mutable if (buffer := place.now()) is not None
        }

    def constant(self) -> dict[str, torch.Tensor]:
        """Return the buffers that no step has changed so far, by name."""
        return {
            place.name: buffer for place in self._constant if (buffer := place.now()) is not None
        }

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved values into the buffers with the same names."""
        for name, buffer in (self.now() | self.constant()).items():
            if name in saved:
                buffer.data.copy_(saved[name])

    def mutable_outside_norms(self) -> list[str]:
        """Return the names of the mutable buffers, except the statistics of norm layers."""
        return [
            place.name for place in self._mutable if self._has_learned and not place.is_statistic
        ]

    def running_statistics(self) -> list[tuple[str, torch.Tensor]]:
        """Return the running statistics of norm layers, as pairs of name and buffer.

        These must always be finite. Other buffers, such as masks and running minimums, may
        intentionally be infinite.
        """
        norms = [place for place in self._mutable if place.is_statistic]
        return [(place.name, buffer) for place in norms if (buffer := place.now()) is not None]


def _select_together(pairs: list[tuple[torch.Tensor, torch.Tensor]], refused: torch.Tensor) -> None:
    """Copy the sources into the targets if a flag on the device is set.

    Args:
        pairs: The targets and sources, all of the same dtype.
        refused: The flag, bool, shape ``()``.
    """
    targets = [target for target, _ in pairs]
    now = torch.cat([target.reshape(-1) for target in targets])
    before = torch.cat([source.reshape(-1) for _, source in pairs])
    selected = torch.where(refused, before, now)
    pieces = torch.split(selected, [target.numel() for target in targets])
    values = [piece.view(target.shape) for piece, target in zip(pieces, targets, strict=True)]
    torch._foreach_copy_(targets, values)


def _layout_of(buffer: torch.Tensor | None) -> tuple[object, ...] | None:
    """Return the properties that must be equal for one tensor to be copied into another."""
    if buffer is None or has_no_values(buffer):
        return None
    return (buffer.shape, buffer.dtype, buffer.layout, buffer.device)


def _version(buffer: torch.Tensor | None) -> int:
    """Return the version counter of a buffer, or -1 if the buffer has none."""
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _copy(targets: list[torch.Tensor | None], sources: list[torch.Tensor | None]) -> None:
    """Copy values without changing version counters, so that autograd graphs remain valid."""
    plain_pairs = []
    for target, source in zip(targets, sources, strict=True):
        if target is None or source is None:
            continue
        if is_plain(target):
            plain_pairs.append((target.data, source.data))
        elif not has_no_values(target):
            copy_bits(target, source)
    # The tensors are grouped by dtype, because a GPU would launch one kernel for each tensor if
    # dtypes were mixed.
    for dtype in {target.dtype for target, _ in plain_pairs}:
        pairs = [pair for pair in plain_pairs if pair[0].dtype is dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _once(
    tensors: list[torch.Tensor | None], like: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Apply `once` to each tensor, so that no element of an expanded buffer is written twice."""
    return [
        tensor if tensor is None or buffer is None else once(tensor, buffer)
        for tensor, buffer in zip(tensors, like, strict=True)
    ]


def _uninitialized_like(buffer: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor that a buffer can be copied into."""
    if has_no_values(buffer):
        return buffer
    if is_plain(buffer):
        return torch.empty_like(buffer)
    # A new sparse tensor would have no entries.
    return buffer.detach().clone()


def _equal(now: torch.Tensor, copy: torch.Tensor | None) -> bool:
    assert copy is not None
    return same_bits(now, copy)
