"""Pegasus from a config, its optimizer and its loss: the same for both loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast import Loss
from recipes.pegasus.forecast import LARGE
from recipes.pegasus.vocabulary import reload_tokenizer

Size = Literal["small", "large"]
_SIZES: dict[str, dict[str, int]] = {
    "small": {
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 512,
        "decoder_ffn_dim": 512,
    },
    "large": LARGE,
}
_LABEL_IGNORED = -100
# As Vaswani et al. (2017), section 5.3: within few steps 0.999 remembers the first for too long
_BETAS = (0.9, 0.98)
# See `_begin_with`; chosen on other packages than those that are held out
_COPIED, _WRITTEN = 2.0, -1.0
# Standard deviation of the first weights, for layers as wide as those of google/pegasus-large
_PUBLISHED_INIT = 0.02


def build_model(size: Size, tokenizer: Any, *, positions: int, dropout: float) -> Any:
    """Return a model without training.

    Args:
        size: Which config: that of google/pegasus-large, or a small one that learns on two CPU
            cores.
        tokenizer: Its vocabulary decides the size of the embedding.
        positions: Tokens of the longest sequence.
        dropout: Probability.
    """
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    shape = _SIZES[size]
    width = math.sqrt(LARGE["d_model"] / shape["d_model"])
    config = PegasusConfig(
        **shape,
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        dropout=dropout,
        scale_embedding=True,
        init_std=_PUBLISHED_INIT * width,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
    )
    model = PegasusForConditionalGeneration(config)
    for layer in model.model.decoder.layers:
        _begin_with(layer.encoder_attn, _COPIED)
        _begin_with(layer.self_attn, _WRITTEN)
    model.generation_config.no_repeat_ngram_size = 2  # small models repeat themselves
    # As above: Keskar et al. (arXiv 1909.05858) take 1.2
    model.generation_config.repetition_penalty = 1.3
    return model


def _begin_with(attention: Any, share: float) -> None:
    """Set the first weights of an attention so that tokens arrive as themselves, times `share`.

    Values are turned, and the output turns them back. The tied embedding makes of it a preference
    for writing tokens of the document, and for not writing again what is written; training goes on
    from there. After Trockman and Kolter, Mimetic initialization of self-attention layers (arXiv
    2305.09828), who found such products in trained models. With the usual weights so small a model
    begins to read its document only after many more steps.
    """
    with torch.no_grad():
        turn = torch.nn.init.orthogonal_(torch.empty_like(attention.v_proj.weight))
        attention.v_proj.weight.copy_(math.sqrt(abs(share)) * turn)
        attention.out_proj.weight.copy_(math.copysign(math.sqrt(abs(share)), share) * turn.T)


def load_pretrained(folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and model from a folder.

    Raises:
        ValueError: if it holds none, or another kind of model, of which transformers would take
            what happens to fit.
    """
    fix = "Fix: name a folder that save_pretrained wrote, such as a copy of google/pegasus-large."
    if not (folder / "config.json").is_file():
        raise ValueError(f"--pretrained {folder} holds no config.json.\n{fix}")
    try:
        kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (ValueError, TypeError, KeyError):
        kind = None
    if kind != "pegasus":
        raise ValueError(
            f"--pretrained {folder} holds a model of type {kind!r}; 'pegasus' is needed.\n{fix}"
        )
    from transformers import PegasusForConditionalGeneration

    model = PegasusForConditionalGeneration.from_pretrained(folder, local_files_only=True)
    # Transformers 5.17 loads the sinusoids as trainable
    for part in (model.model.encoder, model.model.decoder):
        part.embed_positions.requires_grad_(requires_grad=False)
    return reload_tokenizer(folder), model


def build_optimizer(
    model: Any, *, learning_rate: float, warmup_steps: int, max_steps: int
) -> tuple[Any, Any]:
    """Return AdamW, which lets only matrices decay, and its schedule.

    A warm-up, then linearly to nothing.

    Args:
        model: Of transformers.
        learning_rate: The highest.
        warmup_steps: Steps until it is reached.
        max_steps: Steps until it is nothing.
    """
    from transformers import get_linear_schedule_with_warmup

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": 0.01},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=_BETAS)
    return optimizer, get_linear_schedule_with_warmup(optimizer, warmup_steps, max_steps)


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> Loss:
    """Return the mean over the tokens of the summaries, and how many they are, so that parts of
    a batch add up.
    """
    found = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]
    )
    return Loss(mean=found.loss, items=(batch["labels"] != _LABEL_IGNORED).sum())
