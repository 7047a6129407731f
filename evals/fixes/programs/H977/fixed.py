import torch


def build(classes):
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, classes)
    )


torch.save(build(1000).state_dict(), "pretrained.pt")

model = build(10)
state = torch.load("pretrained.pt")
for name in ("2.weight", "2.bias"):
    del state[name]
missing = model.load_state_dict(state, strict=False).missing_keys
print("missing", missing)
print("loaded")
