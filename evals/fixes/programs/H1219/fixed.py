import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(8, 2).to("meta")  # stands for a GPU here
data = [torch.full((8,), float(number), device="cpu") for number in range(8)]
for batch in DataLoader(data, batch_size=4, shuffle=True):
    print("output", tuple(model(batch.to("meta")).shape))
