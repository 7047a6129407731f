"""Tacotron 2: a text is encoded, decoded into a mel spectrogram frame by frame, and refined.

Not here: the decoder (``decoder``), the losses (``losses``), free running (``synthesis``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from recipes.tacotron2.decoder import Decoder
from recipes.tacotron2.sizes import Sizes


class Spoken(NamedTuple):
    """What the model makes of a text.

    Shapes ``(batch, frames, n_mels)`` for the frames before and after the post-net, ``(batch,
    steps)`` for the logits of stopping, ``(batch, steps, symbols)`` for the attention.
    """

    coarse: Tensor
    mel: Tensor
    stop: Tensor
    attention: Tensor


def padding_of(lengths: Tensor, size: int) -> Tensor:
    """Return where a padded batch is padding, shape ``(batch, size)``."""
    return torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)


class ConvolutionBlock(nn.Module):
    """A convolution over time, batch normalisation, an activation, dropout.

    Padding goes in as zeros.

    Args:
        width_in: Channels.
        width_out: Channels.
        sizes: Of the model.
        activation: ``"relu"``, ``"tanh"`` or ``"linear"``.
    """

    def __init__(self, width_in: int, width_out: int, sizes: Sizes, activation: str) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width_in, width_out, sizes.kernel, padding=sizes.kernel // 2)
        self.norm = nn.BatchNorm1d(width_out)
        self._activation, self._rate = activation, sizes.dropout
        nn.init.xavier_uniform_(self.convolution.weight, nn.init.calculate_gain(activation))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return shape ``(batch, width_out, time)``; `padding` has shape ``(batch, time)``."""
        x = self.norm(self.convolution(x.masked_fill(padding.unsqueeze(1), 0.0)))
        x = (
            x
            if self._activation == "linear"
            else x.relu()
            if self._activation == "relu"
            else x.tanh()
        )
        return F.dropout(x, self._rate, self.training)


class Encoder(nn.Module):
    """Symbols, three convolutions, and a recurrent layer in both directions.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.symbols, sizes.embedding)
        self.blocks = nn.ModuleList(
            ConvolutionBlock(sizes.embedding, sizes.embedding, sizes, "relu")
            for _ in range(sizes.encoder_layers)
        )
        self.lstm = nn.LSTM(
            sizes.embedding, sizes.embedding // 2, batch_first=True, bidirectional=True
        )
        nn.init.xavier_uniform_(self.embedding.weight)

    def forward(self, text: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
        """Return shape ``(batch, symbols, embedding)``, 0 on padding."""
        x = self.embedding(text).transpose(1, 2)
        for block in self.blocks:
            x = block(x, padding)
        packed = pack_padded_sequence(
            x.transpose(1, 2), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=text.shape[1]
        )[0]


class PostNet(nn.Module):
    """Five convolutions that see frames on both sides; what they return is added to the frames.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        widths = [sizes.n_mels, *[sizes.postnet] * (sizes.postnet_layers - 1), sizes.n_mels]
        kinds = ["tanh"] * (sizes.postnet_layers - 1) + ["linear"]
        self.blocks = nn.ModuleList(
            ConvolutionBlock(widths[place], widths[place + 1], sizes, kind)
            for place, kind in enumerate(kinds)
        )

    def forward(self, mel: Tensor, padding: Tensor) -> Tensor:
        """Return shape ``(batch, frames, n_mels)``."""
        x = mel.transpose(1, 2)
        for block in self.blocks:
            x = block(x, padding)
        return x.transpose(1, 2)


class Tacotron2(nn.Module):
    """The whole model.

    Args:
        sizes: Its widths and rates.
        segment_steps: Decoder steps of a segment; see `Decoder.forward`.
        truncate: Whether gradients stop at the ends of segments.
    """

    def __init__(self, sizes: Sizes, *, segment_steps: int = 0, truncate: bool = False) -> None:
        super().__init__()
        self.encoder = Encoder(sizes)
        self.decoder = Decoder(sizes)
        self.postnet = PostNet(sizes)
        self.segment_steps, self.truncate = segment_steps, truncate

    def forward(
        self, text: Tensor, text_lengths: Tensor, mel: Tensor, mel_lengths: Tensor
    ) -> Spoken:
        """Return what is said with the true frames given.

        Args:
            text: Symbols, shape ``(batch, symbols)``.
            text_lengths: Shape ``(batch,)``.
            mel: True frames, shape ``(batch, frames, n_mels)``.
            mel_lengths: Shape ``(batch,)``.
        """
        unwritten, unsaid = (
            padding_of(text_lengths, text.shape[1]),
            padding_of(mel_lengths, mel.shape[1]),
        )
        read = self.decoder.read(self.encoder(text, text_lengths, unwritten), unwritten)
        coarse, stop, attention = self.decoder(
            read, mel, segment_steps=self.segment_steps, truncate=self.truncate
        )
        return Spoken(coarse, coarse + self.postnet(coarse, unsaid), stop, attention)

    def start_at(self, mean: Tensor) -> None:
        """Let frames begin at the mean of the data, shape ``(n_mels,)``, so that no step is lost
        in finding it.
        """
        with torch.no_grad():
            self.decoder.projection.bias.copy_(mean.repeat(self.decoder.frames_per_step))
