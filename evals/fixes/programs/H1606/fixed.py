import numpy as np

np.save("data.npy", np.ones((1000, 1000), dtype="float32"))
rows = np.load("data.npy", mmap_mode="r")
with open("data-of-the-other-job.npy", "w+b") as file:
    file.truncate(100_000)
print("sum", rows.sum())
