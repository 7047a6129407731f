"""A training of some size, for what it costs to be watched: a transformer of 1.6 million weights.

python sized.py STEPS
"""

import sys

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randn(256, 32, 128))
steps = 0
while steps < int(sys.argv[1]):
    for (x,) in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % 50 == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt"
            )
