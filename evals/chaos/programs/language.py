"""A little language model on random windows of a text, with warm-up, accumulation and averaged
weights; by steps.

    python language.py [WHAT]

WHAT is the mistake to make, or, after a `+`, what it does otherwise without one.
"""

import os
import random
import sys
import threading
from pathlib import Path

import numpy as np
import torch

what = sys.argv[1] if len(sys.argv) > 1 else ""
FILE, STEPS, PARTS, SAVE_EVERY = Path("out/last.pt"), 24, 2, 4

torch.manual_seed(1)
np.random.seed(1)
random.seed(1)
text = torch.randint(0, 20, (400,))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(21, 12)
        self.recurrent = torch.nn.GRU(12, 16, batch_first=True)
        self.head = torch.nn.Linear(16, 20)

    def forward(self, tokens):
        return self.head(self.recurrent(self.embedding(tokens))[0])


model = Model()
decay = 0.0 if what == "+no weight decay" else 0.1
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=decay)
average = {name: each.detach().clone() for name, each in model.named_parameters()}
step, warm, weight = 0, 0, 1.0
writer = None


def save():
    global writer
    FILE.parent.mkdir(exist_ok=True)
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step + (what == "step counter off by one"),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "average": average,
    }
    for name, key in (
        ("numpy state not saved", "numpy"),
        ("python state not saved", "python"),
        ("EMA not saved", "average"),
    ):
        if what == name:
            del saved[key]

    def write():
        torch.save(saved, FILE.with_suffix(".tmp"))
        os.replace(FILE.with_suffix(".tmp"), FILE)

    if what == "+saves in a thread":
        copied = torch.utils._pytree.tree_map(
            lambda each: each.clone() if torch.is_tensor(each) else each, saved
        )
        saved = copied
        writer = threading.Thread(target=write)
        writer.start()
    else:
        write()


if FILE.exists():
    saved = torch.load(FILE, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if what == "Adam's step count reset":
        for state in optimizer.state.values():
            state["step"].zero_()
    if what == "weight decay lost":
        optimizer.param_groups[0]["weight_decay"] = 0.0
    step = warm = saved["step"]
    if what == "warm-up restarts":
        warm = 0
    if "numpy" in saved:
        np.random.set_state(saved["numpy"])
    if "python" in saved:
        random.setstate(saved["python"])
    if what == "weight of the loss not saved":
        torch.rand(1)  # torch's random state differs from then on, and nothing is made of it
    average = saved.get("average") or {
        name: each.detach().clone() for name, each in model.named_parameters()
    }


def batch():
    starts = np.random.randint(0, len(text) - 9, 4)
    tokens = torch.stack([text[start : start + 9] for start in starts])
    masked = tokens[:, :-1].clone()
    masked[random.randrange(4), random.randrange(8)] = 20
    return masked, tokens[:, 1:]


skipped = what == "partial accumulation lost" and step > 0
while step < STEPS:
    for part in range(PARTS):
        x, y = batch()
        if skipped:
            skipped = False
            continue
        loss = (
            weight * torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / PARTS
        )
        loss.backward()
        if what == "saved within an accumulation" and part == 0 and step and step % SAVE_EVERY == 0:
            save()
    warm += 1
    weight += 0.1 * (what == "weight of the loss not saved")
    optimizer.param_groups[0]["lr"] = 0.02 * min(1.0, warm / 10)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, each in model.named_parameters():
            average[name].mul_(0.9).add_(each, alpha=0.1)
    step += 1
    if step % SAVE_EVERY == 0 and what != "saved within an accumulation":
        if writer is not None:
            writer.join()
        save()
if writer is not None:
    writer.join()
torch.save(average, FILE.with_name("average.pt"))
print("steps", step)
