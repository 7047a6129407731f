"""Fill HTML pages that work offline, with escaped text and only two scripts.

Pages are rendered from the Jinja2 templates in ``templates``. All text is sanitized and escaped
when it is inserted. Figures are embedded as JSON with ``<``, ``>`` and ``&`` escaped. A
Content-Security-Policy allows only the page's two scripts, identified by their digests, and no
content from outside. ``page.css`` and ``page.js`` are inserted verbatim.

A page may instead load plotly.js from a file beside it (see ``shared_script``). No policy can name
a local file, and browsers do not check the digest of one. The policy therefore has
``strict-dynamic``: the page's own script, which is identified by its digest, may load another one,
and an element in the page may not.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from holdfast.core.errors import PolicyError
from holdfast.core.text import as_json_value, duration, moment, sanitise, size
from holdfast.core.version import __version__

_TEMPLATES = Path(__file__).with_name("templates")
# Escapes for characters that could end a script element or a line of a script, even within a JSON
# string.
_ESCAPES_IN_SCRIPT = str.maketrans(
    {
        "<": "\\u003c",
        ">": "\\u003e",
        "&": "\\u0026",
        "\u2028": "\\u2028",
        "\u2029": "\\u2029",
    }
)


def fill_page(
    template: str,
    figures: Mapping[str, object],
    now: datetime | None = None,
    *,
    plotly_addresses: Sequence[str] = (),
    **values: Any,
) -> str:
    """Return an HTML page that is rendered from a template.

    Args:
        template: Name of a file in ``templates``.
        figures: Figures for plotly.js, keyed by the id of the HTML element that shows them.
        now: The time to show at the foot of the page; by default the current time.
        plotly_addresses: Where the page looks for plotly.js, as returned by `share_script`. If
            empty, the page contains it.
        **values: Variables of the template.

    Raises:
        PolicyError: H742 if plotly is not installed.
    """
    plotly = "" if plotly_addresses else plotly_script()
    # Part of the script, so that its digest covers the addresses too.
    addresses = _json_for_script(list(plotly_addresses))
    script = f"const PLOTLY_ADDRESSES = {addresses};\n{_read('page.js')}"
    # These texts are inserted without escaping. The only text from the run in them is in the
    # figures, which `_json_for_script` has escaped.
    trusted = {
        "style": _read("page.css"),
        "figures_json": _json_for_script(figures),
        "plotly": plotly,
        "script": script,
        "policy": _security_policy(plotly, script, may_load=bool(plotly_addresses)),
    }
    return (
        _environment()
        .get_template(template)
        .render(
            figures=figures,
            plotly_file=plotly_addresses[-1] if plotly_addresses else "",
            written=f"{now or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            version=__version__,
            **{name: Markup(text) for name, text in trusted.items()},  # noqa: S704 - see above
            **values,
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_sanitised,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "moment": moment,
        "size": size,
        "duration": duration,
        "clip": as_html,
        "prose": _prose,
        "base64": _base64,
    }
    return environment


def _sanitised(value: object) -> object:
    """Return the sanitized value of a ``{{ expression }}``, which Jinja2 escapes afterward."""
    return value if isinstance(value, Markup) else sanitise(value)


def as_html(value: object, most: int = 2000, *, lines: bool = False) -> Markup:
    """Return a value as sanitized and escaped HTML. See `sanitise` for the arguments."""
    return escape(sanitise(value, most=most, lines=lines))


def _prose(value: str) -> Markup:
    """Return escaped HTML in which text between backticks is code, and "5 %" stays on one line."""
    # Use a plain string, because a `Markup` would also escape the new tags.
    text = str(as_html(value, 4000))
    text = re.sub(r"(\d) %", "\\1\N{NO-BREAK SPACE}%", text)
    return Markup(re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", text))  # noqa: S704 - `as_html` has escaped it


def _base64(data: bytes) -> Markup:
    # No character of the base64 alphabet has a special meaning in HTML.
    return Markup(base64.b64encode(data).decode())  # noqa: S704 - see above


def plotly_script() -> str:
    """Return the source of plotly.js. Raises H742 if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PolicyError(
            "plotly is not installed",
            limit="the page draws its curves with plotly",
            fix="pip install plotly pillow; `holdfast watch RUN --once` works without them.",
            rule="H742",
        ) from error
    # Browsers convert CRLF and CR to LF before they compute the digest of a script.
    script: str = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    return script.replace("</script", "<\\/script")


def _security_policy(*scripts: str, may_load: bool) -> str:
    """Return a Content-Security-Policy that allows only these scripts and no outside content.

    Args:
        *scripts: The sources of the scripts. Empty ones are ignored.
        may_load: Whether these scripts may load others.
    """
    digests = [_base64(hashlib.sha256(script.encode()).digest()) for script in scripts if script]
    sources = [f"'sha256-{digest}'" for digest in digests]
    if may_load:
        sources.append("'strict-dynamic'")
    allowed = " ".join(sources)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _json_for_script(value: object) -> str:
    """Return a value as JSON that cannot end the script element in which it is embedded."""
    text = json.dumps(
        as_json_value(value, depth=12), ensure_ascii=True, allow_nan=False, separators=(",", ":")
    )
    return text.translate(_ESCAPES_IN_SCRIPT)
