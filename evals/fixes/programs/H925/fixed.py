import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(2))

    def forward(self, x, task):
        return self.heads[task](self.body(x))


dist.init_process_group("gloo")
model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 8), step % 2).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("rank", dist.get_rank(), "trained")
dist.destroy_process_group()
