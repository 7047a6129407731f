import numpy as np

labels = np.array(["1", "0", "1"]).astype(np.int)
print("labels", labels.sum())
