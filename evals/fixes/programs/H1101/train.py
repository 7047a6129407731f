import mmap
import os

if not os.path.exists("index.bin"):
    with open("index.bin", "wb") as file:
        file.truncate(1 << 30)
with open("index.bin", "rb") as file:
    index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("index of", len(index), "bytes")
