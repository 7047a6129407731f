"""How well the model reads what it was not trained on.

With the true frames given, and running free.

Not here: the loop (``train``), the losses (``losses``), what numbers an alignment has
(``holdfast.numerics``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import Event, Guard
from holdfast.learning.alignment import report_alignment
from recipes.tacotron2.audio import MelSettings, griffin_lim, mel_filters
from recipes.tacotron2.losses import Weights, losses_of, steps_of
from recipes.tacotron2.model import Tacotron2
from recipes.tacotron2.synthesis import MemoryUse, Synthesis, batch_of, synthesise
from recipes.wav import write_wav

_COLOURS = (
    np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]) / 255
)  # dark to light
_DIAGONAL = 0.8  # well above the 0.42 of an attention that is everywhere
_SIDE = 400  # pixels that a small picture is enlarged to at least


def picture(values: Tensor, *, lowest: float, highest: float) -> NDArray[np.float64]:
    """Return a matrix as colours: its first dimension to the right, its second upwards.

    Args:
        values: Shape ``(steps, symbols)`` or ``(frames, bands)``.
        lowest: Value of the darkest colour.
        highest: Value of the lightest one.

    Returns:
        Shape ``(height, width, 3)``, from 0 to 1.
    """
    turned = values.detach().float().cpu().numpy().T[::-1]
    shares = ((turned - lowest) / (highest - lowest)).clip(0, 1)
    times = max(1, _SIDE // max(shares.shape))
    places = np.linspace(0, 1, len(_COLOURS))
    colours = np.stack(
        [np.interp(shares, places, _COLOURS[:, channel]) for channel in range(3)], axis=-1
    )
    return colours.repeat(times, axis=0).repeat(times, axis=1)


class Evaluation:
    """What is measured on utterances that are held out.

    Args:
        guard: Of the run.
        model: To evaluate.
        batch: The held-out utterances, padded, on the model's device.
        weights: Of the losses.
    """

    def __init__(
        self, guard: Guard, model: Tacotron2, batch: Mapping[str, Tensor], weights: Weights
    ) -> None:
        self.guard, self.model, self.batch, self._weights = guard, model, batch, weights
        self._steps = steps_of(batch["mel_lengths"], model.decoder.frames_per_step)

    def listen(self) -> None:
        """Tell the guard loss and alignment with the true frames given, and draw the first
        utterance.
        """
        guard, batch = self.guard, self.batch
        with guard.evaluate():
            spoken = self.model(**batch)
            losses = losses_of(spoken, batch, self._weights)
        guard.validated(losses["mel"].mean)
        aligned = report_alignment(guard, spoken.attention, batch["text_lengths"], self._steps)
        guard.log(mel_loss=losses["mel"].mean, diagonality=aligned["diagonality"], split="held out")
        frames, steps, symbols = (
            int(batch["mel_lengths"][0]),
            int(self._steps[0]),
            int(batch["text_lengths"][0]),
        )
        guard.add_image(
            "alignment", picture(spoken.attention[0, :steps, :symbols], lowest=0, highest=1)
        )
        # The true one below
        both = torch.cat((batch["mel"][0, :frames], spoken.mel[0, :frames]), dim=1)
        guard.add_image("mel", picture(both, lowest=-11.5, highest=1.0))

    def run_free(
        self, sentence: str, max_steps: int, run_dir: Path, settings: MelSettings
    ) -> dict[str, Any]:
        """Say held-out texts and a sentence without help, and write two WAV files.

        Args:
            sentence: To say.
            max_steps: Decoder steps after which an utterance is ended.
            run_dir: Where ``samples/`` is written.
            settings: Of the spectrograms.

        Returns:
            Figures: how many ended by the gate, how they are aligned, and what the memory did.
        """
        device = self.batch["text"].device
        mel_filters(settings)  # are kept by whoever is the first to need them
        memory = MemoryUse(device)
        with self.guard.evaluate():
            found = self._measured(max_steps, memory)
            said = synthesise(
                self.model, *batch_of([sentence], device), max_steps=max_steps, memory=memory
            )
            frames = int(said.steps[0]) * self.model.decoder.frames_per_step
            write_wav(
                run_dir / "samples" / "sentence.wav", griffin_lim(said.mel[0, :frames], settings)
            )
            self.guard.add_image("free-running", picture(said.attention[0], lowest=0, highest=1))
        true = self.batch["mel"][0, : int(self.batch["mel_lengths"][0])]
        write_wav(
            run_dir / "samples" / "griffin_lim_of_a_true_spectrogram.wav",
            griffin_lim(true, settings),
        )
        del said, true
        memory.ended()
        return {**found, "free_running_limit_steps": max_steps, **memory.figures()}

    def _measured(self, max_steps: int, memory: MemoryUse) -> dict[str, float]:
        text, lengths = self.batch["text"], self.batch["text_lengths"]
        said: Synthesis = synthesise(self.model, text, lengths, max_steps=max_steps, memory=memory)
        facts = report_alignment(
            self.guard, said.attention, lengths, said.steps, max_decoder_steps=max_steps
        )
        self.guard.log(diagonality=facts["diagonality"], split="running free")
        ratio = (said.steps / self._steps).median()
        return {
            "free_running_diagonality": facts["diagonality"],
            "free_running_ended_by_gate": float(said.by_gate.float().mean()),
            "free_running_length_over_true": float(ratio),
        }


def evaluations(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return ``step``, ``mel_loss`` and the alignment of each evaluation with the true frames
    given, oldest first.
    """
    found, loss = [], None
    for event in events:
        if event.kind == "validated":
            loss = event.data["loss"]
        # One that follows without a loss ran free
        elif event.kind == "aligned" and loss is not None:
            found.append({"step": event.global_step, "mel_loss": loss, **event.data})
            loss = None
    return found


def figures_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return how loss and alignment with the true frames given began and ended, of what the run has
    recorded.

    ``diagonal_after_steps`` is the first evaluation with a diagonality of 0.8 or more; None if
    there is none.
    """
    found = evaluations(events)
    if not found:
        return {}
    first, last = found[0], found[-1]
    return {
        "mel_loss_before": first["mel_loss"],
        "mel_loss": last["mel_loss"],
        "diagonality_before": first["diagonality"],
        "diagonality": last["diagonality"],
        "diagonal_after_steps": next(
            (each["step"] for each in found if each["diagonality"] >= _DIAGONAL), None
        ),
        "sharpness": last["sharpness"],
        "monotonic_share": last["monotonic_share"],
    }
