"""The page of a forecast in headless Chromium: it opens from a file, draws every device, and asks for nothing."""

from __future__ import annotations

import pytest
from tests.browser.test_page import browser, dragged, opened, pytestmark, requested, said
from tests.unit.forecast.made_forecasts import make_plans, small_device

from holdfast.report.memory_page import render

__all__ = ["browser", "pytestmark"]
_TEXTS = "return [...document.querySelectorAll('.hoverlayer text')].map(e => e.textContent).join(' ')"
_RANGE = "return document.getElementById('memory-0')._fullLayout.xaxis.range.map(Number)"


def test_it_opens_offline_and_draws_memory_by_owner(browser, tmp_path):
    """An area for each owner and the device's line, for each device, without a request or a word on the console."""
    page = render(make_plans(small_device(400, "one"), small_device(60, "two")))
    opened(browser, page, tmp_path / "page.html")
    assert said(browser) == []
    assert requested(browser) == []
    assert browser.execute_script("return document.documentElement.dataset.drawn") == "2"
    count = "return document.querySelectorAll(arguments[0]).length"
    for place in ("memory-0", "memory-1"):
        assert browser.execute_script(count, f"#{place} .scatterlayer .js-fill") >= 4
        assert browser.execute_script(count, f"#{place} .scatterlayer .js-line") >= 5
    before = browser.execute_script(_RANGE)
    dragged(browser, "memory-0")
    after = browser.execute_script(_RANGE)
    assert before[0] < after[0] < after[1] < before[1]


def test_hovering_tells_the_phase(browser, tmp_path):
    """Over a moment of the step stand the phase and what each owner holds."""
    opened(browser, render(make_plans(small_device(400))), tmp_path / "page.html")
    hover = "Plotly.Fx.hover('memory-0', {xval: arguments[0]}, ['xy'])"
    end = browser.execute_script(_RANGE)[1]
    seen = []
    for share in (number / 25 for number in range(1, 25)):
        browser.execute_script(hover, round(share * end))
        seen.append(browser.execute_script(_TEXTS))
    assert all("parameters" in text and "GiB" in text for text in seen)
    assert {phase for phase in ("forward", "backward") if any(phase in text for text in seen)} == {
        "forward",
        "backward",
    }


def test_hostile_texts_run_nothing(browser, tmp_path):
    """A device whose name is a script, and assumptions with tags in them, run nothing and load nothing."""
    hostile = "</script><img src=x onerror='window.hacked=1'>"
    opened(browser, render(make_plans(small_device(400, hostile))), tmp_path / "page.html")
    browser.execute_async_script("setTimeout(arguments[0], 500)")
    assert browser.execute_script("return window.hacked") is None
    assert requested(browser) == []
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert pytest.approx(0) == browser.execute_script("return document.querySelectorAll('main script').length")
