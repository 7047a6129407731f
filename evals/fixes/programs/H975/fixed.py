import torch


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model(torch.randn(4, 8)).mean().backward()
optimizer.step()
print("trained")
