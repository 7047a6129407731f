"""Models of transformers, built from configs: nothing is downloaded.

Sizes are small; the code runs at any size.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch

Parts = dict[str, Any]
# No model is looked up: a config is enough, and a hub that is asked in vain costs seconds.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")


def find_transformers() -> tuple[str | None, str]:
    """Return the version of transformers; or None and why."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        return None, f"left out: {error}"
    return importlib.metadata.version("transformers"), ""


def _language_batch(size: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocabulary, (size, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _job(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Parts:
    model.train()

    def loss_fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch": batch}


def pegasus(micro_batch_size: int = 4, length: int = 128) -> Parts:
    """Summaries; positions are sinusoids, parameters that are frozen."""
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    config = PegasusConfig(
        vocab_size=2000,
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_position_embeddings=512,
    )
    batch = _language_batch(micro_batch_size, length, 2000)
    batch["labels"] = torch.randint(3, 2000, (micro_batch_size, length // 2))
    return _job(PegasusForConditionalGeneration(config), batch)


def _llama(micro_batch_size: int, length: int, attention: str) -> Parts:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        attn_implementation=attention,
        use_cache=False,
    )
    return _job(LlamaForCausalLM(config), _language_batch(micro_batch_size, length, 2000))


def llama_sdpa(micro_batch_size: int = 4, length: int = 256) -> Parts:
    """Grouped-query attention, by torch's kernel."""
    return _llama(micro_batch_size, length, "sdpa")


def llama_eager(micro_batch_size: int = 4, length: int = 256) -> Parts:
    """The same, attention in matrix products."""
    return _llama(micro_batch_size, length, "eager")


def gpt2(micro_batch_size: int = 4, length: int = 128) -> Parts:
    """Learnt positions, tied embeddings, dropout in attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=2000, n_positions=512, n_embd=192, n_layer=4, n_head=4, use_cache=False
    )
    return _job(GPT2LMHeadModel(config), _language_batch(micro_batch_size, length, 2000))


def bert(micro_batch_size: int = 8, length: int = 128) -> Parts:
    """Masked language modelling."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=2000,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768,
    )
    return _job(BertForMaskedLM(config), _language_batch(micro_batch_size, length, 2000))


def t5(micro_batch_size: int = 4, length: int = 128) -> Parts:
    """Relative positions, a float bias in every attention."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=2000,
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _job(T5ForConditionalGeneration(config), _language_batch(micro_batch_size, length, 2000))


def hf_vit(micro_batch_size: int = 16) -> Parts:
    """A vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    batch = {
        "pixel_values": torch.randn(micro_batch_size, 3, 64, 64),
        "labels": torch.randint(10, (micro_batch_size,)),
    }
    return _job(ViTForImageClassification(config), batch)


def whisper(micro_batch_size: int = 4) -> Parts:
    """Speech to text: convolutions, an encoder, a decoder with cross attention."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=2000,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=200,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    batch = {
        "input_features": torch.randn(micro_batch_size, 80, 400),
        "labels": torch.randint(3, 2000, (micro_batch_size, 48)),
    }
    return _job(WhisperForConditionalGeneration(config), batch)


def wav2vec2(micro_batch_size: int = 4) -> Parts:
    """Speech recognition from the wave by CTC.

    No layers are dropped, no time is masked, since both are random.
    """
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        conv_dim=(64,) * 7,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,
        mask_time_prob=0.0,
        ctc_loss_reduction="mean",
    )
    batch = {
        "input_values": torch.randn(micro_batch_size, 8000),
        "labels": torch.randint(1, 32, (micro_batch_size, 8)),
    }
    return _job(Wav2Vec2ForCTC(config), batch)


def llama_7b(micro_batch_size: int = 1, length: int = 2048) -> Parts:
    """A language model of 6.7 billion parameters in bf16, as Llama 2 7B has them.

    12.6 GiB of weights alone.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return _job(model, _language_batch(micro_batch_size, length, 32000))
