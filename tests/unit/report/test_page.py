"""The page as text: whole, safe against what a run printed, loading nothing.

Tests in a browser: tests/browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from tests.unit.report.made_runs import (
    VERDICT,
    add_process,
    happened,
    make_run,
    sample,
    write_events,
)

from holdfast.core.errors import PolicyError
from holdfast.recorder.run_files import OUTPUT_FILE, VERDICT_FILE
from holdfast.recorder.scalars import LONGEST_NAME, Scalars
from holdfast.report.page.gathering import gather
from holdfast.report.page.run_page import render

pytest.importorskip("plotly")

HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "'};window.hacked=1;//",
    '"}],"layout":{}};window.hacked=1;//',
    "\u2028window.hacked=1\u2029",
    "\x1b]0;title\x07\x1b[2J\x00\x07",
    "<!--<script>",
    "]]><svg onload=window.hacked=1>",
    '<a href="javascript:window.hacked=1">x</a>',
    "[x](javascript:window.hacked=1)",
    "$plotly ${script} %{y}",
    "\ud800 \u202e",
)


class _Parsed(HTMLParser):
    """Elements, attributes and texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)


def parsed(page: str) -> _Parsed:
    parser = _Parsed()
    parser.feed(page)
    return parser


def hostile_run(path):
    """Make a run in which every text that a script can choose is hostile."""
    everything = " ".join(HOSTILE)
    run = make_run(
        path / "a <b> & '\"", steps=20, argv=["python", *HOSTILE], **{"<i>key</i>": everything}
    )
    verdict = {
        **VERDICT,
        "summary": everything,
        "fix": everything,
        "title": everything,
        "where": everything,
    }
    verdict["evidence"] = [{"text": text, "source": text, "role": text} for text in HOSTILE]
    verdict |= {
        "tried": list(HOSTILE),
        "missing": list(HOSTILE),
        "runner_up": ["<b>", everything],
    }
    (run / VERDICT_FILE).write_text(json.dumps(verdict))
    events = [happened(text, number, 1, **{text: text}) for number, text in enumerate(HOSTILE)]
    write_events(run / "supervisor", *events)
    folder = add_process(
        run, [sample(1)], *events, pid=4_100_100, argv=list(HOSTILE), torch="<script>"
    )
    scalars = Scalars(lambda: folder, lambda _: None)
    scalars.write(
        [(text.encode("utf-8", "replace")[:LONGEST_NAME], 0.5) for text in HOSTILE] * 2, 1, 0
    )
    scalars.close()
    (run / OUTPUT_FILE).write_bytes(
        everything.encode("utf-8", "surrogatepass") + b"\xff\xfe\x00" * 50
    )
    (run / "stacks" / "0002-<b>.txt").write_bytes(everything.encode("utf-8", "surrogatepass"))
    return run


def test_texts_of_megabytes_are_cut(tmp_path):
    """A command, a verdict, a line of output and the name of a host of 10 MB each make no page
    of 40 MB.
    """
    long = "</script>" * 1_200_000
    ordinary = len(render(gather(make_run(tmp_path / "ordinary", steps=3))))
    run = make_run(tmp_path / "run", steps=3, argv=["python", long], hostname=long, verdict=False)
    (run / VERDICT_FILE).write_text(json.dumps({**VERDICT, "summary": long, "where": long}))
    (run / OUTPUT_FILE).write_text(long)
    assert len(render(gather(run))) < ordinary + 2**20


def test_the_page_tells_what_happened(tmp_path):
    """The verdict, how sure it is, the fix, the evidence and the environment are there as text."""
    page = render(gather(make_run(tmp_path / "speech-run")), now=datetime(2026, 11, 21, tzinfo=UTC))
    text = " ".join(
        part for parts in parsed(page).texts.values() for part in parts if len(part) < 10_000
    )
    for expected in (
        "A matrix product got shapes that do not fit",
        "The training stopped at step 300 in the forward pass",
        "proj",
        "Cause: certain",
        "pad or drop what has 80 mel bands",
        "mat1 and mat2 shapes cannot be multiplied (16x80 and 128x256)",
        "model.py:31 in forward",
        "another dtype",
        "holdfast explain H970",
        "python train.py --epochs 3",
        "speech-run",
        "/home/ada/speech",
        "forward (model.py:31)",
        "Written 2026-11-21 00:00 UTC",
    ):
        assert expected in text, expected
    assert "layer <code>proj</code>" in page


def test_the_cards_begin_with_what_the_run_has_learned(tmp_path):
    """The last and the lowest loss come first, and the date is not in the way of the time."""
    run = make_run(tmp_path)
    page = render(gather(run))
    cards = re.findall(r"<div><b[^>]*>([^<]*)</b><span>([^<]*)</span></div>", page)
    assert [title for _, title in cards[:4]] == ["last loss", "lowest loss", "steps", "duration"]
    assert cards[0][0] == f"{2.5 / 300**0.5:.6g}"
    assert ("14:13", "began 2026-09-21 UTC") in cards


def test_the_line_of_the_verdict_is_marked_in_the_stacks(tmp_path):
    """Of the two frames in the same file only the blamed one is marked, and its dump is open."""
    run = make_run(tmp_path)
    (run / "stacks" / "0002-1-a.txt").write_text(
        'thread 1 MainThread: sleep\n  File "/home/model.py", line 31 in forward\n'
        '  File "/home/model.py", line 310 in <module>\n'
    )
    page = render(gather(run))
    marks = re.findall(r"<mark>(.*?)</mark>", page)
    assert marks == [
        "    forward (model.py:31)",
        "  File &#34;/home/model.py&#34;, line 31 in forward",
    ]
    assert re.findall(r"<details open><summary>([^:<]*):", page) == ["stacks/0002-1-a.txt"]


def test_the_page_is_one_file_that_loads_nothing(tmp_path):
    """No element names a file elsewhere, and the page's own policy admits its two scripts and no
    loading at all.
    """
    page = render(gather(make_run(tmp_path)))
    elements = parsed(page).elements
    assert not [
        attributes
        for tag, attributes in elements
        if tag in ("img", "iframe", "object", "embed", "base")
    ]
    assert all("src" not in attributes for _, attributes in elements)
    assert [attributes["href"] for tag, attributes in elements if "href" in attributes] == [
        "data:,"
    ]
    policy = next(a["content"] for t, a in elements if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    assert len(digests) == 2
    assert re.findall(r"'sha256-([^']+)'", page) == digests
    assert "\r" not in page


def test_hostile_texts_stay_texts(tmp_path):
    """Nothing that a run said becomes an element, an attribute or a script, and the data is
    still valid JSON.
    """
    page = render(gather(hostile_run(tmp_path)))
    page.encode()
    found = parsed(page)
    tags = [tag for tag, _ in found.elements]
    assert tags.count("script") == 3
    assert not set(tags) & {"img", "svg", "a", "b", "i"} - {"b"}
    assert not [
        name for _, attributes in found.elements for name in attributes if name.startswith("on")
    ]
    (data,) = re.findall(
        r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL
    )
    assert not set(data) & set("<>&\u2028\u2029")
    assert data.isascii()
    figures = json.loads(data)
    assert set(figures) == {"timeline", "steps"}
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page.replace(_plotly(page), "")
    )
    texts = " ".join(part for parts in found.texts.values() for part in parts)
    assert "window.hacked=1" in texts


def _plotly(page: str) -> str:
    return max(re.findall(r"<script>(.*?)</script>", page, re.DOTALL), key=len)


def test_a_run_without_steps_verdict_or_anything_has_a_page(tmp_path):
    """The page says that nothing was recorded instead of failing."""
    (tmp_path / "supervised.json").write_text("{}")
    page = render(gather(tmp_path))
    assert "No step was recorded." in page
    assert json.loads(re.findall(r'id="figures">(.*?)</script>', page)[0]) == {}


def test_without_plotly_the_error_names_the_extra(tmp_path, monkeypatch):
    """A missing extra is an H742 that says what to install."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(PolicyError, match="pip install plotly") as caught:
        render(gather(make_run(tmp_path)))
    assert caught.value.rule == "H742"
