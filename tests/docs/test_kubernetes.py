"""The job of `docs/how-to/kubernetes.md` continues a run that Kubernetes stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from tests.docs.pages import DOCS, blocks

_TRAIN = """
import sys
import torch
import holdfast

model = torch.nn.Linear(2, 1)
guard = holdfast.Guard(
    "run",
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loader=[torch.ones(4, 2)] * 10,
)
print("resumed at", guard.global_step, flush=True)
for batch in guard.batches(max_steps=int(sys.argv[1])):
    guard.step(batch, lambda x: model(x).square().mean())
    print("step", flush=True)
"""


def _job() -> Any:
    (text,) = (
        block.text
        for block in blocks(DOCS / "how-to" / "kubernetes.md")
        if block.title == "job.yaml"
    )
    return yaml.safe_load(text)["spec"]


def test_a_stopped_container_exits_with_the_code_that_starts_a_new_pod(tmp_path: Path) -> None:
    """The command of the container, sent SIGTERM, exits with the code of the rule, and resumes."""
    job = _job()
    (container,) = job["template"]["spec"]["containers"]
    rules = job["podFailurePolicy"]["rules"]
    codes = [code for rule in rules for code in rule.get("onExitCodes", {"values": []})["values"]]
    (tmp_path / "train.py").write_text(_TRAIN)
    program, *arguments = container["command"]
    assert program == "python"
    environment = os.environ | {each["name"]: each["value"] for each in container["env"]}

    def start(steps: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments, str(steps)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    with start(10**9) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "resumed at 0\n"
        assert pod.stdout.readline() == "step\n"
        pod.send_signal(signal.SIGTERM)
        # `communicate` would lose lines that `readline` has read ahead.
        steps_of_first_pod = 1 + pod.stdout.read().count("step")
    assert [pod.returncode] == codes

    completed = start(steps_of_first_pod + 1)
    printed, _ = completed.communicate(timeout=300)
    assert printed == f"resumed at {steps_of_first_pod}\nstep\n"
    assert completed.returncode == 0
