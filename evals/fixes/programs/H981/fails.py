from pathlib import Path

import numpy as np

features = np.random.default_rng(0).normal(size=(1000, 64))
for epoch in range(20):
    np.save(f"disk/features-{epoch:03}.npy", features)
print("saved", len(list(Path("disk").glob("*.npy"))), "files")
