import torch
from torch.utils.data import DataLoader


def main():
    loader = DataLoader(
        torch.arange(8.0),
        batch_size=4,
        num_workers=1,
        multiprocessing_context="spawn",
        collate_fn=lambda batch: torch.stack(batch) / 8,
    )
    for batch in loader:
        print("batch", batch)


if __name__ == "__main__":
    main()
