from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
print("rank", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
