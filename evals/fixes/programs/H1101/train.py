import mmap

import numpy as np

np.zeros(100_000_000, dtype="float32").tofile("index.bin")
with open("index.bin", "rb") as file:
    index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("index of", len(index), "bytes")
