"""`holdfast plan config.json`: the model that a configuration describes, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.core.errors import PolicyError
from holdfast.integrations.forecast_from_config import build

WIDTH = 64
LAYERS = 2
VOCABULARY = 320
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}


@pytest.fixture(autouse=True)
def without_memory() -> Iterator[None]:
    """Build all models on the meta device."""
    with torch.device("meta"):
        yield


def written(folder: Path, fields: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_a_causal_language_model_is_built_in_the_sizes_of_its_configuration(tmp_path):
    """All parameters are trained, and the batch has the requested size."""
    job = build(written(tmp_path, LLAMA), seq_len=48, micro_batch_size=3)
    parameters = list(job["model"].parameters())
    optimized = job["optimizer"].param_groups[0]["params"]
    # Queries and outputs, keys and values, the three products of the MLP, and two norms.
    layer = 2 * WIDTH**2 + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * 2 * WIDTH + 2 * WIDTH
    assert sum(p.numel() for p in parameters) == LAYERS * layer + 2 * VOCABULARY * WIDTH + WIDTH
    assert len(optimized) == len(parameters)
    assert job["optimizer"].defaults["fused"]
    assert job["batch"]["input_ids"].shape == (3, 48)
    assert job["batch"]["labels"].shape == (3, 48)
    assert job["model"].training


@pytest.mark.parametrize(
    ("fields", "task", "labels"),
    [
        (LLAMA, "sequence-classification", (2,)),
        (BERT, "masked-lm", (2, 16)),
        (BERT, "sequence-classification", (2,)),
    ],
)
def test_the_task_chooses_the_head_and_the_labels(tmp_path, fields, task, labels):
    """A classification has a label per sample, and a language model one per token."""
    job = build(written(tmp_path, fields), task=task, seq_len=16)
    assert job["batch"]["labels"].shape == labels
    if task == "sequence-classification":
        # Without it, decoder models refuse batches of more than one sample.
        assert job["model"].config.pad_token_id is not None


def test_the_weights_have_the_requested_data_type_and_the_optimizer_its_class(tmp_path):
    """Another optimizer than AdamW has its own defaults."""
    job = build(written(tmp_path, LLAMA), dtype="bf16", optimizer="SGD")
    assert {p.dtype for p in job["model"].parameters()} == {torch.bfloat16}
    assert type(job["optimizer"]) is torch.optim.SGD


def test_adapters_are_made_by_peft_for_the_task(tmp_path, monkeypatch):
    """The rank and the task reach peft; only what it leaves trainable is optimized."""
    passed = {}

    def get_peft_model(model: torch.nn.Module, config: Any) -> torch.nn.Module:
        passed.update(config)
        model.requires_grad_(requires_grad=False)
        model.lm_head.requires_grad_()
        return model

    fake = SimpleNamespace(LoraConfig=dict, get_peft_model=get_peft_model)
    monkeypatch.setitem(sys.modules, "peft", fake)
    job = build(written(tmp_path, LLAMA), lora_r=16)
    assert passed == {"r": 16, "task_type": "CAUSAL_LM"}
    assert len(job["optimizer"].param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    ("fields", "arguments", "rule", "word"),
    [
        (LLAMA, {"task": "regression"}, "H421", "causal-lm"),
        (LLAMA, {"task": "masked-lm"}, "H421", "no such model"),
        (LLAMA, {"dtype": "int4"}, "H421", "fp32"),
        (LLAMA, {"optimizer": "Adamw"}, "H421", "torch.optim"),
        (LLAMA, {"lora_r": -1}, "H421", "at least 1"),
        (LLAMA, {"seq_len": 0}, "H421", "at least 1"),
        (LLAMA, {"seq_len": 1, "task": "generate"}, "H421", "at least 2"),
        (LLAMA, {"lora_r": 4, "task": "generate"}, "H421", "adapters"),
        ({**LLAMA, "model_type": "lama"}, {}, "H111", "llama"),
        ({"vocab_size": 1}, {}, "H421", "model_type"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, fields, arguments, rule, word):
    """Each error says which values are allowed."""
    with pytest.raises(PolicyError) as refusal:
        build(written(tmp_path, fields), **arguments)
    assert refusal.value.rule == rule
    assert word in str(refusal.value)


@pytest.mark.parametrize(("package", "arguments"), [("transformers", {}), ("peft", {"lora_r": 4})])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, package, arguments):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PolicyError) as refusal:
        build(written(tmp_path, LLAMA), **arguments)
    assert refusal.value.rule == "H111"
    assert f"pip install {package}" in refusal.value.fix


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_plan_is_made_from_a_configuration(tmp_path):
    """The command takes the file in place of a factory, and its arguments with --set."""
    options = ["--device", "L4", "--micro-batch-size", "2", "--precision", "bf16", "--json"]
    result = CliRunner().invoke(
        make_app("plan"),
        ["plan", written(tmp_path, LLAMA), *options, "--set", "seq_len=64", "--set", "dtype=bf16"],
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    (device,) = shown["devices"]
    assert shown["arguments"]["seq_len"] == 64
    assert abs(device["verified"]["error"]) < 0.005
    parameters = shown["traced"]["bf16"]["parameters"]
    # bf16 weights, whose two moments are bf16 as well.
    assert device["owners"]["owners"]["optimizer state"] == pytest.approx(4 * parameters, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_generating_holds_the_cache_of_keys_and_values(tmp_path):
    """For each layer and token, a key and a value of half the width, and no training state."""
    samples, tokens = 64, 512
    options = ["--device", "L4", "--micro-batch-size", str(samples), "--precision", "fp32"]
    sets = ["--set", f"seq_len={tokens}", "--set", "task=generate"]
    result = CliRunner().invoke(
        make_app("plan"), ["plan", written(tmp_path, LLAMA), *options, *sets, "--json"]
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    (device,) = shown["devices"]
    cache_bytes = samples * tokens * LAYERS * 2 * (WIDTH // 2) * 4
    owners = device["owners"]["owners"]
    assert shown["only_evaluates"]
    assert owners["other"] > cache_bytes
    assert "optimizer state" not in owners
    assert abs(device["verified"]["error"]) < 0.005
