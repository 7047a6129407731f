import torch

# The page has the weights themselves. Here it makes a file of the same kind.
torch.save(torch.nn.Linear(8, 2).state_dict(), "model.pt")
