import os

local_rank = int(os.environ.get("LOCAL_RANK", 0))
print("training on device", local_rank)
