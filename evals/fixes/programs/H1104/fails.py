import struct

import torch

with open("features.bin", "wb") as file:
    file.write(struct.pack("<iiii", 1000, 64, 2, 1))

with open("features.bin", "rb") as file:
    rows, columns = struct.unpack("<qq", file.read(16))
features = torch.empty(rows, columns)
print("features", tuple(features.shape))
