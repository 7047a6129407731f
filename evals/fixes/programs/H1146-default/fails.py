import os

local_rank = int(os.environ["LOCAL_RANK"])
print("training on device", local_rank)
