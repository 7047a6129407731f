import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.block = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return x


dist.init_process_group("gloo")
model = DistributedDataParallel(Model(), find_unused_parameters=True)
model(torch.randn(4, 8)).mean().backward()
print("rank", dist.get_rank(), "trained")
dist.destroy_process_group()
