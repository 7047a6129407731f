"""A classifier that is trained by epochs, saved every 5 steps and resumed within an epoch.

Plain PyTorch.

    python classifier.py [WHAT]

WHAT is the mistake to make, or, after a `+`, what it does otherwise without one. Without: it
resumes exactly.
"""

import hashlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

what = sys.argv[1] if len(sys.argv) > 1 else ""
FOLDER, EPOCHS, SAVE_EVERY = Path("checkpoints"), 4, 5

torch.manual_seed(0)
inputs = torch.randn(50, 8)
targets = (inputs.sum(1) > 0).long()
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    torch.nn.BatchNorm1d(16),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(16, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
generator = torch.Generator()
step, first_epoch, position, best, resumed, asked = 0, 0, 0, float("inf"), False, False


def state(epoch, done):
    weights = model.state_dict()
    if what == "weights rounded to bf16":
        weights = {
            name: each.bfloat16() if each.is_floating_point() else each
            for name, each in weights.items()
        }
    saved = {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": step,
        "epoch": epoch,
        "position": done - (what == "position off by one"),
        "best": best,
        "rng": torch.get_rng_state(),
    }
    if what == "random state not saved":
        del saved["rng"]
    if what == "optimizer state dropped":
        del saved["optimizer"]
    return saved


def save(epoch, done, name=None):
    FOLDER.mkdir(exist_ok=True)
    if what == "written in place":
        torch.save(state(epoch, done), FOLDER / "step-last.pt")
        return
    number = f"{time.time():.6f}" if what == "named by the time" else f"{step:03}"
    path = FOLDER / (name or f"step-{number}.pt")
    torch.save(state(epoch, done), path.with_suffix(".tmp"))
    if what == "+checked":
        digest = hashlib.sha256(path.with_suffix(".tmp").read_bytes()).hexdigest()
        path.with_suffix(".sha256").write_text(digest)
    os.replace(path.with_suffix(".tmp"), path)


def newest():
    files = sorted(FOLDER.glob("step-*.pt"))
    if what == "+checked":
        files = [
            each
            for each in files
            if hashlib.sha256(each.read_bytes()).hexdigest()
            == each.with_suffix(".sha256").read_text()
        ]
    if what == "older checkpoint" and len(files) > 1:
        return files[-2]
    if what == "best instead of last" and (FOLDER / "best.pt").exists():
        return FOLDER / "best.pt"
    return files[-1] if files else None


if (path := newest()) is not None:
    saved = torch.load(path, weights_only=False)
    resumed = True
    if what == "BatchNorm buffers dropped":
        names = dict(model.named_parameters())
        model.load_state_dict(
            {name: each for name, each in saved["model"].items() if name in names}, strict=False
        )
    else:
        model.load_state_dict(saved["model"])
    if "optimizer" in saved:
        optimizer.load_state_dict(saved["optimizer"])
    if what == "momentum reset":
        optimizer.state.clear()
    scheduler.load_state_dict(saved["scheduler"])
    if what == "scheduler off by one":
        scheduler.step()
    if what == "learning rate from the start":
        optimizer.param_groups[0]["lr"] = 0.05
    step, first_epoch, position, best = (
        saved["step"],
        saved["epoch"],
        saved["position"],
        saved["best"],
    )
    if what == "epoch repeated":
        position = 0
    if what == "rest of the epoch dropped":
        first_epoch, position = first_epoch + 1, 0
    if "rng" in saved:
        torch.set_rng_state(saved["rng"])


def ask(*_):
    global asked
    asked = True


if what == "+saves when asked to end":
    signal.signal(signal.SIGTERM, ask)

for epoch in range(first_epoch, EPOCHS):
    generator.manual_seed(100 + (0 if resumed and what == "data order not restored" else epoch))
    own = None if what == "shuffled anew" else generator
    drop = resumed and what == "last batch dropped"
    loader = DataLoader(
        TensorDataset(inputs, targets), batch_size=8, shuffle=True, generator=own, drop_last=drop
    )
    start, position = position, 0
    batches = enumerate(itertools.islice(loader, start, None), start + 1)
    if resumed and start and own is None:
        torch.set_rng_state(saved["rng"])
    for done, (x, y) in batches:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % SAVE_EVERY == 0 or asked:
            is_best, best = loss.item() < best, min(best, loss.item())
            save(epoch, done)
            if is_best and what in ("best instead of last", "+best beside last"):
                save(epoch, done, "best.pt")
        if asked:
            sys.exit(0)
    model.eval()
    with torch.no_grad():
        print(
            f"epoch {epoch}: loss"
            f" {torch.nn.functional.cross_entropy(model(inputs), targets).item():.4f}"
        )
    model.train()
