"""Images in the page: embedded, few, whole, and nothing else from their folders."""

from __future__ import annotations

import base64
import os

import numpy as np
import pytest
from PIL import Image
from tests.unit.report.made_runs import make_run
from tests.unit.report.test_page import HOSTILE, parsed

from holdfast.report.page import images
from holdfast.report.page.gathering import gather
from holdfast.report.page.run_page import render

pytest.importorskip("plotly")


def add(run, tag: str, step: int, level: int = 7, size: tuple[int, ...] = (4, 6)) -> bytes:
    path = run / "images" / tag / f"{step}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(size, level, np.uint8)).save(path)
    return path.read_bytes()


def shown(run) -> list[tuple[str, int]]:
    return [(seen.tag, seen.global_step) for seen in gather(run).images]


def test_the_page_shows_the_newest_and_some_earlier_ones_of_each_tag(tmp_path):
    """Each tag has its newest image, its oldest and three between, embedded and enlarged by a
    whole number.
    """
    run = make_run(tmp_path)
    files = {step: add(run, "samples", step, level=step) for step in range(10, 26)}
    add(run, "alignment", 3, size=(300, 400, 3))
    assert shown(run) == [("alignment", 3), *(("samples", step) for step in (25, 21, 17, 14, 10))]
    elements = [
        attributes for tag, attributes in parsed(render(gather(run))).elements if tag == "img"
    ]
    assert [(each["alt"], each["width"]) for each in elements[:2]] == [
        ("alignment, step 3", "400"),
        ("samples, step 25", "318"),
    ]
    kind, _, data = str(elements[1]["src"]).partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == files[25]


def test_what_is_no_image_is_passed_over_with_a_sentence(tmp_path):
    """Broken, huge, foreign and linked files and pipes leave a sentence; the others are shown.

    Nothing waits.
    """
    run = make_run(tmp_path / "run")
    whole = add(run, "good", 5)
    folder = run / "images" / "good"
    (folder / "1.png").write_bytes(whole[:-3])
    (folder / "2.png").write_bytes(b"<svg onload=alert(1)>")
    (folder / "3.png").symlink_to(folder / "5.png")
    os.mkfifo(folder / "4.png")
    (folder / ".tmp-9.png-1").write_bytes(whole)
    (folder / "notes.txt").write_text("x")
    (run / "images" / "elsewhere").symlink_to(tmp_path)
    (run / "images" / "file").write_text("x")
    picture = gather(run)
    assert [(seen.tag, seen.global_step) for seen in picture.images] == [("good", 5)]
    told = [problem for problem in picture.problems if "is left out" in problem]
    assert [problem.split(" is ")[0] for problem in told] == [
        f"image good of step {step}" for step in (4, 3, 2, 1)
    ]
    assert "PNG" in told[2]
    assert told[0] in " ".join(parsed(render(picture)).texts["p"])


def test_the_page_stays_bounded(tmp_path, monkeypatch):
    """Beyond the bound the newest image of each tag comes first, and the page says how many are
    missing.
    """
    run = make_run(tmp_path)
    size = max(len(add(run, tag, step)) for tag in ("a", "b") for step in (1, 2, 3))
    monkeypatch.setattr(images, "_MAX_TOTAL_BYTES", 3 * size)
    assert shown(run) == [("a", 3), ("a", 2), ("b", 3)]
    (problem,) = [problem for problem in gather(run).problems if "images" in problem]
    assert problem.startswith("3 ")


def test_a_hostile_tag_does_nothing(tmp_path):
    """The name of a folder is text in the page, whatever it holds."""
    run = make_run(tmp_path)
    for text in HOSTILE:
        name = os.fsdecode(
            text.replace("/", "|").replace("\0", "").encode("utf-8", "surrogatepass")
        )
        add(run, name, 1)
    found = parsed(render(gather(run)))
    pictures = [attributes for tag, attributes in found.elements if tag == "img"]
    assert len(pictures) == len(HOSTILE)
    assert all(set(each) == {"src", "width", "alt"} for each in pictures)
    assert sum(tag == "script" for tag, _ in found.elements) == sum(
        tag == "script" for tag, _ in parsed(render(gather(make_run(tmp_path / "plain")))).elements
    )
