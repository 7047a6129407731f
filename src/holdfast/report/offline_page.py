"""The walls of a page that opens offline: what enters it is escaped, and it runs nothing but its own two scripts.

All text is sanitised and escaped where it enters the HTML; data enters a script as JSON in which ``<``, ``>`` and
``&`` are written as escapes; the page's own policy names the two scripts by their digests and loads nothing.
``templates/page.html`` is a `string.Template`: ``$name`` there is filled in here. ``page.css`` and ``page.js`` go in
as they are.

Does not: know what a page shows (``page``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

from holdfast.core.errors import PolicyError
from holdfast.core.text import as_json_value, sanitise
from holdfast.core.version import __version__

_TEMPLATES = Path(__file__).with_name("templates")
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def fill_page(
    *,
    name: str,
    command: str,
    body: str,
    figures: Mapping[str, object],
    now: datetime | None = None,
) -> str:
    """Return a page.

    Args:
        name: Its title, as text.
        command: The line below it, as text.
        body: Sections, as HTML.
        figures: Of plotly, by the id of the element that each is drawn in.
        now: Time to write at its foot.

    Raises:
        PolicyError: H742, if plotly is not installed.
    """
    plotly = plotly_script()
    script = _read("page.js")
    return Template(_read("page.html")).substitute(
        policy=_policy(plotly, script),
        title=as_html(f"{name} - holdfast"),
        style=_read("page.css"),
        name=as_html(name),
        command=as_html(command, most=4000),
        body=body,
        written=as_html((now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")),
        version=as_html(__version__),
        figures=_json(figures),
        plotly=plotly,
        script=script,
    )


def plotly_script() -> str:
    """Return plotly.js.

    Raises:
        PolicyError: H742, if plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PolicyError(
            "plotly is not installed",
            limit="the page draws its curves with it",
            fix='install the extra: pip install "torch-holdfast[report]"; `holdfast watch RUN --once` needs nothing.',
            rule="H742",
        ) from error
    # A browser reads CR LF and CR as LF, and takes the digest of what it read.
    script: str = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    return script.replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    text = json.dumps(as_json_value(value, depth=12), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return "".join(_IN_SCRIPT.get(character, character) for character in text)


def as_html(value: object, *, most: int = 2000, lines: bool = False) -> str:
    """Return text as HTML that does nothing; see `sanitise`."""
    return escape(sanitise(value, most=most, lines=lines), quote=True)


def prose(value: str) -> str:
    """Return text in which words between backticks are set as code; they are escaped before."""
    return re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", as_html(value, most=4000))


def plot(title: str, place: str, hint: str) -> str:
    """Return a section in which a figure is drawn."""
    return f'<section><h2>{title}</h2><p class="hint">{hint}</p><div class="plot" id="{place}"></div></section>'
