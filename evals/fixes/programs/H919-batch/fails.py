import torch

model = torch.nn.Linear(8, 2).to("meta")  # stands for a GPU here
batch = {"x": torch.randn(4, 8), "weight": torch.ones(4, 2)}

device = next(model.parameters()).device
output = torch.addcmul(model(batch["x"].to(device)), model.bias, batch["weight"])
print("output", tuple(output.shape))
