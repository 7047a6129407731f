"""The training step of a Hugging Face model, built from its ``config.json`` without weights.

``holdfast plan config.json`` forecasts the step that `build` returns. The arguments of `build` can
be set and varied on the command line::

    holdfast plan config.json --set task=causal-lm --set lora_r=16 --vary seq_len

Nothing is downloaded: the architecture must be one of those in the installed transformers package.
This module does not train anything; `integrations.transformers` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.integrations.refusals import load

# The name of transformers' auto class for each task.
_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "generate": "AutoModelForCausalLM",
}
# Generates text with a language model, and trains nothing.
_GENERATE = "generate"
# peft's name of each task (peft.TaskType). It has none for masked language models.
_PEFT_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(  # noqa: PLR0913 - each argument can be set on the command line
    config: str,
    task: str = "causal-lm",
    seq_len: int = 1024,
    lora_r: int = 0,
    dtype: str = "fp32",
    optimizer: str = "AdamW",
    micro_batch_size: int = 2,
) -> dict[str, Any]:
    """Return the model, the optimizer, the loss function and a sample batch.

    Args:
        config: The path of the model's ``config.json``.
        task: ``"causal-lm"``, ``"masked-lm"``, ``"seq2seq-lm"`` or ``"sequence-classification"`` to
            train, or ``"generate"`` to generate text with a causal language model.
        seq_len: The number of tokens per sample, including generated ones. With ``"seq2seq-lm"``,
            the input and the output both have this number.
        lora_r: The rank of LoRA adapters, which are added by peft to the layers that it chooses for
            this architecture; all other parameters are frozen. 0: train all parameters.
        dtype: The data type of the model's weights: ``"fp32"``, ``"bf16"`` or ``"fp16"``. Adapters
            are in fp32.
        optimizer: The name of a class in `torch.optim`, which is used with its defaults. AdamW is
            fused, as in the Trainer of transformers.
        micro_batch_size: The number of samples in the batch.

    Raises:
        PolicyError: H111 if transformers or peft is not installed, or does not know the model; H421
            if an argument has no meaning.
    """
    _check_choice("task", task, _AUTO_CLASSES)
    _check_choice("dtype", dtype, _DTYPES)
    _check_length(task, seq_len)
    transformers = load("transformers")
    model_config = _read_config(Path(config), transformers)
    if hasattr(model_config, "use_cache"):
        # A training step has no use for the keys and values of earlier tokens.
        model_config.use_cache = False
    text_config = model_config.get_text_config()
    if task == "sequence-classification" and getattr(text_config, "pad_token_id", None) is None:
        # To find the last token of each sample, decoder models must know which token is padding.
        text_config.pad_token_id = 0
    auto_class = getattr(transformers, _AUTO_CLASSES[task])
    try:
        model = auto_class.from_config(model_config, dtype=_DTYPES[dtype])
    except ValueError as error:
        raise _invalid(
            f"task={task!r} for the model {model_config.model_type!r}",
            f"transformers has no such model: {str(error).splitlines()[0]}",
            "set the task of the model, for example with --set task=masked-lm.",
        ) from error
    if task == _GENERATE:
        if lora_r:
            raise _invalid(
                f"lora_r={lora_r} with task={task!r}",
                "adapters are for training; before generating, they are merged into the weights",
                "leave lora_r out.",
            )
        tokens = _make_tokens(micro_batch_size, seq_len, model_config)
        return {"model": model, "evaluate": _generate_last_token, "batch": {"input_ids": tokens}}
    model.train()
    if lora_r:
        model = _with_adapters(model, task, lora_r)
    return {
        "model": model,
        "optimizer": _make_optimizer(optimizer, model),
        "loss_fn": lambda model, batch: model(**batch).loss,
        "batch": _make_batch(task, micro_batch_size, seq_len, model_config),
        "batch_size": micro_batch_size,
    }


def _read_config(path: Path, transformers: Any) -> Any:
    """Return the configuration in a file as an object of its class in transformers.

    Raises:
        PolicyError: H421 if the file is not the configuration of a model, H111 if the installed
            transformers has no such model.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        model_type = fields["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _invalid(
            f"{str(path)!r} cannot be used as a model's configuration: {error!r}",
            "it must be a JSON file with the model_type, as save_pretrained writes it",
            "pass the config.json of a model from its repository or its local folder.",
        ) from error
    # Looking up a model type imports the module of this model only.
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        raise PolicyError(
            f"transformers {transformers.__version__} has no model type {model_type!r}",
            limit="the model's code must be in the installed transformers; none is downloaded",
            fix=did_you_mean(
                model_type, list(known.keys()), otherwise="install a newer transformers."
            ),
            rule="H111",
        )
    return known[model_type].from_dict(fields)


def _with_adapters(model: Any, task: str, rank: int) -> Any:
    """Return the model with LoRA adapters of peft, and all other parameters frozen.

    Raises:
        PolicyError: H111 if peft is not installed or chooses no layers for this model.
    """
    if rank < 0:
        raise _invalid(f"lora_r={rank}", "a rank is at least 1", "write --set lora_r=16.")
    peft = load("peft")
    try:
        return peft.get_peft_model(model, peft.LoraConfig(r=rank, task_type=_PEFT_TASKS.get(task)))
    except ValueError as error:
        raise PolicyError(
            f"peft adds no adapters to this model: {str(error).splitlines()[0]}",
            limit="the layers with adapters are those that peft chooses for the architecture",
            fix=(
                "write a build() of your own that calls get_peft_model with target_modules, and"
                " pass it to `holdfast plan`."
            ),
            rule="H111",
        ) from error


def _make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise _invalid(
            f"optimizer={name!r}",
            "it must be the name of a class in torch.optim",
            "write, for example, --set optimizer=AdamW or --set optimizer=SGD.",
        )
    make: Callable[..., torch.optim.Optimizer] = kind
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "AdamW":
        return make(parameters, fused=True)
    return make(parameters)


def _make_batch(task: str, samples: int, seq_len: int, model_config: Any) -> dict[str, Any]:
    """Return a batch without padding, as the tokenizer and the collator of transformers make it."""
    tokens = _make_tokens(samples, seq_len, model_config)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if task == "sequence-classification":
        return {**batch, "labels": torch.zeros(samples, dtype=torch.long)}
    return {**batch, "labels": tokens.clone()}


def _make_tokens(samples: int, seq_len: int, model_config: Any) -> torch.Tensor:
    # The configurations of models with several modalities have one for their text.
    vocabulary = int(model_config.get_text_config().vocab_size)
    return torch.randint(0, vocabulary, (samples, seq_len))


def _generate_last_token(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Read all tokens but the last into the cache of keys and values, then generate one more.

    These are the two steps of `generate` with the highest memory: reading the longest possible
    prompt, and the last new token, when the cache is full. Only the logits of the last token are
    computed, as `generate` does.
    """
    tokens = batch["input_ids"]
    prompt = model(input_ids=tokens[:, :-1], use_cache=True, logits_to_keep=1)
    last: torch.Tensor = model(
        input_ids=tokens[:, -1:],
        past_key_values=prompt.past_key_values,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return last


def _check_length(task: str, seq_len: int) -> None:
    # A generated token follows a prompt of at least one.
    shortest = 2 if task == _GENERATE else 1
    if not isinstance(seq_len, int) or seq_len < shortest:
        raise _invalid(
            f"seq_len={seq_len!r}",
            f"it must be a whole number of at least {shortest}",
            "write, for example, --set seq_len=1024.",
        )


def _check_choice(name: str, value: str, choices: dict[str, Any]) -> None:
    if value not in choices:
        raise _invalid(
            f"{name}={value!r}",
            f"it must be one of {', '.join(choices)}",
            f"write, for example, --set {name}={next(iter(choices))}.",
        )


def _invalid(what: str, limit: str, fix: str) -> PolicyError:
    return PolicyError(what, limit=limit, fix=fix, rule="H421")
