import numpy as np

features = np.lib.format.open_memmap("features.npy", "w+", "float32", shape=(300_000, 256))
features.flush()
del features

features = np.load("features.npy", mmap_mode="r")
total = 0.0
for first in range(0, len(features), 10_000):
    total += features[first : first + 10_000].sum(dtype="float64")
print("mean", total / features.size)
