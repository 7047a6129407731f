import torch

encoder = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Sigmoid())
decoder = torch.nn.Linear(16, 8)

x = torch.randn(4, 8)
hidden = encoder(x)
hidden += 0.1 * torch.randn_like(hidden)
loss = torch.nn.functional.mse_loss(decoder(hidden), x)
loss.backward()
print("gradient", encoder[0].weight.grad.norm().item())
