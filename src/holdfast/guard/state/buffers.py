"""Keep the buffers that a forward pass changes, so that an attempt can be taken back.

Which ones change is learned from the first step, by value, since BatchNorm changes its statistics
unseen by autograd. From then on only those are copied, into memory that is allocated once; the
others are watched through their version counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from holdfast.checkpoint.expanded import once
from holdfast.checkpoint.kinds import copy_bits, has_no_values, is_plain, same_bits
from holdfast.guard.state.states import StateKeeper


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a buffer hangs; the tensor there may be another one after a forward pass."""

    module: nn.Module
    key: str
    name: str

    def now(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.key)

    @property
    def is_statistic(self) -> bool:
        return isinstance(self.module, _NormBase)


class BufferKeeper:
    """Copies of mutable buffers, and of registered states, at the beginning of a step."""

    def __init__(self, models: dict[str, nn.Module], states: StateKeeper | None = None) -> None:
        self.states = StateKeeper({}) if states is None else states
        self._mutable = [  # until the first step has shown which ones change: all
            _Place(module, key, ".".join(part for part in (model_name, prefix, key) if part))
            for model_name, model in models.items()
            for prefix, module in model.named_modules()
            for key in module._buffers
        ]
        self._constant: list[_Place] = []
        self._known = False
        self._before: list[torch.Tensor | None] = []
        self._copies: list[torch.Tensor | None] = []
        self._versions: list[tuple[torch.Tensor | None, int]] = []

    def keep(self, earlier: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """Copy the buffers that may change, and note the state of the others.

        Args:
            earlier: `copies` of an earlier process, which stand for what the buffers of these names
                hold now.

        Cost: one fused copy of the mutable buffers; no sync.
        """
        self.states.keep()
        if not self._mutable and not self._constant:
            return
        now = [place.now() for place in self._mutable]
        self._note_versions()
        same = len(now) == len(self._before) and all(
            buffer is before and (buffer is copy or buffer.shape == copy.shape)  # type: ignore[union-attr]
            for buffer, before, copy in zip(now, self._before, self._copies, strict=True)
        )
        if not same and [_kind(buffer) for buffer in now] != [_kind(copy) for copy in self._copies]:
            self._copies = [None if buffer is None else _room_for(buffer) for buffer in now]
        self._before = now
        _copy(self._copies, self._before)
        if earlier:
            _copy(self._copies, [earlier.get(place.name) for place in self._mutable])

    def copies(self) -> dict[str, torch.Tensor]:
        """Return what the buffers that may change were at `keep`, by name."""
        named = zip(self._mutable, self._copies, strict=True)
        return {place.name: copy for place, copy in named if copy is not None}

    def put_back(self) -> list[str]:
        """Restore every buffer to what it was at `keep`: the same tensor object, the same values.

        And all states.

        Return the names of buffers that changed for the first time just now, of which there was no
        copy, and of states that could not be restored.
        """
        for place, buffer in zip(self._mutable, self._before, strict=True):
            place.module._buffers[place.key] = buffer
        _copy(_once(self._before, self._before), _once(self._copies, self._before))
        late = self._learn_late()
        for place in self._mutable[len(self._before) :]:
            now = place.now()
            self._before.append(now)
            is_copied = now is not None and not has_no_values(now)
            self._copies.append(now.detach().clone() if is_copied else now)  # type: ignore[union-attr]
        return late + self.states.put_back()

    def learn(self) -> list[str]:
        """After an attempt that will be committed, note which buffers change.

        Return the names of those that are new.

        Cost: in the first step, a look at the values of all buffers.
        """
        late = self.states.learn()
        if self._known:
            return self._learn_late() + late if self._constant else late
        changed: list[_Place] = []
        constant: list[_Place] = []
        for place, before, copy in zip(self._mutable, self._before, self._copies, strict=True):
            same = place.now() is before and (before is None or _equal(before, copy))
            (constant if same and not place.is_statistic else changed).append(place)
        self._mutable, self._constant, self._known = changed, constant, True
        self._before, self._copies, self._versions = [], [], []
        return [place.name for place in changed] + late

    def _learn_late(self) -> list[str]:
        late = [
            place
            for place, (buffer, version) in zip(self._constant, self._versions, strict=True)
            if place.now() is not buffer or _version(buffer) != version
        ]
        if late:
            self._constant = [place for place in self._constant if place not in late]
            self._mutable = self._mutable + late
            self._note_versions()
        return [place.name for place in late]

    def _note_versions(self) -> None:
        self._versions = [(place.now(), _version(place.now())) for place in self._constant]

    def now(self) -> dict[str, torch.Tensor]:
        """Return the buffers that may change, by name, as they are."""
        return {
            place.name: buffer for place in self._mutable if (buffer := place.now()) is not None
        }

    def constant(self) -> dict[str, torch.Tensor]:
        """Return the buffers that no step has changed so far, by name."""
        return {
            place.name: buffer for place in self._constant if (buffer := place.now()) is not None
        }

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put values into the buffers of these names."""
        for name, buffer in (self.now() | self.constant()).items():
            if name in saved:
                buffer.data.copy_(saved[name])

    def mutable_outside_norms(self) -> list[str]:
        """Return the names of the buffers known to change that are no running statistics of a
        norm layer.
        """
        return [place.name for place in self._mutable if self._known and not place.is_statistic]

    def running_statistics(self) -> list[tuple[str, torch.Tensor]]:
        """Return the statistics of norm layers by name.

        Other buffers may be infinite on purpose: masks, minima.
        """
        norms = [place for place in self._mutable if place.is_statistic]
        return [(place.name, buffer) for place in norms if (buffer := place.now()) is not None]


def _kind(buffer: torch.Tensor | None) -> tuple[object, ...] | None:
    if buffer is None or has_no_values(buffer):
        return None
    return (buffer.shape, buffer.dtype, buffer.layout, buffer.device)


def _version(buffer: torch.Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _copy(targets: list[torch.Tensor | None], sources: list[torch.Tensor | None]) -> None:
    """Copy values unseen by autograd, as BatchNorm does, so that a saved graph stays valid."""
    both = [
        (t, s) for t, s in zip(targets, sources, strict=True) if t is not None and s is not None
    ]
    rare = [pair for pair in both if not is_plain(pair[0])]
    for target, source in rare:
        if not has_no_values(target):
            copy_bits(target, source)
    both = [pair for pair in both if is_plain(pair[0])] if rare else both
    pairs = [(target.data, source.data) for target, source in both]
    # Of several at once a GPU copies each tensor by itself
    for kind in {target.dtype for target, _ in pairs}:
        alike = [pair for pair in pairs if pair[0].dtype is kind]
        torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])


def _once(
    tensors: list[torch.Tensor | None], like: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    return [
        t if t is None or live is None else once(t, live)
        for t, live in zip(tensors, like, strict=True)
    ]


def _room_for(buffer: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind to copy a buffer into."""
    if has_no_values(buffer):
        return buffer
    # Of a sparse one with the same entries: a new one would have none.
    return torch.empty_like(buffer) if is_plain(buffer) else buffer.detach().clone()


def _equal(now: torch.Tensor, copy: torch.Tensor | None) -> bool:
    assert copy is not None
    return same_bits(now, copy)
