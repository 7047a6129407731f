import numpy as np

labels = np.array(["cat", None, "dog"])
np.save("labels.npy", labels)

labels = np.load("labels.npy", allow_pickle=True)
print("labels", len(labels))
