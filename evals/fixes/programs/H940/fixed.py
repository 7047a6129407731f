from functools import partial

import torch
from torch.utils.data import DataLoader


def scale(batch, by):
    return torch.stack(batch) / by


def main():
    loader = DataLoader(
        torch.arange(8.0),
        batch_size=4,
        num_workers=1,
        multiprocessing_context="spawn",
        collate_fn=partial(scale, by=8),
    )
    for batch in loader:
        print("batch", batch)


if __name__ == "__main__":
    main()
