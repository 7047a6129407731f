import numpy as np
import torch

features = np.random.default_rng(0).normal(size=(32, 8))
model = torch.nn.Linear(8, 2)
logits = model(torch.from_numpy(features))
print("logits", tuple(logits.shape))
