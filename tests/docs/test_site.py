"""The site is built strictly, holds every rule and every public name, and asks nobody for
anything.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.pages import DOCS, ROOT

import holdfast
from holdfast.cli.main import COMMANDS
from holdfast.explain.rules import catalogue

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")


def _build(*options: str) -> subprocess.CompletedProcess[str]:
    """Build a site strictly.

    Without ``--quiet``: that hides warnings, and what is hidden is not counted either.
    """
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_site_is_built_strictly_and_is_whole(tmp_path: Path) -> None:
    """Without a warning, with every rule and every public name, and without anything from
    elsewhere.
    """
    ended = _build("--site-dir", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    every_rule_has_an_anchor_of_its_own(tmp_path)
    every_public_name_field_and_command_is_in_the_reference(tmp_path)
    every_module_for_users_is_in_the_reference(tmp_path)
    every_directive_was_carried_out(tmp_path)
    nothing_is_loaded_from_elsewhere(tmp_path)


def every_rule_has_an_anchor_of_its_own(site: Path) -> None:
    """`rules/#h108` and one page of a family have H108, and so every id of the catalogue."""
    overview = (site / "rules" / "index.html").read_text()
    listed = re.findall(r'<span id="(h\d+)"', overview)
    pages = [path.read_text() for path in (site / "rules").glob("*/index.html")]
    explained = [anchor for page in pages for anchor in re.findall(r'<h2 id="(h\d+)"', page)]
    expected = sorted(rule_id.lower() for rule_id in catalogue())
    assert sorted(listed) == expected
    assert sorted(explained) == expected


def every_public_name_field_and_command_is_in_the_reference(site: Path) -> None:
    """What can be imported from holdfast, set in a policy or typed after `holdfast` has its
    place in the site.
    """
    reference = "".join(page.read_text() for page in (site / "reference").rglob("index.html"))
    for name in holdfast.__all__:
        assert name == "__version__" or f'id="holdfast.{name}"' in reference, name
    for field in dataclasses.fields(holdfast.Policy):
        assert f'id="{field.name}"' in reference, field.name
    for command in COMMANDS:
        assert f'<h2 id="{command}">' in reference, command


def every_module_for_users_is_in_the_reference(site: Path) -> None:
    """The tools for tests and the integrations have their names in the site too."""
    inventory = "".join(page.read_text() for page in (site / "reference").rglob("index.html"))
    for name in (
        "holdfast.testing.memory_limited",
        "holdfast.testing.FakeClock",
        "holdfast.loader.order.orders.LengthBucketed",
        "holdfast.integrations.transformers.HoldfastMixin",
        "holdfast.integrations.transformers.last_good_checkpoint",
        "holdfast.integrations.accelerate.accelerate_guard",
        "holdfast.integrations.lightning.HoldfastStrategy",
        "holdfast.integrations.speechbrain.HoldfastMixin",
    ):
        assert f'id="{name}"' in inventory, name


def every_directive_was_carried_out(site: Path) -> None:
    """No page still holds a comment that asks for figures, rules or options.

    And figures are there.
    """
    for page in site.rglob("*.html"):
        assert not re.search(
            r"<!-- (?:figures|faults|rules|policy|presets|events|commands)", page.read_text()
        ), page
    assert (site / "comparison" / "index.html").read_text().count("<table>") >= 14


def nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site.

    It works where there is no network.
    """
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"", text)
        loaded += re.findall(
            r"<link\b(?![^>]*rel=\"(?:prev|next|canonical)\")[^>]*\bhref=\"([^\"]+)\"", text
        )
        assert loaded, page
        for address in loaded:
            assert "//" not in address, f"{page.relative_to(site)}: {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(?:https?:)?//", style.read_text()), style


def test_a_broken_link_a_missing_anchor_and_a_forgotten_page_fail_the_build(tmp_path: Path) -> None:
    """Under the settings of the site each of them is a warning that strict mode counts."""
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(
        "# A\n\n[a](nowhere.md) [b](index.md#nothing) [c](../src/nothing.py)\n"
    )
    (pages / "forgotten.md").write_text("# B\n")
    settings = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": str(pages),
        "hooks": [str(DOCS / "hooks.py")],
        "plugins": [],
        "nav": ["index.md"],
    }
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))
    ended = _build(
        "--config-file", str(tmp_path / "mkdocs.yml"), "--site-dir", str(tmp_path / "site")
    )
    assert ended.returncode != 0
    for told in (
        "'nowhere.md'",
        "#nothing'",
        "src/nothing.py, which does not exist",
        "- forgotten.md",
    ):
        assert told in ended.stderr, told


def test_the_makefile_builds_as_strictly() -> None:
    """`make docs` hides no warning."""
    called = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert called
    assert all(
        "--strict" in line and "--quiet" not in line and " -q" not in line for line in called
    )


def _hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_who_reads_the_repository_finds_the_tables_of_figures_too() -> None:
    """`python docs/hooks.py` writes them, after a measurement."""
    written = (DOCS.parent / "benchmarks" / "results" / "README.md").read_text()
    assert written == _hooks().tables_of_figures()


def test_a_figure_that_is_in_no_result_file_is_an_error() -> None:
    """Nobody can show a figure that was not measured, nor one that was renamed."""
    hooks = _hooks()
    assert "50 of 50" in hooks.figures("sigkill", ["holdfast, 0 workers: bit-identical*"])
    with pytest.raises(LookupError, match="no figure"):
        hooks.figures("sigkill", ["holdfast, 9 workers: bit-identical"])
    with pytest.raises(LookupError, match=r"no imagined\.json"):
        hooks.figures("imagined", [])


def test_links_of_pages_from_elsewhere_lead_to_pages_or_nowhere() -> None:
    """A README becomes a page; a script keeps its words; a file that is not there is told.

    Code is left alone.
    """
    hooks = _hooks()
    moved = hooks.redirected(
        "[a](../../docs/why.md#x) [b](train.py)",
        source="recipes/gan/README.md",
        page="recipes/gan.md",
    )
    assert moved == "[a](../why.md#x) b"
    back = hooks.redirected(
        "see [the GAN](../../recipes/gan/README.md)", source="docs/how-to/x.md", page="how-to/x.md"
    )
    assert back == "see [the GAN](../recipes/gan.md)"
    assert (
        hooks.redirected("```\n[a](b)\n```\n", source="docs/x.md", page="x.md")
        == "```\n[a](b)\n```\n"
    )


def test_a_link_to_a_file_that_does_not_exist_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Strict mode makes it an error."""
    with caplog.at_level("WARNING"):
        _hooks().redirected("[b](../no_such_file.py)", source="docs/x.md", page="x.md")
    assert "no_such_file.py" in caplog.text
