"""A regression with loader workers that draw random numbers, in an order that a sampler shuffles by
epoch.

python augmented.py [WHAT]
"""

import itertools
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

what = sys.argv[1] if len(sys.argv) > 1 else ""
FILE, EPOCHS = Path("last.pt"), 3


class Noisy(Dataset):
    def __init__(self):
        self.values = torch.randn(48, 6, generator=torch.Generator().manual_seed(2))
        self.epoch = 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        if what == "worker seeds":
            noise = torch.randn(6)
        else:
            noise = torch.randn(
                6, generator=torch.Generator().manual_seed(1000 * self.epoch + index)
            )
        return self.values[index] + 0.1 * noise, self.values[index].sum()


torch.manual_seed(3)
data = Noisy()
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = DistributedSampler(data, num_replicas=1, rank=0)
first_epoch, position, step = 0, 0, 0
if FILE.exists():
    saved = torch.load(FILE, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first_epoch, position, step = saved["epoch"], saved["position"], saved["step"]
    torch.set_rng_state(saved["rng"])


def patient(loader):
    try:
        yield from loader
    except RuntimeError as error:  # the end of this process would wait for a worker that is stopped
        print(error)
        os._exit(1)


timeout = 8 if "timeout only" in what or what == "+timeout and files" else 0
# A descriptor is fetched from the worker, and that without a timeout
if what == "+timeout and files":
    torch.multiprocessing.set_sharing_strategy("file_system")
for epoch in range(first_epoch, EPOCHS):
    data.epoch = epoch
    if what == "sampler not re-seeded":
        sampler.set_epoch(epoch - first_epoch)
    else:
        sampler.set_epoch(epoch)
    loader = DataLoader(data, batch_size=6, sampler=sampler, num_workers=2, timeout=timeout)
    start, position = position, 0
    for done, (x, y) in enumerate(itertools.islice(patient(loader), start, None), start + 1):
        loss = (model(x).squeeze(1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
                "position": done,
                "step": step,
                "rng": torch.get_rng_state(),
            }
            torch.save(state, "last.tmp")
            os.replace("last.tmp", FILE)
print("steps", step, flush=True)
if timeout:
    os._exit(0)  # as above
