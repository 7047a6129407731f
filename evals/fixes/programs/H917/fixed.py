import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 2).to(device)
x = torch.randn(4, 8).to(device)
print("logits", model(x).norm().item())
