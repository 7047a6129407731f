import torch
from torch.utils.data import DataLoader

torch.set_default_device("meta")  # stands for a GPU here
model = torch.nn.Linear(8, 2)
data = [torch.full((8,), float(number), device="cpu") for number in range(8)]
for batch in DataLoader(data, batch_size=4, shuffle=True):
    print("output", tuple(model(batch.to("meta")).shape))
