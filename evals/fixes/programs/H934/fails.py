import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

cache_lock = threading.Lock()


def refresh_cache():
    while True:
        with cache_lock:
            time.sleep(0.5)


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        with cache_lock:
            return torch.tensor(index)


def main():
    threading.Thread(target=refresh_cache, daemon=True).start()
    time.sleep(0.1)
    for batch in DataLoader(Samples(), batch_size=2, num_workers=1, timeout=20):
        print("batch", batch.tolist())


if __name__ == "__main__":
    main()
