"""Fine-tunes a language model of transformers by adapters: ``python -m recipes.lora``."""

from __future__ import annotations

import dataclasses
import shutil
import string
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from holdfast import DataLoader, Policy
from recipes.asr.settings import learning_rate_factor
from recipes.gpt.model import next_token_loss
from recipes.gpt.text import Characters, TextError, Windows, read_text, split_numbers
from recipes.lora.adapters import adapt, adapter_state
from recipes.options import RunOptions, insist_on_a_batch, read_options
from recipes.training import (
    Training,
    ending_clearly,
    find_device,
    fused_on,
    making_the_model,
    open_guard,
)

_TESTED = 64  # windows of what is held out
_MOST_SOURCE = 400_000  # characters of the standard library


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions(RunOptions):
    """Fine-tune a language model by low-rank adapters.

    By default from Python's reference to Python's source code.
    """

    run_dir: Path = Path("runs/lora")
    """Directory of the run.

    Checkpoints, records, report.html, result.json and adapter.safetensors.
    """

    max_steps: int = 300
    """Optimizer steps of the adapters, counted over all restarts of the run."""

    pretrained: Path | None = None
    """Folder of a causal language model of transformers with its tokenizer.

    None: a small Llama over characters,
    first trained on Python's reference, into <run-dir>/base/model.
    """

    base_steps: int = 600
    """Optimizer steps of that first training."""

    text: Path | None = None
    """A file in UTF-8 to fine-tune on, whose last tenth is held out. none: source code of the
    standard library."""

    targets: str = "q_proj,v_proj"
    """Linear layers that get an adapter, by the last part of their names."""

    rank: int = 4
    """Of each adapter."""

    alpha: float = 8.0
    """What an adapter gives is multiplied by alpha / rank."""

    dropout: float = 0.0
    """Probability, before each adapter."""

    batch_size: int = 16
    """Windows in an update."""

    context: int = 64
    """Tokens of a window."""

    learning_rate: float = 5e-3
    """Highest rate of AdamW; it rises over the first tenth of the steps and falls to 0."""

    eval_steps: int = 100
    """Steps between tests on what is held out."""

    def check(self) -> None:
        """Look at each option.

        Raises:
            OptionError: One has a value that makes no training.
        """
        RunOptions.check(self)
        self.at_least(
            {
                "batch_size": 1,
                "context": 1,
                "rank": 1,
                "eval_steps": 1,
                "base_steps": 0,
                "dropout": 0,
            }
        )
        self.above_zero("learning_rate")
        self.insist("dropout", self.dropout < 1, "a share from 0 to below 1 is needed")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, and return what ``result.json`` holds."""
    options, policy = read_options(
        LoraOptions, argv, policy_file=Path(__file__).with_name("policy.yaml")
    )
    device = find_device(options)
    with ending_clearly(TextError):
        text = _source_code() if options.text is None else read_text(options.text)
        model, encode = _base(options, policy, device)
        windows, held_out = split_numbers(encode(text), options.context)
        insist_on_a_batch(options.batch_size, len(windows), "windows")
        with making_the_model():
            torch.manual_seed(options.seed)
            names = [name.strip() for name in options.targets.split(",")]
            found = adapt(
                model, names, rank=options.rank, alpha=options.alpha, dropout=options.dropout
            )
        if not found:
            raise TextError(
                f"--targets {options.targets}: no linear layer has such a name.\nFix: name some"
                " that it has."
            )
    with ending_clearly(TextError, options.run_dir):
        before = _held_out_loss(model.eval(), held_out, device)
        guard, training = _trained(options, policy, model.train(), windows, held_out, device)
        with guard.evaluate():
            after = _held_out_loss(model, held_out, device)
        state = adapter_state(model)
        save_file(state, options.run_dir / "adapter.safetensors")
        share = sum(each.numel() for each in state.values()) / sum(
            each.numel() for each in model.parameters()
        )
        figures = {"held_out_loss_before": before, "held_out_loss": after, "trained_share": share}
        return training.finish(model, figures)


def _base(options: LoraOptions, policy: Policy, device: torch.device) -> tuple[Any, Any]:
    """Return the model to adapt, and what makes token numbers of a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    characters = Characters(string.printable)
    folder = options.pretrained or options.run_dir / "base" / "model"
    if options.pretrained is None and not folder.is_dir():
        torch.manual_seed(options.seed)
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        config = LlamaConfig(
            vocab_size=len(characters.all), max_position_embeddings=options.context, **sizes
        )
        model = LlamaForCausalLM(config).to(device)
        steps = {"run_dir": folder.parent, "max_steps": options.base_steps, "resume": False}
        given = dataclasses.replace(options, learning_rate=3e-3, **steps)
        windows, held_out = split_numbers(characters.encode(read_text(None)), options.context)
        guard, _ = _trained(given, policy, model, windows, held_out, device)
        guard.close()
        unfinished = folder.with_name(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        if (folder / "tokenizer_config.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            return model, lambda text: tokenizer(text, return_tensors="pt")["input_ids"][0]
    except (OSError, ValueError) as error:
        raise TextError(
            f"{folder} cannot be used: {error}\nFix: name the folder of a causal language model."
        ) from error
    if model.config.vocab_size != len(characters.all):
        raise TextError(
            f"{folder} has no tokenizer.\nFix: save it there too, by tokenizer.save_pretrained."
        )
    return model, characters.encode


def _trained(
    options: LoraOptions,
    policy: Policy,
    model: Any,
    windows: Windows,
    held_out: Windows,
    device: torch.device,
) -> tuple[Any, Training]:
    """Train what is to be trained of a model.

    Return the guard, closed, and what wrote beside it.
    """
    loader = DataLoader(
        windows,
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        seed=options.seed,
        num_workers=options.num_workers,
        quarantine=0.001,
    )
    # No moments for what is frozen
    learnt = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        learnt, lr=options.learning_rate, weight_decay=0.0, fused=fused_on(device)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.max_steps)
    )

    def loss(batch: Any) -> torch.Tensor:
        tokens, targets = (part.to(device) for part in batch)
        return next_token_loss(model(input_ids=tokens, use_cache=False).logits, targets)

    guard = open_guard(
        options, policy, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    training = Training(guard, options)
    with guard:
        for batch in training.batches():
            result = guard.step(batch, loss)
            training.show(loss=result.loss)
            if guard.global_step % options.eval_steps == 0 and not result.skipped:
                with guard.evaluate():
                    found = _held_out_loss(model, held_out, device)
                guard.validated(found, keep=1)
    return guard, training


@torch.no_grad()
def _held_out_loss(model: Any, held_out: Windows, device: torch.device) -> float:
    few = (held_out[index] for index in range(0, len(held_out), max(1, len(held_out) // _TESTED)))
    tokens, targets = (torch.stack(each).to(device) for each in zip(*few, strict=True))
    return float(next_token_loss(model(input_ids=tokens, use_cache=False).logits, targets))


def _source_code() -> str:
    """Return source code of the standard library, file after file."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= _MOST_SOURCE:
            break
    return text[:_MOST_SOURCE]
