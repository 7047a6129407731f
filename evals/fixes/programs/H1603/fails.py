import os
import signal
import time

import torch

model = torch.nn.Linear(8, 2)
for step in range(100):
    model(torch.randn(4, 8)).mean().backward()
    time.sleep(0.01)
    if step == 50:
        os.kill(os.getpid(), signal.SIGTERM)  # what a scheduler sends
print("trained", step + 1, "steps")
