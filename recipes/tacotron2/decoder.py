"""The decoder: location-sensitive attention (Chorowski et al., arXiv 1506.07503) between two
recurrent cells.

Not here: encoder and post-net (``model``), free running (``synthesis``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from recipes.tacotron2.sizes import Sizes


class DecoderState(NamedTuple):
    """What one decoder step hands to the next; the first dimension of each is the batch.

    It lives within one batch: `Recurrence.begin` makes a new one, and nothing keeps it.
    """

    query: Tensor
    query_cell: Tensor
    hidden: Tensor
    hidden_cell: Tensor
    context: Tensor
    weights: Tensor
    weights_so_far: Tensor

    def detached(self) -> DecoderState:
        """Return the same numbers without their past: no gradient flows back beyond this point."""
        return DecoderState(*(each.detach() for each in self))


class Read(NamedTuple):
    """What the attention reads: the encoder's outputs, their keys, and where they are padding."""

    memory: Tensor
    keys: Tensor
    padding: Tensor


class PreNet(nn.Module):
    """Two layers between the last frame and the decoder, whose dropout is never off, not in
    synthesis either.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Linear(sizes.n_mels, sizes.prenet, bias=False),
                nn.Linear(sizes.prenet, sizes.prenet, bias=False),
            ]
        )
        self._rate = sizes.prenet_dropout
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, frames: Tensor) -> Tensor:
        """Return shape ``(..., prenet)`` of ``(..., n_mels)``."""
        for layer in self.layers:
            frames = F.dropout(layer(frames).relu(), self._rate, training=True)
        return frames


class Attention(nn.Module):
    """Weights over the text from what is asked for and from where the attention was, now and in all
    steps before.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.query = nn.Linear(sizes.attention_rnn, sizes.attention, bias=False)
        self.keys = nn.Linear(sizes.embedding, sizes.attention, bias=False)
        self.location_filters = nn.Conv1d(
            2,
            sizes.location_filters,
            sizes.location_kernel,
            padding=sizes.location_kernel // 2,
            bias=False,
        )
        self.location = nn.Linear(sizes.location_filters, sizes.attention, bias=False)
        self.energy = nn.Linear(sizes.attention, 1, bias=False)
        for layer in (self.query, self.keys, self.location):
            nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain("tanh"))
        nn.init.xavier_uniform_(self.location_filters.weight)
        nn.init.xavier_uniform_(self.energy.weight)

    def forward(self, query: Tensor, read: Read, weights: Tensor, weights_so_far: Tensor) -> Tensor:
        """Return weights, shape ``(batch, symbols)``, 0 on padding."""
        where = self.location_filters(torch.stack((weights, weights_so_far), dim=1)).transpose(1, 2)
        energies = self.energy(
            torch.tanh(self.query(query).unsqueeze(1) + read.keys + self.location(where))
        )
        return energies.squeeze(2).masked_fill(read.padding, -torch.inf).softmax(dim=1)


class Recurrence(nn.Module):
    """Steps of the decoder, one after another: the part whose activations fill the memory.

    It is called once for each segment of an utterance, so that with ``recompute:
    [decoder.recurrence]`` in the policy the activations of one segment at a time are held.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_rnn = nn.LSTMCell(sizes.prenet + sizes.embedding, sizes.attention_rnn)
        self.attention = Attention(sizes)
        self.decoder_rnn = nn.LSTMCell(sizes.attention_rnn + sizes.embedding, sizes.decoder_rnn)
        self._zoneout, self._dropout = sizes.zoneout, sizes.recurrent_dropout

    def begin(self, memory: Tensor) -> DecoderState:
        """Return the state before the first step: nothing was said, and nothing was read."""
        batch, symbols, width = memory.shape
        queries, hidden = self.attention_rnn.hidden_size, self.decoder_rnn.hidden_size
        widths = (queries, queries, hidden, hidden, width, symbols, symbols)
        return DecoderState(*(memory.new_zeros(batch, each) for each in widths))

    def forward(
        self, frames: Tensor, state: DecoderState, read: Read
    ) -> tuple[Tensor, Tensor, DecoderState]:
        """Make as many steps as there are frames.

        Args:
            frames: From the pre-net, shape ``(steps, batch, prenet)``.
            state: Before the first of these steps.
            read: What is attended to.

        Returns:
            What frames are made of, shape ``(steps, batch, decoder_rnn + embedding)``; the
            attention, shape ``(steps, batch, symbols)``; the state after the last step.
        """
        query, query_cell, hidden, hidden_cell, context, weights, so_far = state
        outputs, attentions = [], []
        for frame in frames:
            asked = self.attention_rnn(torch.cat((frame, context), dim=1), (query, query_cell))
            query, query_cell = self._regularised(asked, (query, query_cell))
            weights = self.attention(query, read, weights, so_far)
            so_far = so_far + weights
            context = torch.bmm(weights.unsqueeze(1), read.memory).squeeze(1)
            said = self.decoder_rnn(torch.cat((query, context), dim=1), (hidden, hidden_cell))
            hidden, hidden_cell = self._regularised(said, (hidden, hidden_cell))
            outputs.append(torch.cat((hidden, context), dim=1))
            attentions.append(weights)
        after = DecoderState(query, query_cell, hidden, hidden_cell, context, weights, so_far)
        return torch.stack(outputs), torch.stack(attentions), after

    def _regularised(
        self, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return hidden and cell state, some units of which stay as they were (zoneout) or are
        dropped (dropout).
        """
        if self._zoneout:
            hidden, cell = (
                self._zoned(made, before) for made, before in zip(new, old, strict=True)
            )
        else:
            hidden, cell = new
        return F.dropout(hidden, self._dropout, self.training) if self._dropout else hidden, cell

    def _zoned(self, new: Tensor, old: Tensor) -> Tensor:
        if not self.training:
            return torch.lerp(new, old, self._zoneout)
        return torch.where(torch.rand_like(new) < self._zoneout, old, new)


class Decoder(nn.Module):
    """Frames from an encoded text; given the true frame before each (teacher forcing).

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.prenet = PreNet(sizes)
        self.recurrence = Recurrence(sizes)
        width = sizes.decoder_rnn + sizes.embedding
        self.projection = nn.Linear(width, sizes.n_mels * sizes.frames_per_step)
        self.gate = nn.Linear(width, 1)
        self.frames_per_step, self.n_mels = sizes.frames_per_step, sizes.n_mels
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.xavier_uniform_(self.gate.weight)

    def read(self, memory: Tensor, padding: Tensor) -> Read:
        """Return what the attention reads of an encoded text, shapes ``(batch, symbols, …)``."""
        return Read(memory, self.recurrence.attention.keys(memory), padding)

    def forward(
        self, read: Read, mel: Tensor, *, segment_steps: int, truncate: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return frames, stop logits and attention.

        Args:
            read: From `read`.
            mel: True frames, shape ``(batch, frames, n_mels)``, as many as steps have, or a
                multiple.
            segment_steps: Steps of a segment; 0: one segment. Alone it changes no result.
            truncate: Whether the state is detached between segments: truncated backpropagation
                through time.

        Returns:
            Shapes ``(batch, frames, n_mels)``, ``(batch, steps)`` and ``(batch, steps, symbols)``.
        """
        # The last frame of each step
        said = mel[:, self.frames_per_step - 1 :: self.frames_per_step]
        before = torch.cat((torch.zeros_like(said[:, :1]), said[:, :-1]), dim=1).transpose(0, 1)
        state, outputs, attentions = self.recurrence.begin(read.memory), [], []
        for segment in self.prenet(before).split(segment_steps or len(before)):
            made, attention, state = self.recurrence(segment, state, read)
            outputs.append(made)
            attentions.append(attention)
            state = state.detached() if truncate else state
        frames, stop = self.frames_of(torch.cat(outputs).transpose(0, 1))
        return frames, stop, torch.cat(attentions).transpose(0, 1)

    def frames_of(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """Return frames and stop logits of what the recurrence has made, shape ``(batch, steps,
        …)``.
        """
        frames = self.projection(made)
        return frames.reshape(len(made), -1, self.n_mels), self.gate(made).squeeze(2)
