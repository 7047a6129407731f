import torch

# On a machine that has the network. Here it makes a file of the same kind.
torch.save(torch.nn.Linear(8, 2).state_dict(), "weights.pt")
