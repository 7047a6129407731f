"""A page that opens offline: its text is escaped, and it runs nothing but its own two scripts.

Pages are Jinja2 templates in ``templates``. All text is sanitised and escaped where it enters the
page. Figures enter a script as JSON in which ``<``, ``>`` and ``&`` are written as escapes. The
page's own Content-Security-Policy names the two scripts by their digests and loads nothing.
``page.css`` and ``page.js`` are inserted as they are.
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
# Characters that would end a script or a line of it, whatever JSON string they are in.
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
    template: str, figures: Mapping[str, object], now: datetime | None = None, **values: Any
) -> str:
    """Return a page.

    Args:
        template: Name of a file in ``templates``.
        figures: Figures for plotly.js, by the id of the element in which each is drawn.
        now: The time to write at the foot of the page; None for the present time.
        **values: What the template names.

    Raises:
        PolicyError: H742 if plotly is not installed.
    """
    plotly = plotly_script()
    script = _read("page.js")
    # Inserted without escaping: nothing that a run has recorded is in these texts, except in the
    # figures, which `_json_for_script` has made harmless.
    trusted = {
        "style": _read("page.css"),
        "figures_json": _json_for_script(figures),
        "plotly": plotly,
        "script": script,
        "policy": _security_policy(plotly, script),
    }
    return (
        _environment()
        .get_template(template)
        .render(
            figures=figures,
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
    }
    return environment


def _sanitised(value: object) -> object:
    """Return what stands between ``{{`` and ``}}`` as harmless text; Jinja2 then escapes it."""
    return value if isinstance(value, Markup) else sanitise(value)


def as_html(value: object, most: int = 2000, *, lines: bool = False) -> Markup:
    """Return text as HTML that does nothing; see `sanitise` for the arguments."""
    return escape(sanitise(value, most=most, lines=lines))


def _prose(value: str) -> Markup:
    """Return escaped text in which words between backticks are set as code."""
    # As a plain string, since a `Markup` would escape the new tags too.
    text = str(as_html(value, 4000))
    return Markup(re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", text))  # noqa: S704 - it is escaped


def plotly_script() -> str:
    """Return the source of plotly.js; H742 if plotly is not installed."""
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
    # A browser reads CR LF and CR as LF, and computes the digest of what it has read.
    script: str = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    return script.replace("</script", "<\\/script")


def _security_policy(*scripts: str) -> str:
    """Return a Content-Security-Policy that runs these scripts only, and loads nothing."""
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


def _json_for_script(value: object) -> str:
    """Return JSON that cannot end the script element in which it is written."""
    text = json.dumps(
        as_json_value(value, depth=12), ensure_ascii=True, allow_nan=False, separators=(",", ":")
    )
    return text.translate(_ESCAPES_IN_SCRIPT)
