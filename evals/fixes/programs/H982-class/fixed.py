import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
options = parser.parse_args()
torch.save({"weights": torch.randn(3), "options": options}, "last.pt")

torch.serialization.add_safe_globals([argparse.Namespace])
checkpoint = torch.load("last.pt")
print("learning rate", checkpoint["options"].lr)
