"""Two networks against each other, each with an optimizer of its own.

Weights as safetensors, the rest beside them.

python gan.py [WHAT]
"""

import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

what = sys.argv[1] if len(sys.argv) > 1 else ""
FOLDER, STEPS = Path("run"), 12

torch.manual_seed(5)
noise = torch.Generator().manual_seed(6)
real = torch.randn(64, 4) + 2
makes = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
judges = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
)
optimizers = [
    torch.optim.Adam(each.parameters(), lr=0.01, betas=(0.5, 0.999)) for each in (makes, judges)
]
both = torch.nn.ModuleDict({"makes": makes, "judges": judges})
step = 0
if FOLDER.exists():
    both.load_state_dict(load_file(FOLDER / "weights.safetensors"))
    saved = torch.load(FOLDER / "rest.pt", weights_only=True)
    for number, each in enumerate(optimizers):
        if what != "one of two optimizers dropped" or number == 0:
            each.load_state_dict(saved["optimizers"][number])
    step = saved["step"]
    torch.set_rng_state(saved["rng"])
    if what != "generator of its own not saved":
        noise.set_state(saved["noise"])

loss = torch.nn.functional.binary_cross_entropy_with_logits
while step < STEPS:
    batch = real[torch.randint(0, 64, (8,))]
    made = makes(torch.randn(8, 3, generator=noise))
    wrong = loss(judges(made.detach()), torch.zeros(8, 1)) + loss(judges(batch), torch.ones(8, 1))
    optimizers[1].zero_grad()
    wrong.backward()
    optimizers[1].step()
    fooled = loss(judges(made), torch.ones(8, 1))
    optimizers[0].zero_grad()
    fooled.backward()
    optimizers[0].step()
    step += 1
    if step % 3 == 0:
        new = Path("new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        save_file(both.state_dict(), new / "weights.safetensors")
        rest = {"optimizers": [each.state_dict() for each in optimizers], "step": step}
        torch.save(
            {**rest, "rng": torch.get_rng_state(), "noise": noise.get_state()}, new / "rest.pt"
        )
        if FOLDER.exists():
            FOLDER.rename("old")
        os.rename(new, FOLDER)
        shutil.rmtree("old", ignore_errors=True)
print("loss", fooled.item())
