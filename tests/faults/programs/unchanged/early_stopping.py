"""Keep the best weights, stop early, and measure the accuracy in a generator expression."""

import copy

import torch
from digits import dataset, digest, network
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(dataset(), batch_size=8, shuffle=True)
validation = DataLoader(dataset(64, seed=1), batch_size=32)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
best, best_weights, bad_epochs, history = 0.0, None, 0, []
for epoch in range(30):
    model.train()
    epoch_losses = []
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        epoch_losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        hits = sum(
            (model(inputs).argmax(1) == labels).sum().item() for inputs, labels in validation
        )
    accuracy = hits / 64
    scheduler.step(sum(epoch_losses) / len(epoch_losses))
    history.append((accuracy, scheduler.get_last_lr()))
    print("epoch", epoch, "accuracy", accuracy)
    if accuracy > best:
        best, bad_epochs = accuracy, 0
        best_weights = copy.deepcopy(model.state_dict())
        torch.save(best_weights, "best.pt")
    else:
        bad_epochs += 1
    if bad_epochs >= 2:
        break
print("digest", digest(model), epoch, best, history)
model.load_state_dict(best_weights)
print("best", digest(model))
