"""What the README says is run: its code, its commands, its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.prepared import run_prepared
from typer.testing import CliRunner

from holdfast.cli.main import make_app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
_BEFORE_THE_LOOP = """
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters())


def loss_fn(batch):
    return F.cross_entropy(model(batch[0]), batch[1])


"""
_AFTER_THE_LOOP = """
print(guard.epoch, guard.global_step, guard.resumed_from)
"""
_COSTS = ("step_overhead", "numerics_overhead", "malloc_threshold", "gpu_step_overhead")


def test_the_loop_of_the_readme_trains_and_resumes(tmp_path: Path) -> None:
    """The loop on the first screen works as it stands, given data, a model and a loss."""
    [loop] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "script.py"

    script.write_text(_BEFORE_THE_LOOP + loop + _AFTER_THE_LOOP)
    first = run_prepared([script], cwd=tmp_path, timeout=280)
    script.write_text(script.read_text().replace("max_epochs=10", "max_epochs=11"))
    second = run_prepared([script], cwd=tmp_path, timeout=280)

    assert first.returncode == 0, first.stderr
    assert first.stdout == "10 290 None\n"
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("11 319 ")
    assert "None" not in second.stdout


def test_each_way_in_fits_on_the_first_screen() -> None:
    """The four ways in are on the first 40 lines, and none needs more than 10 lines of code."""
    first_screen = "\n".join(README.splitlines()[:40])
    blocks = re.findall(r"```\w+\n(.*?)```", first_screen, re.DOTALL)

    assert len(blocks) == 4
    assert all(len(block.splitlines()) <= 10 for block in blocks)


def test_the_commands_of_the_readme_exist() -> None:
    """Each make target and each holdfast command that is named can be called."""
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in set(re.findall(r"(?:\$ |`)holdfast (\w+)", README)):
        assert CliRunner().invoke(make_app(command), [command, "--help"]).exit_code == 0, command


def test_links_lead_somewhere() -> None:
    """Every relative link in the README and in docs names a file."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page}: {link}"


def test_every_figure_of_the_readme_is_in_a_result_file() -> None:
    """Each ratio or time under "What it costs" is one that a result file gives.

    Nobody types a number.
    """
    from benchmarks.tables import row

    _, _, costs = README.partition("## What it costs")
    shown = re.findall(r"[\d.]+(?: µs)? \([\d.]+ to [\d.]+\)", costs.partition("\n## ")[0])
    results = [
        json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text()) for name in _COSTS
    ]
    rows = [row(figure) for result in results for figure in result["figures"]]
    assert len(shown) == 10
    assert [each for each in shown if not any(each in given for given in rows)] == []


def test_the_result_files_are_whole() -> None:
    """Each result names device, versions and commit, and holds figures that came from a full
    run.
    """
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert {"device", "versions", "commit", "figures", "parameters"} <= set(result), file.name
        assert result["quick"] is False, file.name
