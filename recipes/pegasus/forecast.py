"""Will fine-tuning Pegasus-large fit, and how: a forecast, without a GPU and without its weights.

    holdfast plan recipes/pegasus/forecast.py:build --device "RTX 4090" --global-batch-size 64

Does not: train; the model is built from a config of the published sizes.
"""

from __future__ import annotations

from typing import Any

import torch

# google/pegasus-large, config.json: 568 million parameters
LARGE = {
    "d_model": 1024,
    "encoder_layers": 16,
    "decoder_layers": 16,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
}
LARGE_VOCABULARY = 96103
# The authors' fine-tuning on arXiv, PubMed and BillSum cuts documents at 1024 and summaries at 256
# tokens (google-research/pegasus, pegasus/params/public_params.py).
DOCUMENT_TOKENS = 1024
TOKENS_PER_SUMMARY_TOKEN = 4


def build(micro_batch_size: int = 2, length: int = DOCUMENT_TOKENS) -> dict[str, Any]:
    """Return model, optimizer, loss function and a sample batch.

    Args:
        micro_batch_size: Documents in the sample batch.
        length: Tokens of each document; its summary has a quarter of them.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        from transformers import PegasusConfig, PegasusForConditionalGeneration
    except ImportError as error:
        raise ImportError(
            "transformers, which has the code of Pegasus, is not installed: pip install"
            " 'transformers>=5'"
        ) from error
    config = PegasusConfig(
        **LARGE,
        vocab_size=LARGE_VOCABULARY,
        max_position_embeddings=1024,
        scale_embedding=True,
        use_cache=False,
    )
    model = PegasusForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)

    def loss_fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    documents = torch.randint(3, config.vocab_size, (micro_batch_size, length))
    summaries = torch.randint(
        3, config.vocab_size, (micro_batch_size, max(2, length // TOKENS_PER_SUMMARY_TOKEN))
    )
    batch = {
        "input_ids": documents,
        "attention_mask": torch.ones_like(documents),
        "labels": summaries,
    }
    return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch": batch}
