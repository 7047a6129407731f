"""How large a Tacotron 2 is: as in the paper, small enough for two cores, and tiny for tests."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.tacotron2.text import SYMBOLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Widths and rates of a model; the defaults are the paper's (arXiv 1712.05884, section 2).

    Args:
        symbols: Of the text.
        embedding: Width of a symbol, and of the encoder's output.
        encoder_layers: Convolutions of the encoder.
        kernel: Of the convolutions of encoder and post-net.
        prenet: Width of both layers of the pre-net.
        attention: Width in which query, keys and location meet.
        location_filters: Filters over the attention so far.
        location_kernel: Symbols that such a filter sees.
        attention_rnn: Units of the cell that asks.
        decoder_rnn: Units of the cell that answers.
        postnet: Filters of the post-net.
        postnet_layers: Its convolutions.
        n_mels: Bands of a frame.
        frames_per_step: Frames that one decoder step makes; the paper's is 1 (more: Tacotron, arXiv
            1703.10135).
        dropout: After each convolution.
        prenet_dropout: Of the pre-net, in synthesis too.
        zoneout: Share of recurrent units that keep their state in a step (arXiv 1606.01305).
        recurrent_dropout: Dropout of the cells' output, which public implementations have in place
            of zoneout.
    """

    symbols: int = len(SYMBOLS)
    embedding: int = 512
    encoder_layers: int = 3
    kernel: int = 5
    prenet: int = 256
    attention: int = 128
    location_filters: int = 32
    location_kernel: int = 31
    attention_rnn: int = 1024
    decoder_rnn: int = 1024
    postnet: int = 512
    postnet_layers: int = 5
    n_mels: int = 80
    frames_per_step: int = 1
    dropout: float = 0.5
    prenet_dropout: float = 0.5
    zoneout: float = 0.1
    recurrent_dropout: float = 0.0


PAPER = Sizes()
SMALL = Sizes(
    embedding=128,
    prenet=64,
    attention=64,
    location_filters=16,
    location_kernel=15,
    attention_rnn=192,
    decoder_rnn=192,
    postnet=96,
    frames_per_step=2,
    zoneout=0.05,
)
TINY = Sizes(
    embedding=32,
    prenet=16,
    attention=16,
    location_filters=4,
    location_kernel=7,
    attention_rnn=32,
    decoder_rnn=32,
    postnet=16,
    frames_per_step=4,
)
SIZES = {"paper": PAPER, "small": SMALL, "tiny": TINY}
