import torch

model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
for _ in range(10):
    optimizer.step()
    scheduler.step()
saved = {"epoch": 9, "scheduler": scheduler.state_dict()}

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
scheduler.load_state_dict(saved["scheduler"])
for _ in range(10):
    optimizer.step()
    scheduler.step()
print("learning rate", scheduler.get_last_lr())
