"""A language model of two thousand weights and its Trainer, for the tests of this folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

WORDS, LENGTH = 24, 8


def samples(count: int = 24, *, ragged: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return sequences, most of whose labels count, as a dataset of the Trainer's."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        labels = tokens.clone()
        if ragged:
            labels[3 + number % 5 :] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def make_gpt2(*, dropout: float = 0.1) -> Any:
    """Return a decoder that uses ``num_items_in_batch``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **special))


def make_pegasus() -> Any:
    """Return an encoder and decoder without dropout, which takes ``num_items_in_batch`` and
    ignores it.
    """
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    torch.manual_seed(0)
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    sizes |= {
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "max_position_embeddings": LENGTH,
        "d_model": 8,
    }
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    return PegasusForConditionalGeneration(
        PegasusConfig(vocab_size=WORDS, **sizes, **rates, **special)
    )


def make_trainer(
    kind: type,
    folder: Path,
    model: Any,
    data: Sequence[Mapping[str, torch.Tensor]],
    **settings: Any,
) -> Any:
    """Return a Trainer of 6 steps in samples' own order.

    ``holdfast_*``, callbacks and collator go to it.
    """
    from transformers import TrainingArguments

    own_names = ("holdfast_", "callbacks", "eval_d", "data_c")
    own = {name: settings.pop(name) for name in list(settings) if name.startswith(own_names)}
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "weight_decay": 0.1,
    }
    arguments = TrainingArguments(output_dir=str(folder), **(usual | settings))
    return kind(model, arguments, train_dataset=data, **own)


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all weights."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(
            name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def distance(first: torch.nn.Module, second: torch.nn.Module) -> float:
    """Return how far apart the weights of two models are, relative to their size."""
    a = torch.cat([p.detach().double().flatten() for p in first.parameters()])
    b = torch.cat([p.detach().double().flatten() for p in second.parameters()])
    return float((a - b).norm() / a.norm())


def logged(trainer: Any, key: str) -> list[float]:
    """Return what was logged under a key in training steps."""
    return [entry[key] for entry in trainer.state.log_history if "loss" in entry and key in entry]
