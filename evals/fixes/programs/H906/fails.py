import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
images = torch.randn(512, 1024)

outputs = []
for epoch in range(400):
    hidden = model[0](images).detach()
    outputs.append(hidden)
print("epochs", len(outputs))
