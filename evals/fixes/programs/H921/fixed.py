from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank = dist.get_rank()
samples = torch.arange(25.0)[rank::2]  # 13 and 12 samples
for batch in samples[: len(samples) // 4 * 4].split(4):
    total = batch.sum()
    dist.all_reduce(total)
print("rank", rank, "total", total.item())

dist.destroy_process_group()
