"""Trains the GPT: ``python -m recipes.gpt``, or on several processes ``torchrun ...

-m recipes.gpt``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from holdfast import DataLoader, Policy
from recipes.asr.settings import learning_rate_factor
from recipes.gpt.model import GPT, next_token_loss
from recipes.gpt.text import Characters, TextError, Windows, read_text, split_numbers
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
_WRITTEN = 200  # characters, in the end


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOptions(RunOptions):
    """Train a small GPT over characters, on Python's own reference or on a text of yours."""

    run_dir: Path = Path("runs/gpt")
    """Directory of the run: checkpoints, records, report.html and result.json."""

    text: Path | None = None
    """A file in UTF-8 to learn, whose last tenth is held out. none: the topics of Python's help().
    """

    batch_size: int = 16
    """Windows in an update; on several processes, of each."""

    context: int = 64
    """Characters of a window."""

    width: int = 96
    """Of all layers; a multiple of --heads."""

    heads: int = 4
    """Of the attention."""

    depth: int = 3
    """Blocks."""

    dropout: float = 0.0
    """Probability."""

    learning_rate: float = 3e-3
    """Highest rate of AdamW; it rises over the first tenth of the steps and falls to 0."""

    weight_decay: float = 0.1
    """Of matrices; biases and norms have none."""

    compile: bool = False
    """Whether the model is compiled by torch.compile."""

    eval_steps: int = 200
    """Steps between tests on what is held out."""

    def check(self) -> None:
        """Look at each option.

        Raises:
            OptionError: One has a value that makes no training.
        """
        RunOptions.check(self)
        self.at_least(
            {"batch_size": 1, "context": 1, "heads": 1, "width": 1, "depth": 0, "eval_steps": 1}
        )
        self.at_least({"dropout": 0, "weight_decay": 0})
        self.above_zero("learning_rate")
        self.insist("dropout", self.dropout < 1, "a share from 0 to below 1 is needed")
        self.insist(
            "width", self.width % self.heads == 0, f"a multiple of --heads {self.heads} is needed"
        )


@contextmanager
def process_group() -> Iterator[int]:
    """Join the processes that torchrun has started, if it has.

    The value is the rank of this one.
    """
    if "LOCAL_RANK" not in os.environ:
        yield 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    yield distributed.get_rank()
    # Not after an error, when others may be waiting in a collective
    distributed.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, and return what ``result.json`` holds."""
    options, policy = read_options(
        GptOptions, argv, policy_file=Path(__file__).with_name("policy.yaml")
    )
    with process_group() as rank:
        with ending_clearly(TextError):
            text = read_text(options.text)
            characters = Characters(text)
            windows, held_out = split_numbers(characters.encode(text), options.context)
            insist_on_a_batch(options.batch_size, len(windows), "windows")
            loader = DataLoader(
                windows,
                batch_size=options.batch_size,
                shuffle=True,
                drop_last=True,
                seed=options.seed,
                num_workers=options.num_workers,
                quarantine=0.001,
            )
        with ending_clearly(TextError, options.run_dir):
            return _train(options, policy, rank, loader, _Test(held_out, characters))


class _Test:
    """What is measured on what is held out.

    Args:
        held_out: Windows, of which some are taken, evenly spread.
        characters: Of the text.
    """

    def __init__(self, held_out: Windows, characters: Characters) -> None:
        self.characters = characters
        self._windows = [
            held_out[index] for index in range(0, len(held_out), max(1, len(held_out) // _TESTED))
        ]

    def loss(self, gpt: GPT, device: torch.device) -> float:
        """Return the mean loss; that of the first rank counts for all.

        The model must be in evaluation.
        """
        tokens, targets = (
            torch.stack(each).to(device) for each in zip(*self._windows, strict=True)
        )
        found = next_token_loss(gpt(tokens), targets)
        if distributed.is_initialized():
            distributed.broadcast(found, 0)
        return float(found)

    def text(self, gpt: GPT, device: torch.device) -> str:
        """Return what the model writes."""
        return self.characters.decode(
            gpt.written(self.characters.encode("The ").to(device)[None], _WRITTEN)[0]
        )


def _train(
    options: GptOptions, policy: Policy, rank: int, loader: DataLoader, test: _Test
) -> dict[str, Any]:
    device = find_device(options)
    torch.manual_seed(options.seed)
    with making_the_model():
        gpt = GPT(
            len(test.characters.all),
            context=options.context,
            width=options.width,
            heads=options.heads,
            depth=options.depth,
            dropout=options.dropout,
        ).to(device)
    wrapped = DistributedDataParallel(gpt) if distributed.is_initialized() else gpt
    model = torch.compile(wrapped) if options.compile else wrapped
    decayed = [each for each in gpt.parameters() if each.dim() > 1]
    others = [each for each in gpt.parameters() if each.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=fused_on(device)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.max_steps)
    )
    guard = open_guard(
        options, policy, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader
    )
    training = Training(guard, options, speaks=rank == 0)

    def loss(batch: Any) -> torch.Tensor:
        tokens, targets = (part.to(device) for part in batch)
        return next_token_loss(model(tokens), targets)

    with guard:
        for batch in training.batches():
            result = guard.step(batch, loss)
            training.show(loss=result.loss)
            if guard.global_step % options.eval_steps == 0 and not result.skipped:
                with guard.evaluate():
                    found = test.loss(gpt, device)
                guard.validated(found, keep=1)  # on each rank, with the same value
    with guard.evaluate():
        figures = {"held_out_loss": test.loss(gpt, device), "written": test.text(gpt, device)}
    return training.finish(gpt, figures)
