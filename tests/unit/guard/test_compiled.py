"""A guarded run that uses ``torch.compile`` is killed and goes on.

What watches it is tested in ``learning``.
"""

from __future__ import annotations

import pytest
import torch
from tests.prepared import Prepared

PROGRAM = """
import os, signal, sys
import torch, holdfast
from torch import nn
run_dir, deadly, result = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(1)
data = [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(9)]
guard = holdfast.Guard(run_dir, model=model, optimizer=optimizer, loader=data, save_interval_steps=2)

def loss(batch):
    if guard.global_step == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(compiled(batch[0]), batch[1])

for batch in guard.batches(max_epochs=1):
    guard.step(batch, loss)
torch.save(model.state_dict(), result)
"""


@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    """SIGKILL inside a compiled step, and a restart.

    Dropout and all, the same weights to the last bit.
    """
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)

    def run(name: str, deadly: int) -> int:
        return Prepared(
            [program, tmp_path / name, deadly, tmp_path / f"{name}.pt"], cwd=tmp_path
        ).wait()

    assert [run("calm", -1), run("killed", 5), run("killed", -1)] == [0, -9, 0]
    calm, killed = torch.load(tmp_path / "calm.pt"), torch.load(tmp_path / "killed.pt")
    assert all(torch.equal(calm[name], killed[name]) for name in calm)
