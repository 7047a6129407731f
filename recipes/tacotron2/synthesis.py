"""Free-running inference: each step hears the step before it.

It ends by the gate or at a limit, and keeps nothing.

Not here: teacher forcing (``decoder``), the way from a spectrogram to a wave (``audio``).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from recipes.tacotron2.model import Tacotron2, padding_of
from recipes.tacotron2.text import numbers_of

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Synthesis(NamedTuple):
    """What was said without help.

    Args:
        mel: Frames after the post-net, shape ``(batch, frames, n_mels)``.
        steps: Decoder steps of each utterance, shape ``(batch,)``.
        by_gate: Whether it ended by itself, not at the limit; shape ``(batch,)``.
        attention: Shape ``(batch, steps, symbols)``.
    """

    mel: Tensor
    steps: Tensor
    by_gate: Tensor
    attention: Tensor


class MemoryUse:
    """Bytes around an inference: of tensors before and after it, and how far use grew meanwhile.

    Args:
        device: Of the model. On a GPU use is what is allocated there, else what is resident of this
            process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tensors_before = tensor_bytes()
        self.tensors_after = -1
        self.in_use_before = self.peak = self._in_use()

    def look(self) -> None:
        """Take what is in use now into account."""
        self.peak = max(self.peak, self._in_use())

    def ended(self) -> None:
        """Count the tensors that are left; to be called when nothing of the result is held."""
        self.tensors_after = tensor_bytes()

    def figures(self) -> dict[str, int]:
        """Return what is worth reporting, by name."""
        return {
            "inference_tensor_bytes_before": self.tensors_before,
            "inference_tensor_bytes_after": self.tensors_after,
            "inference_peak_bytes": self.peak,
            "inference_growth_bytes": self.peak - self.in_use_before,
        }

    def _in_use(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def tensor_bytes() -> int:
    """Return the bytes of all tensors that python holds; what several share is counted once.

    Subclasses are left out: those that wrap tensors hold plain ones, and fake tensors have no
    memory.
    """
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        plain = type(each) in (Tensor, Parameter) and not each.is_meta
        if plain and each.layout is torch.strided:  # others tell no size
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def batch_of(texts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return symbols and lengths of texts.

    Raises:
        ValueError: A text has no letter in it.
    """
    numbers = [torch.tensor(numbers_of(text)) for text in texts]
    for text, found in zip(texts, numbers, strict=True):
        if not len(found):
            raise ValueError(
                f"there is nothing to say in {text!r}.\nFix: give a text with letters in it."
            )
    padded = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True)
    return padded.to(device), torch.tensor([len(each) for each in numbers], device=device)


@torch.no_grad()
def synthesise(
    model: Tacotron2,
    text: Tensor,
    text_lengths: Tensor,
    *,
    max_steps: int,
    threshold: float = 0.5,
    memory: MemoryUse | None = None,
) -> Synthesis:
    """Say texts.

    The frames are written into memory that is taken before the first step, so a text on which the
    gate never opens costs no more than the limit says.

    Args:
        model: In evaluation mode.
        text: Symbols, shape ``(batch, symbols)``.
        text_lengths: Shape ``(batch,)``.
        max_steps: Decoder steps after which it ends in any case.
        threshold: Probability of the gate from which an utterance ends.
        memory: Where the peak is noted.
    """
    decoder, padding = model.decoder, padding_of(text_lengths, text.shape[1])
    read = decoder.read(model.encoder(text, text_lengths, padding), padding)
    batch, device = len(text), text.device
    per_step = decoder.frames_per_step
    coarse = read.memory.new_zeros(batch, max_steps * per_step, decoder.n_mels)
    attention = read.memory.new_zeros(batch, max_steps, text.shape[1])
    steps = torch.full((batch,), max_steps, device=device)
    by_gate = torch.zeros(batch, dtype=torch.bool, device=device)
    state, frame = decoder.recurrence.begin(read.memory), coarse.new_zeros(batch, decoder.n_mels)
    for step in range(max_steps):
        made, weights, state = decoder.recurrence(decoder.prenet(frame)[None], state, read)
        frames, stop = decoder.frames_of(made.transpose(0, 1))
        coarse[:, step * per_step : (step + 1) * per_step], attention[:, step] = frames, weights[0]
        frame = frames[:, -1]
        ends = ~by_gate & (stop[:, 0].sigmoid() > threshold)
        steps, by_gate = steps.masked_fill(ends, step + 1), by_gate | ends
        if memory is not None:
            memory.look()
        if bool(by_gate.all()):
            break
    longest = int(steps.max())
    coarse, attention = coarse[:, : longest * per_step], attention[:, :longest]
    mel = coarse + model.postnet(coarse, padding_of(steps * per_step, coarse.shape[1]))
    return Synthesis(mel, steps, by_gate, attention)
