"""The page in headless Chromium.

It opens from a file, draws, asks for nothing and runs nothing hostile.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.unit.report.made_runs import (
    VERDICT,
    add_process,
    happened,
    make_run,
    sample,
    write_events,
)
from tests.unit.report.test_page import hostile_run

from holdfast.recorder.run_files import SAMPLES_FILE, VERDICT_FILE
from holdfast.report.page.gathering import gather
from holdfast.report.page.run_page import render
from holdfast.report.page.shared_script import share_script

pytest.importorskip("plotly")
webdriver = pytest.importorskip("selenium.webdriver")
_CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (_CHROMIUM and _DRIVER), reason="chromium and chromedriver are not installed"
    ),
]
_DRAWN = "return document.documentElement.dataset.drawn"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--window-size=1280,1000",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of an ordinary run of two ranks."""
    return render(gather(make_run(tmp_path_factory.mktemp("run"), ranks=2)))


def opened(browser: Any, page: str, path: Path) -> Any:
    """Open a page from a file and wait until its plots are drawn.

    Nothing of an earlier page is left in the logs.
    """
    from selenium.webdriver.support.ui import WebDriverWait

    path.write_text(page, encoding="utf-8")
    browser.get("about:blank")
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(_DRAWN) is not None)
    return browser


def said(browser: Any) -> list[str]:
    """Return what the console said."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requested(browser: Any) -> list[str]:
    """Return the addresses that were asked for, but the page, data in it and what its policy
    stopped.
    """
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {
        m["params"]["requestId"]: m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    }
    assert asked, "the log of requests is empty: nothing would be noticed"
    for message in messages:
        if (
            message["method"] == "Network.loadingFailed"
            and message["params"].get("blockedReason") == "csp"
        ):
            asked.pop(message["params"]["requestId"], None)
    return [url for url in asked.values() if not url.startswith(("file:///", "data:", "blob:"))]


def test_the_page_opens_offline_and_draws(browser, page, tmp_path):
    """From a file, without a request or a word on the console, every panel and each mark of an
    event is there.
    """
    opened(browser, page, tmp_path / "page.html")
    assert said(browser) == []
    assert requested(browser) == []
    assert browser.execute_script(_DRAWN) == "2"
    count = "return document.querySelectorAll(arguments[0]).length"
    # 6 panels, in one 2 ranks differ
    assert browser.execute_script(count, "#steps .scatterlayer .js-line") == 7
    assert browser.execute_script(count, "#timeline .scatterlayer .point") == 5
    assert browser.execute_script(count, "#timeline .barlayer .point") >= 4
    sizes = (
        "return [...document.querySelectorAll('.plot .main-svg')].map(e => [e.clientWidth,"
        " e.clientHeight])"
    )
    assert all(width > 700 and height > 150 for width, height in browser.execute_script(sizes))
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('#steps .scatterlayer .js-line')].map(e => { const b"
        " = e.getBBox(); return [b.width, b.height] })"
    )
    assert all(width > 500 for width, _ in boxes)
    assert max(height for _, height in boxes) > 50
    wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.execute_script(wide)
    tall = "return [...document.querySelectorAll('.plot')].map(e => e.clientHeight)"
    before = browser.execute_script(tall)
    browser.set_window_size(900, 1000)
    time.sleep(1.0)  # plotly waits for the last of many changes
    assert browser.execute_script(tall) == before
    browser.set_window_size(1280, 1000)


def test_a_page_that_shares_its_script_draws_and_says_so_if_it_is_missing(browser, tmp_path):
    """It opens from a file with the script beside the runs or beside the page, under its policy.

    Without the script, one sentence takes the place of the plots.
    """
    run = make_run(tmp_path / "run")
    addresses = share_script(run / "report.html", [tmp_path])
    page = render(gather(run), plotly_addresses=addresses)
    opened(browser, page, run / "report.html")
    assert (said(browser), requested(browser)) == ([], [])
    assert browser.execute_script(_DRAWN) == "2"

    (tmp_path / "copied").mkdir()
    opened(browser, page, tmp_path / "copied" / "report.html")
    shown = "return document.getElementById('missing').hidden"
    assert browser.execute_script(_DRAWN) == "2"
    assert browser.execute_script(shown) is True

    (tmp_path / addresses[-1]).rename(tmp_path / "elsewhere.js")
    opened(browser, page, tmp_path / "copied" / "report.html")
    assert browser.execute_script(_DRAWN) == "0"
    assert browser.execute_script(shown) is False
    assert not browser.execute_script(
        "return [...document.querySelectorAll('.plot')].some(place => place.clientHeight)"
    )


def test_a_narrow_page_keeps_its_words_apart_and_the_output_opens_at_its_end(
    browser, page, tmp_path
):
    """No value is off its card, however long its name; the legend is below the title.

    The newest line is in sight.
    """
    long = page.replace("<th>hostname</th>", f"<th>{'scheduler._get_lr_called_' * 3}</th>")
    browser.set_window_size(500, 1000)
    opened(
        browser,
        long.replace('<pre class="end">', '<pre class="end">' + "line\n" * 500),
        tmp_path / "page.html",
    )
    browser.execute_script(
        "document.querySelectorAll('details').forEach(each => { each.open = true })"
    )
    edges = (
        "return [...document.querySelectorAll(arguments[0])].map(e =>"
        " e.getBoundingClientRect()[arguments[1]])"
    )
    assert max(browser.execute_script(edges, "section:last-of-type td", "right")) < 480
    places = ("#steps .xtitle", "bottom"), ("#steps .legend", "top")
    title, legend = (browser.execute_script(edges, *place) for place in places)
    assert title < legend
    scroll = (
        "const at = document.querySelector('section pre.end'), was = at.scrollTop; at.scrollTop +="
        " arguments[0];"
    )
    moved = [browser.execute_script(scroll + " return at.scrollTop - was", by) for by in (9, -9)]
    assert moved == [0, -9]  # nothing is below
    browser.set_window_size(1280, 1000)


def test_buttons_change_the_curves(browser, page, tmp_path):
    """The axis of the loss becomes logarithmic and linear again.

    Smoothing keeps gaps and ends where it began.
    """
    opened(browser, page, tmp_path / "page.html")
    click = (
        "document.getElementById(arguments[0]).click(); const at ="
        " document.getElementById('steps');"
    )
    axis, first = (
        "return at.layout.yaxis.type",
        "return at.data.find(e => e.mode === 'lines').y.slice(0, 3)",
    )
    assert [browser.execute_script(click + axis, "scale") for _ in range(2)] == ["log", "linear"]
    raw = browser.execute_script(f"const at = document.getElementById('steps'); {first}")
    smooth = [browser.execute_script(click + first, "smoothing") for _ in range(4)]
    assert smooth[0] == pytest.approx(
        [raw[0], (0.6 * raw[0] + raw[1]) / 1.6, (0.36 * raw[0] + 0.6 * raw[1] + raw[2]) / 1.96]
    )
    assert smooth[3] == raw
    assert (
        browser.execute_script("return document.getElementById('smoothing').textContent")
        == "smoothing: off"
    )
    assert said(browser) == []


def test_a_narrow_page_shows_all(browser, page, tmp_path):
    """At 400 pixels nothing is wider than the page, and the legend of the timeline is below its
    dates.
    """
    browser.set_window_size(400, 1000)
    try:
        opened(browser, page, tmp_path / "page.html")
        wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.execute_script(wide)
        place = (
            "const box = (what) => document.querySelector('#timeline ' +"
            " what).getBoundingClientRect();"
        )
        assert browser.execute_script(place + "return box('.legend').top >= box('.xtick').bottom")
        assert browser.execute_script(
            place + "return box('.main-svg').bottom >= box('.legend').bottom"
        )
    finally:
        browser.set_window_size(1280, 1000)


def test_images_of_the_run_are_shown_under_the_policy_of_the_page(browser, tmp_path):
    """Each is drawn from the page itself, enlarged, and nothing is asked for."""
    run = make_run(tmp_path / "run")
    for step, size in ((1, (4, 6, 3)), (2, (300, 2000))):
        path = run / "images" / "samples" / f"{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full(size, 99, np.uint8)).save(path)
    opened(browser, render(gather(run)), tmp_path / "page.html")
    assert (said(browser), requested(browser)) == ([], [])
    sizes = (
        "return [...document.querySelectorAll('.images img')].map(e => [e.naturalWidth, e.width,"
        " e.height])"
    )
    (natural, wide, _), small = browser.execute_script(sizes)
    assert small == [6, 318, 212]
    assert (natural, wide < 1320) == (2000, True)


def test_hostile_texts_run_nothing_in_a_browser(browser, tmp_path):
    """With every plot hovered and every part unfolded, nothing ran, nothing was loaded and no
    link was made.
    """
    opened(browser, render(gather(hostile_run(tmp_path))), tmp_path / "page.html")
    browser.execute_script(
        "for (const d of document.querySelectorAll('details')) d.open = true;for (const name of"
        " ['timeline', 'steps']) {  const place = document.getElementById(name); "
        " place.data.forEach((trace, number) => trace.x.forEach((_, point) => {    try {"
        " Plotly.Fx.hover(place, [{curveNumber: number, pointNumber: point}]) } catch (e) {} })) }"
    )
    browser.execute_async_script("setTimeout(arguments[0], 500)")
    assert browser.execute_script("return window.hacked") is None
    assert requested(browser) == []
    assert [
        message for message in said(browser) if "Refused" in message or "violates" in message
    ] == []
    assert (
        browser.execute_script(
            "return document.querySelectorAll('img, iframe, main svg a[*|href]').length"
        )
        == 0
    )
    shown = browser.execute_script("return document.body.innerText")
    assert "</script><script>window.hacked=1</script>" in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize("shares_script", [True, False])
@pytest.mark.parametrize("protected", [True, False])
def test_the_policy_of_the_page_would_stop_a_script_that_slipped_through(
    browser, page, tmp_path, protected, shares_script
):
    """If escaping ever failed, the browser would still refuse to run or load it.

    Without the policy it does both.
    """
    bad = (
        "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
        "<script src='http://127.0.0.1:9/x.js'></script><img src='http://127.0.0.1:9/p.png'>"
    )
    if shares_script:
        addresses = share_script(tmp_path / "page.html", [tmp_path])
        page = render(gather(make_run(tmp_path / "run")), plotly_addresses=addresses)
    page = page.replace("<main>", "<main>" + bad)
    if not protected:  # shows that this test, and the one above, would notice
        page = page.replace("Content-Security-Policy", "X-Nothing")
    opened(browser, page, tmp_path / "page.html")
    browser.execute_async_script("setTimeout(arguments[0], 500)")
    assert (browser.execute_script("return window.hacked") is None) == protected
    assert (requested(browser) == []) == protected


@pytest.mark.parametrize("what", ["nothing", "one step", "a full ring of 8 ranks"])
def test_runs_of_every_size_open(browser, tmp_path, what):
    """A run that recorded nothing, one with a single step, and a quarter of a million steps are
    drawn.
    """
    run = tmp_path / "run"
    write_events(
        run / "supervisor", *([] if what == "nothing" else [happened("attempt_started", 0)])
    )
    if what == "one step":
        add_process(run, [sample(1, loss=float("nan"))])
    elif what != "nothing":
        (run / VERDICT_FILE).write_text(json.dumps(VERDICT))  # which is not to be found out here
        other = {
            "loss": 1.0,
            "grad_norm": 2.0,
            "learning_rate": 0.1,
            "wait_seconds": 0.01,
            "host_bytes": 1 << 30,
        }
        steps = range(1, 32_769)
        rings = [
            add_process(
                run, [sample(step, **each) for step in steps], pid=4_100_000 + rank, rank=rank
            )
            / SAMPLES_FILE
            for rank, each in enumerate(({}, {**other, "seconds": 0.2}))
        ]
        for rank in range(2, 8):
            os.link(
                rings[rank % 2], add_process(run, pid=4_100_000 + rank, rank=rank) / SAMPLES_FILE
            )
    page = render(gather(run))
    assert len(page) < 16 << 20
    opened(browser, page, tmp_path / "page.html")
    assert browser.execute_script(_DRAWN) == ("0" if what == "nothing" else "2")
    assert said(browser) == []
