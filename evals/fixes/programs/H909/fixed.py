import numpy as np

samples = np.arange(4_000_000) % 10
print("labels", samples.sum())
