"""Train a few steps under a framework.

In one of them memory is really short, from a given place on.

    python short_of_memory.py HOST PLACE FOLDER

HOST is loop, accelerate, transformers or lightning; PLACE is nowhere, forward, backward or
optimizer. Prints one line of JSON: digests of weights and optimizer state, steps, learning rate,
order of the data, and what the recorder holds.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.recorder.reader import read_events
from holdfast.testing import limit_memory

torch.set_num_threads(1)
# Never met: as under a limit from the beginning, activations of 4 MiB go back to the system
limit_memory(2**45)
SAMPLES, STEPS, WIDTH = 16384, 3, 64  # many and narrow: as much memory, and less to compute
MAX_STEPS = 4  # the second epoch begins
HEADROOM = {"forward": 84, "backward": 1, "optimizer": 11}  # MiB, of the 120 that a step takes
KINDS = ("out_of_memory", "retry", "recompute", "split", "roll_back", "stop", "skip_step")


class Block(nn.Module):
    """Keeps three times its input for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(nn.functional.gelu(self.layer(x)), 0.1, self.training)


class Net(nn.Module):
    """A table and some blocks; ``shortage`` is asked at each place."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__()
        torch.manual_seed(3)
        # Its moments and temporaries are 12 MiB each
        self.table = nn.Embedding(SAMPLES * STEPS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 1)
        self.shortage = shortage

    def forward(self, index: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.shortage.called_with(index)
        x = self.table(index)
        for number, block in enumerate(self.blocks):
            x = block(x)
            # What backward frees between may be enough: limited again
            if number >= 5 and x.requires_grad:
                x.register_hook(lambda _: self.shortage.at("backward"))
        return {"loss": self.head(x).square().mean()}


class Shortage:
    """Limits memory from a place in the second step on, until another batch is trained."""

    def __init__(self, place: str) -> None:
        self.place, self.seen, self.now = place, 0, set[int]()
        # Forward passes so far, and in which of them memory became short
        self.passes = self.limited = 0
        self.order: list[int] = []

    def collate(self, samples: list[int]) -> dict[str, torch.Tensor]:
        """Make a batch."""
        self.order.append(samples[0])
        return {"index": torch.tensor(samples)}

    def called_with(self, index: torch.Tensor) -> None:
        """Note the batch of a forward pass."""
        self.passes += 1
        if int(index[0]) not in self.now:
            self.now, self.seen = set(index.tolist()), self.seen + 1
            if self.limited:
                limit_memory(None)
        self.at("forward")

    def at(self, place: str) -> None:
        """Limit memory if this is the place."""
        if place == self.place and self.seen == 2 and self.limited in (0, self.passes):
            self.limited = self.passes
            limit_memory(HEADROOM[place] * 2**20)


def digest(values: Any) -> str:
    found = hashlib.sha256()
    for value in values:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def in_a_loop(model: Net, optimizer: Any, scheduler: Any, loader: Any, folder: Path) -> int:
    loss_fn = lambda batch: model(**batch)["loss"]  # noqa: E731
    guard = holdfast.Guard(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, save_interval_steps=1
    )
    with guard:
        for batch in islice(chain.from_iterable(repeat(loader)), MAX_STEPS):
            guard.step(batch, loss_fn)
    return guard.global_step


def under_accelerate(model: Net, optimizer: Any, scheduler: Any, loader: Any, folder: Path) -> int:
    from accelerate import Accelerator

    from holdfast.integrations.accelerate import accelerate_guard

    accelerator = Accelerator(cpu=True, project_dir=folder)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    given = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    guard = accelerate_guard(accelerator, save_interval_steps=1, **given)
    with guard:
        for batch in guard.batches(max_steps=MAX_STEPS):
            guard.step(batch, lambda batch: model(**batch)["loss"])
    return guard.global_step


def under_transformers(
    model: Net, optimizer: Any, scheduler: Any, loader: Any, folder: Path
) -> int:
    from transformers import TrainingArguments

    from holdfast.integrations.transformers import HoldfastTrainer

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=SAMPLES,
        max_steps=MAX_STEPS,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    given = {"data_collator": loader.collate_fn, "optimizers": (optimizer, scheduler)}
    trainer = HoldfastTrainer(model, arguments, train_dataset=loader.dataset, **given)
    trainer.train()
    return int(trainer.state.global_step)


def under_lightning(model: Net, optimizer: Any, scheduler: Any, loader: Any, folder: Path) -> int:
    import lightning.pytorch as pl

    from holdfast.integrations.lightning import HoldfastStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    trainer = pl.Trainer(
        max_steps=MAX_STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        default_root_dir=folder,
        strategy=HoldfastStrategy(),
    )
    trainer.fit(Module(), train_dataloaders=loader)
    return int(trainer.global_step)


HOSTS = {
    "loop": in_a_loop,
    "accelerate": under_accelerate,
    "transformers": under_transformers,
    "lightning": under_lightning,
}


def main(host: str, place: str, folder: Path) -> None:
    shortage = Shortage(place)
    model = Net(shortage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data: Any = range(SAMPLES * STEPS)
    loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES, collate_fn=shortage.collate)
    optimizer.register_step_pre_hook(lambda *_: shortage.at("optimizer"))
    torch.manual_seed(7)
    answer: dict[str, Any] = {}
    try:
        answer["steps"] = HOSTS[host](model, optimizer, scheduler, loader, folder)
    except holdfast.HoldfastError as error:
        answer["error"] = str(error)
    limit_memory(None)
    rings = sorted(folder.rglob("rank0"))
    events = [event for ring in rings for event in read_events(ring) if event.kind in KINDS]
    state = optimizer.state_dict()["state"]
    answer |= {
        "weights": digest(model.state_dict().values()),
        "optimizer": digest(
            value for number in sorted(state) for _, value in sorted(state[number].items())
        ),
        "rate": optimizer.param_groups[0]["lr"],
        "order": shortage.order,
        "short": shortage.limited > 0,
        "events": [[event.kind, event.data.get("promise")] for event in events],
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
