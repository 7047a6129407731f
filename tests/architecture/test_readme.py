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
_COSTS = ("step_overhead", "numerics_overhead", "malloc_threshold", "gpu_step_overhead")


def test_the_loop_of_the_readme_runs_before_and_after(tmp_path: Path) -> None:
    """The two loops are pasted into a script as they stand.

    Both train, and the second one resumes.
    """
    _, _, section = README.partition("### 3. Guard a loop")
    before, after = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:2]
    ending = (
        "\nassert guard.epoch == 10 and not result.skipped\nprint(guard.global_step,"
        " guard.resumed_from)"
    )
    script = tmp_path / "script.py"
    script.write_text(before + after + ending)
    for resumed in (False, True):
        if resumed:
            script.write_text(
                script.read_text()
                .replace("max_epochs=10", "max_epochs=11")
                .replace("== 10", "== 11")
            )
        ended = run_prepared([script], cwd=tmp_path, timeout=280)
        assert ended.returncode == 0, ended.stderr
        assert ("None" not in ended.stdout) is resumed


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
