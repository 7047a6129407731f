import numpy as np

labels = np.array(["cat", None, "dog"])
np.save("labels.npy", labels)

labels = np.load("labels.npy")
print("labels", len(labels))
