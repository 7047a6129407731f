import multiprocessing

import torch
from torch.utils.data import DataLoader

multiprocessing.set_start_method("fork")
loader = iter(DataLoader(torch.arange(64.0), batch_size=4, num_workers=1))
print("first", next(loader).tolist())


def evaluate():
    total = sum(batch.sum() for batch in loader)
    print("total", total.item())


process = multiprocessing.Process(target=evaluate)
process.start()
process.join(60)
raise SystemExit(process.exitcode)
