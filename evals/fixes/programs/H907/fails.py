import numpy as np

features = np.lib.format.open_memmap("features.npy", "w+", "float32", shape=(300_000, 256))
features.flush()
del features

features = np.load("features.npy")
features = features.astype("float64")
print("mean", features.mean())
