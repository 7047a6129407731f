"""Warm up the learning rate with a counter of steps, and leave each epoch with `break`."""

import torch
from digits import dataset, digest, network
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(dataset(), batch_size=4, shuffle=True)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = 0
running_loss = 0.0
for epoch in range(4):
    for i, (inputs, labels) in enumerate(loader):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1, (step + 1) / 60)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        step += 1
        running_loss += loss.item()
        if step % 10 == 0:
            print("step", step, running_loss / 10)
            running_loss = 0.0
        if i == 29:
            break
    print("epoch", epoch, "ends after batch", i)
print("digest", digest(model), step)
