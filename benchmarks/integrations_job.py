"""What every framework trains in ``integrations``.

A small decoder over tokens, its data, its faults, its end.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

from benchmarks.forks import Counter

How = Literal["alone", "alone, auto_find_batch_size", "full"]
Fault = Literal[
    "none",
    "memory",
    "nan",
    "SIGTERM",
    "SIGKILL",
    "killed while saving",
    "flipped bit",
    "refused save",
]
FAULTS: tuple[Fault, ...] = (
    "memory",
    "nan",
    "SIGTERM",
    "SIGKILL",
    "killed while saving",
    "flipped bit",
    "refused save",
)

WORDS, LENGTH, BATCH = 64, 12, 4
STEPS, EVERY = 12, 4  # optimizer steps, and between saves
AT = 7  # the step after which the fault comes
# Before steps are timed: the diagnosis looks at all of the first 30, and at one in ten later
WARM_STEPS = 35
POISON = 2  # a token that makes a loss of NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of a training, which goes on from what it finds in its folder.

    The fault comes at step `AT` of the first start; those of memory and NaN come again. Dropout is
    0 where batches are cut, which is then a matter of rounding only. `without` leaves out the step
    that the NaN is in.
    """

    folder: Path
    fault: Fault
    how: How
    made: Counter
    first: bool = True
    accumulate: int = 2
    dropout: float = 0.1
    without: bool = False

    @property
    def steps(self) -> int:
        """Return the optimizer steps that are to be made."""
        return STEPS - self.without

    def data(self) -> list[dict[str, torch.Tensor]]:
        """Return the samples, in the order in which they are trained."""
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(
            3, WORDS, (STEPS * BATCH * self.accumulate, LENGTH), generator=generator
        )
        per_step = BATCH * self.accumulate
        if self.fault == "nan":
            tokens[AT * per_step + 1, 0] = POISON
        if self.without:
            tokens = torch.cat([tokens[: AT * per_step], tokens[(AT + 1) * per_step :]])
        return [{"input_ids": row, "labels": row.clone()} for row in tokens]


class Decoder(nn.Module):
    """A recurrent decoder with dropout and the faults of a life.

    Its loss is that of the next token.
    """

    def __init__(self, life: Life) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 24)
        self.cell = nn.GRU(24, 32, batch_first=True)
        self.dropout = nn.Dropout(life.dropout)
        self.head = nn.Linear(32, WORDS)
        self._made = life.made if life.fault == "memory" else None

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return logits of shape ``(batch, length, words)``, and the mean loss of the next
        token.
        """
        is_short = self._made is not None and self._made.get() >= AT and torch.is_grad_enabled()
        # From then on, as if somebody else had taken it
        if is_short and len(input_ids) > BATCH // 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        hidden = self.dropout(self.cell(self.embed(input_ids))[0])
        logits = self.head(hidden)
        found = {"logits": logits}
        if labels is not None:
            poisoned = (input_ids == POISON).any().to(logits.dtype)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            found = {"loss": loss * (1 + 0 * torch.log(1 - poisoned)), **found}
        return found


def step_was_made(life: Life, step: int) -> None:
    """Count a step, and bring the fault where it is time."""
    life.made.set(life.made.get() + 1)
    if life.fault == "refused save" and life.first and step in (AT, AT + 2):
        # For two steps the system refuses to write more than a KiB to any file of this process, as
        # a full disk would.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if step == AT else hard, hard))
    # After two checkpoints
    if life.first and step == (AT + 2 if life.fault == "flipped bit" else AT):
        if life.fault in ("SIGKILL", "flipped bit"):
            os.kill(os.getpid(), signal.SIGKILL)
        if life.fault == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)


def die_in(module: Any, name: str, at_call: int) -> None:
    """Let a function kill the process in one of its calls, half-way through what it writes."""
    usual: Callable[..., Any] = getattr(module, name)
    calls = 0

    def replaced(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*arguments, **named)

    setattr(module, name, replaced)


def ended(model: nn.Module) -> list[float]:
    values: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return values


def timed_job(steps: int) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """Return a decoder of 0.6 million weights, and its samples for so many steps of two batches
    of 8.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=3, n_head=4)
    )
    return model, [
        {"input_ids": each, "labels": each} for each in torch.randint(3, 512, (steps * 16, 64))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What is measured of one framework.

    Args:
        name: With its version.
        hows: With what of holdfast it is tried.
        live: Carries out a life, in a process of its own, and returns all weights.
        newest: Returns the file with the weights of the newest checkpoint.
        timed: Trains so many steps in a folder and returns the CPU time at the end of each.
    """

    name: str
    hows: tuple[How, ...]
    live: Callable[[Life], list[float]]
    newest: Callable[[Path, How], Path]
    timed: Callable[[How, Path, int], list[float]]
