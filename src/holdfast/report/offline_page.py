"""The walls of a page that opens offline.

What enters it is escaped, and it runs nothing but its own two scripts.

``templates/frame.html`` is a template of Jinja2. All text is sanitised and escaped where it enters;
data enters a script as JSON in which ``<``, ``>`` and ``&`` are written as escapes; the page's own
policy names the two scripts by their digests and loads nothing. ``page.css`` and ``page.js`` go in
as they are.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from holdfast.core.errors import PolicyError
from holdfast.core.text import as_json_value, duration, moment, sanitise, size
from holdfast.core.version import __version__

_TEMPLATES = Path(__file__).with_name("templates")
_IN_SCRIPT = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def fill_page(
    template: str, figures: Mapping[str, object], now: datetime | None = None, **seen: Any
) -> str:
    """Return a page (H742 without plotly).

    Figures are by the id of the element that each is drawn in.
    """
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_harmless,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "moment": moment,
        "size": size,
        "duration": duration,
        "clip": as_html,
        "prose": _prose,
    }
    plotly, script = plotly_script(), _read("page.js")
    ours = {
        "style": _read("page.css"),
        "figures_json": _json(figures),
        "plotly": plotly,
        "script": script,
    }
    ours["policy"] = _policy(plotly, script)
    raw = {name: Markup(text) for name, text in ours.items()}  # noqa: S704 - nothing that a run said is in them
    return made.get_template(template).render(
        figures=figures,
        written=f"{now or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=__version__,
        **raw,
        **seen,
    )


def _harmless(value: object) -> object:
    """Return what stands between ``{{`` and ``}}`` as text that is harmless, before it is
    escaped.
    """
    return value if isinstance(value, Markup) else sanitise(value)


def as_html(value: object, most: int = 2000, *, lines: bool = False) -> Markup:
    """Return text as HTML that does nothing; see `sanitise`."""
    return escape(sanitise(value, most=most, lines=lines))


def _prose(value: str) -> Markup:
    """Return text in which words between backticks are set as code; they are escaped before."""
    text = str(as_html(value, 4000))  # of a `Markup` the new tags would be escaped too
    return Markup(re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", text))  # noqa: S704


def plotly_script() -> str:
    """Return plotly.js (H742 if plotly is not installed)."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PolicyError(
            "plotly is not installed",
            limit="the page draws its curves with it",
            fix=(
                'install the extra: pip install "torch-holdfast[report]"; `holdfast watch RUN'
                " --once` needs nothing."
            ),
            rule="H742",
        ) from error
    # A browser reads CR LF and CR as LF, and takes the digest of what it read.
    script: str = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    return script.replace("</script", "<\\/script")


def _policy(*scripts: str) -> str:
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    text = json.dumps(
        as_json_value(value, depth=12), ensure_ascii=True, allow_nan=False, separators=(",", ":")
    )
    return "".join(_IN_SCRIPT.get(character, character) for character in text)
