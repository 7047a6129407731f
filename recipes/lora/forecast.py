"""Will fine-tuning by adapters fit, and how.

``holdfast plan recipes/lora/forecast.py:build --device T4``.

Does not: train; the model is built from a config of published sizes, without its weights.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.gpt.model import next_token_loss
from recipes.lora.adapters import adapt

# meta-llama/Llama-3.2-1B, config.json: 1.24 billion parameters
SIZES = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


def build(micro_batch_size: int = 4, context: int = 512, rank: int = 8) -> dict[str, Any]:
    """Return model, optimizer, loss function and a sample batch.

    By default of the sizes of Llama 3.2 1B.

    Args:
        micro_batch_size: Windows in the sample batch.
        context: Tokens of a window.
        rank: Of the adapters, which are beside the queries and the values.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ImportError("transformers, which has the code of Llama, is not installed") from error
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=context)).train()
    adapt(model, ("q_proj", "v_proj"), rank=rank, alpha=2.0 * rank, dropout=0.0)
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=2e-4
    )
    tokens = torch.randint(0, SIZES["vocab_size"], (micro_batch_size, context))
    return {
        "model": model,
        "optimizer": optimizer,
        "loss_fn": lambda batch: next_token_loss(
            model(input_ids=batch[0], use_cache=False).logits, batch[1]
        ),
        "batch": (tokens, tokens),
    }
