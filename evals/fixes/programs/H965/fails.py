import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(8 * 16 * 16, 10),
)
logits = model(torch.randn(2, 3, 64, 64))
print("logits", tuple(logits.shape))
